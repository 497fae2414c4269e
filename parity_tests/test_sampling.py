"""Sampling in both frameworks: parameters, noise, filters, penalties and the walk over drafts, by literal values."""

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
from parity_tests.engines import needs_gpu
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


def verify(f, logits, drafts, mode, cols, *, num_drafts=None, positions=0, draft_logits=None, seen=None):
    """tokens and num_sampled as numpy."""
    N, K = np.shape(drafts)
    num_drafts = np.full(N, K) if num_drafts is None else num_drafts
    optional = {} if seen is None else {"seen": bools(f, seen)}
    if draft_logits is not None:
        optional["draft_logits"] = f.floats(draft_logits)
    ints = f.ints(drafts), f.ints(num_drafts), f.ints(np.broadcast_to(positions, N))
    return tuple(map(numpy, program(f.name, "verify", mode)(f.floats(logits), *ints, cols, **optional)))


def rows(tokens, num_sampled):
    return [row[:n].tolist() for row, n in zip(tokens, num_sampled, strict=True)]


def one_hot(ids, V=7, high=4.0):
    return high * np.eye(V)[np.asarray(ids)]


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


# The walk


GREEDY_CASES = [
    ([4, 5, 6], 3, [4, 5, 6, 1]),
    ([4, 5, 2], 3, [4, 5, 6]),
    ([4, 2, 6], 3, [4, 5]),
    ([2, 5, 6], 3, [4]),
    ([4, 5, 6], 2, [4, 5, 6]),
    ([4, 5, 6], 0, [4]),
    ([4, -1, 6], 3, [4, 5]),
    ([-1, -1, -1], 3, [4]),
    ([4, 99, 6], 3, [4, 5]),
]


@pytest.mark.parametrize("mode, cached", [(GREEDY, False), (SAMPLED, True), (FILTERED, False)])
def test_the_greedy_walk(f, mode, cached):
    """Target tokens 4 5 6 1: a draft accepted behind a failure, past the request's drafts or at -1; a bonus from the wrong
    row; a greedy request in a mixed program, or beside cached draft logits, that is sampled."""
    N = len(GREEDY_CASES)
    logits = np.tile(one_hot([4, 5, 6, 1], high=0.1), (N, 1, 1))  # sampled, nearly uniform
    drafts, num_drafts, expected = zip(*GREEDY_CASES, strict=True)
    draft_logits = np.random.default_rng(0).standard_normal((N, 3, 7)) if cached else None
    cols = columns(f, N, temperature=0.0, seeds=np.arange(N))
    tokens, num_sampled = verify(f, logits, drafts, mode, cols, num_drafts=num_drafts, draft_logits=draft_logits)
    assert rows(tokens, num_sampled) == list(expected)
    assert all(not row[n:].any() for row, n in zip(tokens, num_sampled, strict=True))
    assert tokens.dtype == num_sampled.dtype == np.int32


@pytest.mark.parametrize("cached", [None, "random", "target"])
def test_one_hot_targets_are_followed(f, cached):
    """T17: sampling from a target that has one token only, by every draft right, wrong or missing, in a mixed batch; a
    token of no probability where the drafter knows the target, so that nothing is left of it after a rejection."""
    N = len(GREEDY_CASES)
    logits = np.tile(np.where(one_hot([4, 5, 6, 1]) > 0, 0.0, -np.inf), (N, 1, 1))
    drafts, num_drafts, expected = zip(*GREEDY_CASES, strict=True)
    draft_logits = {"random": np.random.default_rng(0).standard_normal((N, 3, 7)), "target": logits[:, :3]}.get(cached)
    cols = columns(f, N, temperature=[0.0, 1.0, 0.6] * 3, seeds=np.arange(N))
    got = verify(f, logits, drafts, SAMPLED, cols, num_drafts=num_drafts, draft_logits=draft_logits)
    assert rows(*got) == list(expected)


def test_ties_take_the_lowest_id(f):
    """T17: ties by chance or by the last id, in drafts and verification; a draft that ties but is not the lowest fails."""
    logits = np.zeros((9, 4, 7))
    logits[:, :, [1, 3]] = 2.0
    cols, positions = columns(f, 9, temperature=0.0), f.ints(np.zeros((9, 3)))
    drafts = f.run(f.sampling.sample_drafts, f.floats(logits[:, :3]), cols.temperature, cols.seeds, positions)
    assert numpy(drafts).tolist() == [[1, 1, 1]] * 9
    assert rows(*verify(f, logits, [[1, 3, 1]] * 9, GREEDY, cols)) == [[1, 1]] * 9


