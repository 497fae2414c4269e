"""The walk over drafts in both frameworks: what is accepted and what is emitted, by literal values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_dflash.sampling_params import SamplingColumns, SamplingMode, Stream
from parity_tests.engines import needs_gpu
from parity_tests.test_sampling import FILTERED, GREEDY, SAMPLED, bools, columns, program
from parity_tests.tiny import FRAMEWORKS, numpy


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
