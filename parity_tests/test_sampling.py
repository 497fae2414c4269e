"""Sampling in both frameworks: parameters, noise, filters and penalties, by literal values."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.random import threefry_2x32

from jax_dflash.config import InputError
from jax_dflash.sampling_params import SamplingColumns, SamplingMode, SamplingParams, Stream
from parity_tests.tiny import FRAMEWORKS, numpy
from torch_ref import sampling as torch_sampling

GREEDY, SAMPLED, FILTERED = SamplingMode(), SamplingMode(True), SamplingMode(sampled=True, filtered=True)


def columns(f, num_reqs, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, seeds=0):
    """Columns of a batch; a number stands for every request."""

    def column(make, x):
        return make(np.broadcast_to(x, num_reqs))

    return SamplingColumns(
        column(f.floats, temperature), column(f.ints, top_k), column(f.floats, top_p),
        column(f.floats, repetition_penalty), column(f.ints, seeds),
    )  # fmt: skip


@functools.cache
def program(framework, name, mode):
    """A function of that name for a mode; in JAX compiled once per shape, so that tests of one shape share it."""
    function = getattr(FRAMEWORKS[framework].sampling, name)

    def run(*args, **optional):
        return function(*args, mode=mode, **optional)

    # Hardly anything is computed: unoptimised code compiles in half the time.
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0}) if framework == "jax" else run


def bools(f, x):
    return f.array(np.asarray(x, int), None) == 1


def process(f, logits, cols, mode, seen=None, drafts=None):
    optional = {} if seen is None else {"seen": bools(f, seen), "draft_tokens": f.ints(drafts)}
    return numpy(program(f.name, "process_logits", mode)(f.floats(logits), cols, **optional))


# Parameters


@pytest.mark.parametrize("wrong, message", [
    ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number from 1 to 2^31 - 1"),
    ({"temperature": -1.0}, "temperature=-1.0: expected 0 (greedy) or a number from 0.01 to 100"),
    ({"temperature": 1e-4}, "temperature=0.0001: expected 0 (greedy) or a number from 0.01 to 100"),
    ({"temperature": 1e39}, "temperature=1e+39: expected 0 (greedy) or a number from 0.01 to 100"),
    ({"temperature": math.nan}, "temperature=nan: expected a finite number"),
    ({"temperature": "hot"}, "temperature='hot': expected a finite number"),
    ({"top_k": -1}, "top_k=-1: expected a whole number from 0 to 2^31 - 1; 0 keeps every token"),
    ({"top_k": 2.0}, "top_k=2.0: expected a whole number from 0 to 2^31 - 1; 0 keeps every token"),
    ({"top_p": 0.0}, "top_p=0.0: expected a number above 0 and up to 1; 1 keeps every token"),
    ({"top_p": 1.5}, "top_p=1.5: expected a number above 0 and up to 1; 1 keeps every token"),
    ({"repetition_penalty": 0}, "repetition_penalty=0: expected a number from 0.01 to 100; 1 is no penalty"),
    ({"seed": 2**31}, "seed=2147483648: expected a whole number from 0 to 2^31 - 1"),
    ({"seed": True}, "seed=True: expected a whole number from 0 to 2^31 - 1"),
    ({"ignore_eos": 1}, "ignore_eos=1: expected True or False"),
])  # fmt: skip
def test_parameters_that_cannot_be_used(wrong, message):
    """A parameter that fails, or is silently another one, only inside a compiled program."""
    with pytest.raises(InputError) as error:
        SamplingParams(**{"max_new_tokens": 8} | wrong)
    assert str(error.value) == message


def test_the_mode_of_a_batch():
    """A greedy batch that pays for noise or a sort, or a mixed one compiled without what one of its requests needs."""
    plain, hot = SamplingParams(8), SamplingParams(8, temperature=0.5)
    assert (plain.greedy, plain.filtered, plain.penalised) == (True, False, False)
    assert SamplingMode.of([]) == SamplingMode.of([plain, SamplingParams(8, top_k=5)]) == GREEDY
    assert SamplingMode.of([plain, hot]) == SAMPLED
    assert SamplingMode.of([plain, SamplingParams(8, temperature=1, top_k=5)]) == SamplingMode(True, True, False)
    assert SamplingMode.of([plain, SamplingParams(8, temperature=1, top_p=0.5)]) == SamplingMode(True, True, False)
    assert SamplingMode.of([plain, SamplingParams(8, repetition_penalty=1.2)]) == SamplingMode(False, False, True)


# Noise


# Random123's known answers of threefry2x32 with 20 rounds: counter, key, answer.
KNOWN = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize("counter, key, answer", KNOWN)
def test_known_answers_of_threefry(counter, key, answer):
    """A wrong constant, rotation or key injection: still random, but of no known quality and not the other framework's."""
    pairs = (torch.from_numpy(np.array(pair, np.uint32).view(np.int32)) for pair in (key, counter))
    assert tuple(int(word) % 2**32 for word in torch_sampling.threefry_2x32(*pairs)) == answer
    assert tuple(map(int, threefry_2x32(tuple(map(jnp.uint32, key)), jnp.array(counter, jnp.uint32)))) == answer