def test_all_nan_logits_stay_in_range(f):
    """T17: NaN that wins an argmax, or makes an index out of range, or spoils the request beside it."""
    right = one_hot([2, 3, 4, 5], high=60)
    logits = np.full((9, 4, 7), np.nan)
    logits[1::2] = right
    temperature = np.where(np.arange(9) < 5, 1.0, 0.0)
    cols = columns(f, 9, temperature=temperature)
    for q in (None, np.full((9, 3, 7), np.nan)):
        tokens, num_sampled = verify(f, logits, [[2, 3, 4]] * 9, SAMPLED, cols, draft_logits=q)
        assert ((tokens >= 0) & (tokens < 7)).all() and ((num_sampled >= 1) & (num_sampled <= 4)).all()
        got = rows(tokens, num_sampled)
        assert got[5] == got[7] == [2, 3, 4, 5]
        # No draft of an unknown distribution is accepted; the target's token takes its place.
        assert got[1] == got[3] == ([2, 3, 4, 5] if q is None else [2])
    logits[0] = right
    logits[0, :, 0] = np.nan
    assert rows(*verify(f, logits, [[2, 3, 4]] * 9, GREEDY, cols))[0] == [2, 3, 4, 5]
    positions = f.ints(np.zeros((9, 3)))
    drafts = f.run(f.sampling.sample_drafts, f.floats(logits[:, :3]), cols.temperature, cols.seeds, positions)
    assert (
        numpy(drafts).tolist() == [[2, 3, 4], [2, 3, 4], [0, 0, 0], [2, 3, 4], [0, 0, 0]] + [[2, 3, 4], [0, 0, 0]] * 2
    )


def test_the_smaller_vocabulary_is_used(f):
    """Padding of either head that is drawn, a draft outside taken for the last token inside, shapes that do not fit."""
    N = 64
    target, draft = np.full((N, 2, 5), -np.inf), np.zeros((N, 1, 7))
    target[..., [0, 3]] = 0.0
    target[..., 4] = draft[..., 4:] = 60.0  # padded columns that would win
    draft[..., 3] = 9.0
    mode, cols = SamplingMode(sampled=True, penalised=True), columns(f, N, seeds=np.arange(N))
    seen, drafts = np.zeros((N, 5)), [[5 if i % 2 else 0] for i in range(N)]
    for p, q in ((target, draft[..., :4]), (target[..., :4], draft)):
        tokens, num_sampled = verify(f, p, drafts, mode, cols, draft_logits=q, seen=seen[:, : p.shape[-1]])
        assert set(np.concatenate(rows(tokens, num_sampled))) == {0, 3}
        assert num_sampled[1::2].tolist() == [1] * 32  # draft 5 is outside


def test_plain_decoding_is_no_drafts(f):
    """K = 0 refused, or drafts of -1 that change what is drawn: the target's own token at (seed, position), not the residual
    of a draft that was never drawn."""
    logits = np.random.default_rng(1).standard_normal((9, 1, 7))
    cols = columns(f, 9, temperature=[0.0, 0.9, 1.5] * 3, seeds=np.arange(9))
    plain = verify(f, logits, np.zeros((9, 0)), SAMPLED, cols, positions=np.arange(9))
    for q in (None, np.random.default_rng(2).standard_normal((9, 3, 7))):
        drafts, four = np.full((9, 3), -1), np.tile(logits, (1, 4, 1))
        missing = verify(f, four, drafts, SAMPLED, cols, positions=np.arange(9), draft_logits=q)
        assert plain[1].tolist() == missing[1].tolist() == [1] * 9
        assert plain[0][:, 0].tolist() == missing[0][:, 0].tolist()
    likeliest = logits[:, 0].argmax(-1)
    assert plain[0][::3, 0].tolist() == likeliest[::3].tolist()
    assert plain[0][:, 0].tolist() != likeliest.tolist()


def test_a_request_draws_the_same_in_any_batch(f):
    """Noise keyed by the row of the batch: a request whose text depends on its neighbours or on padding."""
    rng = np.random.default_rng(2)
    logits, drafts = rng.standard_normal((9, 4, 7)), rng.integers(0, 7, (9, 3))
    seeds, positions = np.arange(9) + 5, np.arange(9) * 100

    def run(order):
        cols = columns(f, 9, temperature=0.8, top_k=5, seeds=seeds[order])
        return rows(*verify(f, logits[order], drafts[order], FILTERED, cols, positions=positions[order]))

    every, order = run(np.arange(9)), np.array([4, 0, 5, 2, 8, 4, 4, 4, 4])
    assert run(order) == [every[i] for i in order]
    assert len(set(map(tuple, every))) > 4


def test_both_frameworks_sample_the_same_tokens():
    """The same noise used in another place: drafts, acceptance, residual or bonus of one framework that differ."""
    rng = np.random.default_rng(3)
    N, K, V = 300, 3, 101
    logits, q = 2 * rng.standard_normal((N, K + 1, V)), 2 * rng.standard_normal((N, K, V))
    q[:200] = logits[:200, :K] + 0.5 * rng.standard_normal((200, K, V))
    positions, num_drafts = rng.integers(0, 5000, N), rng.integers(0, K + 1, N)
    seen = rng.random((N, V)) < 0.3
    mode = SamplingMode(sampled=True, filtered=True, penalised=True)
    found = []
    for f in FRAMEWORKS.values():
        cols = columns(
            f, N, temperature=np.tile([0.0, 0.6, 1.0], 100), seeds=np.arange(N), top_k=np.arange(N) % 30,
            top_p=np.where(np.arange(N) % 4, 0.83, 1.0), repetition_penalty=np.where(np.arange(N) % 5, 1.0, 1.3),
        )  # fmt: skip

        def step(logits, q, num_drafts, positions, cols, seen, f=f):
            rows_NK = positions[:, None] + f.ints(np.arange(K))
            drafts = f.sampling.sample_drafts(q, cols.temperature, cols.seeds, rows_NK)
            walk = logits, drafts, num_drafts, positions, cols, mode
            return drafts, *f.sampling.verify(*walk, q, seen), *f.sampling.verify(*walk, None, seen)

        arrays = f.floats(logits), f.floats(q), f.ints(num_drafts), f.ints(positions), cols, bools(f, seen)
        found.append(list(map(numpy, f.run(step, *arrays))))
    for a, b in zip(*found, strict=True):
        assert np.array_equal(a, b)
    assert set(found[0][2]) == {1, 2, 3, 4}