def test_bits_are_those_of_seed_position_and_token(f):
    """Bits that depend on the batch, on the vocabulary's size, or on words in another place: token 0 at seed 0, position 0
    is Random123's first answer; padded rows (position -1) give bits too."""
    seeds, positions = f.ints([[0], [5]]), f.ints([[0, -1], [2, 9]])

    def draw(seeds, positions):
        bits = f.sampling.random_bits
        return [bits(Stream.TARGET, seeds, positions, n) for n in (3, 8)] + [
            bits(Stream.TARGET, seeds[1], positions[1, 1:], 3)
        ]

    few, many, alone = map(numpy, f.run(draw, seeds, positions))
    assert int(few[0, 0, 0]) % 2**32 == 0x6B200159
    assert few.shape == (2, 2, 3) and many[..., :3].tolist() == few.tolist()
    assert alone[0].tolist() == few[1, 1].tolist()


def test_both_frameworks_draw_the_same_bits():
    """Two generators that agree in distribution only, so that sampled tokens can never be compared; the largest position,
    seed and stream, where a signed word would show."""
    rng = np.random.default_rng(0)
    seeds = np.append(rng.integers(0, 2**31, 40), [0, 2**31 - 1]).astype(np.int32)
    positions = np.append(rng.integers(0, 2**30, 40), [2**30 - 1, 2**30 - 1]).astype(np.int32)
    found = []
    for f in FRAMEWORKS.values():
        dtype = f.numerics.as_dtype("float32")

        def draw(seeds, positions, f=f, dtype=dtype):
            places = [(stream, seeds, positions, 101) for stream in Stream]
            bits = [f.sampling.random_bits(*place) for place in places]
            return bits, *(
                [draw(*place, dtype) for place in places] for draw in (f.sampling.uniform, f.sampling.gumbel)
            )

        found.append([np.stack(list(map(numpy, x))) for x in f.run(draw, f.ints(seeds), f.ints(positions))])
    bits, uniforms, noise = zip(*found, strict=True)
    assert np.array_equal(*(x.astype(np.int64) % 2**32 for x in bits)) and np.array_equal(*uniforms)
    np.testing.assert_allclose(*noise, rtol=0, atol=2e-6)


def test_streams_differ(f):
    """C85: drafts, target and acceptance drawn from one stream at the same place."""
    bits = [numpy(f.sampling.random_bits(s, f.ints([3]), f.ints([17]), 64))[0].tolist() for s in Stream]
    assert len({word for each in bits for word in each}) == 3 * 64


def test_extreme_bits_give_finite_noise(f, monkeypatch):
    """A uniform of 0 or 1 and infinite noise; and a tail cut at 16.6, which tokens of small probability need."""
    words = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    words = words if f.name == "jax" else words.view(np.int32)
    monkeypatch.setattr(f.sampling, "random_bits", lambda *place: f.array(words, None))
    dtype = f.numerics.as_dtype("float32")
    u = numpy(f.sampling.uniform(Stream.TARGET, None, None, 4, dtype))
    np.testing.assert_allclose(u, [2.0**-33, 1.5 * 2.0**-32, 0.5, 1 - 2.0**-24], rtol=1e-7)
    assert u.max() < 1
    noise = numpy(f.sampling.gumbel(Stream.TARGET, None, None, 4, dtype))
    np.testing.assert_allclose(noise, [22.8739, 21.7752, 0.366513, -2.8115], rtol=1e-4)


# Filters and penalties


def kept(f, probabilities, **filters):
    """Ids that remain of one row with these probabilities."""
    with np.errstate(divide="ignore"):
        logits = np.log([[probabilities]])
    return np.flatnonzero(process(f, logits, columns(f, 1, **filters), FILTERED)[0, 0] > -np.inf).tolist()


@pytest.mark.parametrize("filters, ids", [
    ({}, [0, 1, 2, 3, 4]),
    ({"top_k": 1}, [3]),
    ({"top_k": 3}, [0, 1, 3]),
    ({"top_k": 4}, [0, 1, 3, 4]),
    ({"top_k": 99}, [0, 1, 2, 3, 4]),
    ({"top_p": 1e-50}, [3]),  # 0 in float32
    ({"top_p": 0.39}, [3]),
    ({"top_p": 0.41}, [1, 3]),
    ({"top_p": 0.69}, [1, 3]),
    ({"top_p": 0.71}, [0, 1, 3]),
    ({"top_p": 0.96}, [0, 1, 2, 3, 4]),
    ({"top_k": 2, "top_p": 0.56}, [3]),  # of what top-k left, 4/7 = 0.571
    ({"top_k": 2, "top_p": 0.58}, [1, 3]),
    ({"top_p": 0.74, "temperature": 0.5}, [1, 3]),  # p^2, largest first: 0.561, 0.877 of the mass
    ({"top_p": 0.74, "temperature": 2.0}, [0, 1, 3]),  # p^(1/2): 0.300, 0.560, 0.744
])  # fmt: skip
def test_top_k_and_top_p(f, filters, ids):
    """Off by one token, top-p before top-k or before the temperature, mass not of what top-k left, nothing kept."""
    assert kept(f, [0.15, 0.3, 0.05, 0.4, 0.1], **filters) == ids


def test_ties_at_the_last_token_are_kept(f):
    """Which of equal tokens survives left to the order of a sort, which differs between frameworks."""
    assert kept(f, [0.2, 0.4, 0.2, 0.2, 0.0], top_k=2) == [0, 1, 2, 3]
    assert kept(f, [0.25, 0.05, 0.4, 0.25, 0.05], top_p=0.5) == [0, 2, 3]


def test_off_is_off_beside_a_filtered_request(f):
    """Tokens lost at top_p 1 because the mass before them rounds to 1."""
    assert kept(f, [0.5, 0.5, 1e-12, 1e-13, 0.0]) == [0, 1, 2, 3]


def test_filters_are_of_each_request_and_row(f):
    """One request's top-k taken for its neighbour, or one row's threshold for all rows."""
    logits = np.array([[[1, 2, 3], [3, 2, 1]], [[1, 2, 3], [3, 2, 1]]])
    cols = columns(f, 2, top_k=[1, 2], temperature=[1.0, 0.5])
    out = process(f, logits, cols, FILTERED)
    low = -np.inf
    assert out.tolist() == [[[low, low, 3], [3, low, low]], [[low, 4, 6], [6, 4, low]]]


def test_the_penalty_divides_positive_and_multiplies_negative_logits(f):
    """A penalty that makes negative logits likelier, touches unseen tokens or another request, or comes after the
    temperature; row i counts drafts before it only, and -1 is no token."""
    logits = np.tile([2.0, -2.0, 1.0, -1.0, 3.0], (2, 3, 1))
    cols = columns(f, 2, temperature=0, repetition_penalty=[2.0, 1.0])
    seen = [[True, True, False, False, False]] * 2
    out = process(f, logits, cols, SamplingMode(penalised=True), seen, [[4, -1], [4, -1]])
    first, later = [1.0, -4.0, 1.0, -1.0, 3.0], [1.0, -4.0, 1.0, -1.0, 1.5]
    assert out.tolist() == [[first, later, later], logits[1].tolist()]
    # By row the best is 3; then, with token 4 seen, 1 before 3/4; with both seen 3/4 before 2/4.
    cols = columns(f, 2, temperature=0.5, repetition_penalty=4.0, top_k=1)
    out = process(f, logits, cols, SamplingMode(True, True, True), seen, [[4, 2], [4, 2]])
    low = -np.inf
    assert out[0].tolist() == [[low, low, low, low, 6.0], [low, low, 2.0, low, low], [low, low, low, low, 1.5]]


def test_marking_seen_tokens(f):
    """Zeros behind the emitted tokens marked as token 0, -1 wrapped to the last id, what was seen forgotten."""
    seen = bools(f, [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    out = f.sampling.mark_seen(seen, f.ints([[1, 3, 0], [1, 0, 0], [-1, 0, 0]]), f.ints([2, 1, 1]))
    assert [np.flatnonzero(row).tolist() for row in numpy(out)] == [[1, 3], [1, 2], []]