@pytest.mark.gpu
@needs_gpu
def test_a_cuda_graph_of_draft_and_verification():
    """Bits of another device, a value read on the host, or noise that a replay repeats instead of reading its inputs."""
    f, mode = FRAMEWORKS["torch"], SamplingMode(True, True, True)
    rng = np.random.default_rng(7)
    N, K, V = 5, 3, 101
    logits, q = f.floats(2 * rng.standard_normal((N, K + 1, V))), f.floats(2 * rng.standard_normal((N, K, V)))
    cols = columns(f, N, [0.0, 0.6, 1.0, 1.0, 2.0], [0, 9, 0, 9, 0], 0.9, 1.3, np.arange(N))
    seen, num_drafts = bools(f, rng.random((N, V)) < 0.3), f.ints([3, 3, 3, 2, 0])

    def step(logits, q, num_drafts, positions, seen, *cols):
        cols = SamplingColumns(*cols)
        drafts = f.sampling.sample_drafts(
            q, cols.temperature, cols.seeds, positions[:, None] + torch.arange(K, device=q.device)
        )
        bits = f.sampling.random_bits(Stream.ACCEPT, cols.seeds, positions, V)
        return drafts, bits, *f.sampling.verify(logits, drafts, num_drafts, positions, cols, mode, q, seen)

    inputs = [x.cuda() for x in (logits, q, num_drafts, f.ints(np.zeros(N)), seen, *cols)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(*inputs)
    texts = set()
    for start in range(4):
        positions = f.ints(np.arange(N) * 10 + start)
        inputs[3].copy_(positions)
        graph.replay()
        expected = step(logits, q, num_drafts, positions, seen, *cols)
        for a, b in zip(outputs, expected, strict=True):
            assert torch.equal(a.cpu(), b)
        texts.add(str(outputs[2].cpu().tolist()))
    assert len(texts) == 4


def test_a_greedy_program_holds_no_noise_and_no_sort():
    """A mode that is not static: every greedy step pays for what nobody asked."""
    f = FRAMEWORKS["jax"]
    cols = columns(f, 2)
    shapes = (jnp.zeros((2, 4, 17)), f.ints(np.zeros((2, 3))), f.ints([3, 3]), f.ints([0, 0]), cols)

    def text(mode):
        return jax.jit(lambda *args: f.sampling.verify(*args, mode)).lower(*shapes).as_text()

    costly = ("sort", "log", "log_plus_one", "exponential", "shift_left", "xor", "divide", "while")
    assert [op for op in costly if f"stablehlo.{op}" in text(GREEDY)] == []
    assert [op for op in costly if f"stablehlo.{op}" not in text(FILTERED)] == []


def test_verify_runs_inside_a_loop_on_the_device():
    """A shape or dtype that changes, or a value read on the host: neither can be carried by a loop in JAX. PyTorch takes
    the same steps one by one."""
    N, K, V = 3, 2, 13
    mode = SamplingMode(sampled=True, filtered=True, penalised=True)
    logits = np.random.default_rng(4).standard_normal((N, K + 1, V))

    def start(f):
        state = f.ints([0, 9, 50]), f.ints(np.zeros((N, K))), bools(f, np.zeros((N, V))), f.ints([2, 2, 2])
        cols = columns(f, N, temperature=[0.0, 1.0, 0.7], top_k=4, repetition_penalty=1.5, seeds=[1, 2, 3])
        return state, (f, f.floats(logits), cols)

    def step(state, f, logits, cols):
        positions, drafts, seen, num_drafts = state
        tokens, num_sampled = f.sampling.verify(logits, drafts, num_drafts, positions, cols, mode, None, seen)
        seen = f.sampling.mark_seen(seen, tokens, num_sampled)
        return positions + num_sampled, tokens[:, :K], seen, num_sampled - 1

    state, fixed = start(FRAMEWORKS["jax"])
    looped = jax.jit(lambda state: jax.lax.fori_loop(0, 4, lambda i, state: step(state, *fixed), state))(state)
    state, fixed = start(FRAMEWORKS["torch"])
    for _ in range(4):
        state = step(state, *fixed)
    for a, b in zip(looped, state, strict=True):
        assert np.array_equal(numpy(a), numpy(b))
    assert numpy(state[2]).sum() > N
