"""What sampling draws, in both frameworks: output of speculative decoding against the target's distribution."""

import numpy as np
import pytest

from jax_dflash.sampling_params import SamplingMode, Stream
from parity_tests.test_sampling import SAMPLED, bools, columns, program
from parity_tests.tiny import FRAMEWORKS, numpy


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def excess(counts, p):
    """By how much chi-square exceeds its bound, df + 10 sqrt(2 df). Bins that expect fewer than 5 draws are pooled; a draw
    of a token without probability is infinitely many."""
    if counts[p == 0].any():
        return np.inf
    order = np.argsort(p)
    expected = np.cumsum(counts.sum() * p[order])
    bins = np.unique(np.append(np.searchsorted(expected, np.arange(5, expected[-1], 5)) + 1, len(p)))
    seen, expected = np.diff(np.cumsum(counts[order])[bins - 1], prepend=0), np.diff(expected[bins - 1], prepend=0)
    df = len(bins) - 1
    return np.sum((seen - expected) ** 2 / expected) - (df + 10 * np.sqrt(2 * df))


def speculate(f, target, draft, temperature, num, *, cached=True, mode=SAMPLED, run=None):
    """Drafts, tokens and num_sampled of `num` requests with the same logits `target [K+1, V]` and `draft [K, V]`, at
    different seeds and positions."""
    K, V = draft.shape
    i = np.arange(num)
    positions = (i // 200) * (K + 1)

    def step(target, draft, positions, cols):
        logits, q = (f.floats(np.zeros((num, 1, 1))) + x for x in (target, draft))
        rows = positions[:, None] + f.ints(np.arange(K))
        if cached:
            drafts = f.sampling.sample_drafts(q, cols.temperature, cols.seeds, rows)
        else:
            drafts, q = f.sampling.greedy(q), None
        num_drafts = f.ints(np.full(num, K))
        return drafts, *f.sampling.verify(logits, drafts, num_drafts, positions, cols, mode, q)

    cols = columns(f, num, temperature=temperature, seeds=i % 200)
    return tuple(map(numpy, f.run(step, f.floats(target), f.floats(draft), f.ints(positions), cols)))


def random_pair(K, V, apart):
    """Logits of a target and of a drafter near it; each has a few tokens without probability."""
    rng = np.random.default_rng(K)
    target = 1.5 * rng.standard_normal((K + 1, V))
    draft = target[:K] + apart * rng.standard_normal((K, V))
    target[:, :3] = draft[:, 2:5] = -np.inf
    return target, draft


@pytest.mark.parametrize("K, temperature, cached", [(1, 0.6, True), (3, 1.0, True), (3, 0.6, False)])
def test_output_follows_the_target(f, K, temperature, cached):
    """T16, T17: drafts that do not follow the drafter, output at any row that does not follow the target (a residual without
    the temperature, acceptance against other logits, noise shared between rows), a token of no probability."""
    target, draft = random_pair(K, 64, apart=0.7)
    drafts, tokens, num_sampled = speculate(f, target, draft, temperature, 40_000, cached=cached)
    p, q = softmax(target / temperature), softmax(draft / temperature)
    for i in range(K + 1):
        emitted = tokens[num_sampled > i, i]
        assert len(emitted) > 400 and excess(np.bincount(emitted, minlength=64), p[i]) < 0, i
        if cached and i < K:
            assert excess(np.bincount(drafts[:, i], minlength=64), q[i]) < 0, i
            accepted = np.mean(num_sampled[num_sampled > i] > i + 1)
            assert abs(accepted - np.minimum(p[i], q[i]).sum()) < 5 * 0.5 / np.sqrt(len(emitted)), i
    if cached:  # the check has teeth: it sees the drafter's distribution in place of the target's
        assert excess(np.bincount(drafts[:, 0], minlength=64), p[0]) > 0


def test_output_follows_a_target_of_4096_tokens():
    """T17 at its vocabulary: noise of token ids that repeats or is cut."""
    target, draft = random_pair(1, 4096, apart=0.7)
    _, tokens, num_sampled = speculate(FRAMEWORKS["jax"], target, draft, 1.0, 4_000)
    p = softmax(target)
    assert excess(np.bincount(tokens[:, 0], minlength=4096), p[0]) < 0
    assert excess(np.bincount(tokens[num_sampled == 2, 1], minlength=4096), p[1]) < 0


P, Q, DRAWS = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.5, 0.2]), 400_000


def acceptance_and_output(f):
    """C85: the rate of acceptance, and how often each token came first."""
    _, tokens, num_sampled = speculate(f, np.log([P, P]), np.log([Q]), 1.0, DRAWS)
    return np.mean(num_sampled == 2), np.bincount(tokens[:, 0], minlength=4) / DRAWS


def test_output_is_the_target_s_by_the_case_s_numbers(f):
    """C85: acceptance other than sum of min(p, q), or output that is not p."""
    acceptance, output = acceptance_and_output(f)
    assert abs(acceptance - 0.6) < 0.005
    assert np.abs(output - P).max() < 0.005


@pytest.mark.parametrize("name, stream, shared, wrong", [
    ("gumbel", Stream.DRAFT, Stream.TARGET, [0.434, 0.267, 0.199, 0.100]),  # the numbers of the case
    ("uniform", Stream.ACCEPT, Stream.TARGET, [0.349, 0.351, 0.200, 0.099]),  # as measured, as the next
    ("uniform", Stream.ACCEPT, Stream.DRAFT, [0.432, 0.311, 0.168, 0.089]),
])  # fmt: skip
def test_shared_noise_is_seen(name, stream, shared, wrong, monkeypatch):
    """C85: a check that would pass the published bug, drafts and recovery from one stream, or a uniform of acceptance that
    is also one token's noise."""
    f = FRAMEWORKS["torch"]
    draw = getattr(f.sampling, name)
    monkeypatch.setattr(f.sampling, name, lambda s, *place: draw(shared if s == stream else s, *place))
    output = acceptance_and_output(f)[1]
    assert np.abs(output - P).max() > 0.005
    np.testing.assert_allclose(output, wrong, atol=0.004)


def test_equal_distributions_accept_every_draft(f):
    """C79: a softmax in the logits' dtype, whose error grows with the vocabulary: cached bfloat16 draft logits against the
    same values in float32, and 1000 equal logits whose probabilities sum to 1."""
    values = f.floats(np.random.default_rng(5).standard_normal((64, 1, 1000)), "bfloat16")
    cols = columns(f, 64, temperature=0.8, seeds=np.arange(64))

    def step(values, positions, num_drafts, cols):
        drafts = f.sampling.sample_drafts(values, cols.temperature, cols.seeds, positions[:, None])
        logits = f.floats(np.zeros((64, 2, 1))) + f.numerics.to_accum(values)
        equal = f.sampling.log_prob(f.sampling.without_nan(values * 0), drafts)
        return *f.sampling.verify(logits, drafts, num_drafts, positions, cols, SAMPLED, values), equal

    _, num_sampled, log_p = f.run(step, values, f.ints(np.arange(64)), f.ints(np.ones(64)), cols)
    assert numpy(num_sampled).tolist() == [2] * 64
    assert log_p.dtype == f.numerics.as_dtype("float32")
    np.testing.assert_allclose(1000 * np.exp(numpy(log_p)), 1, atol=1e-3)


# Penalties


def penalised(logits, seen, penalty):
    """One row of logits with the penalty of CTRL, token by token."""
    out = logits.copy()
    for token in set(seen):
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    return out


def test_penalties_give_the_text_of_plain_decoding(f):
    """C86: penalties seen by the drafter only or by the first row only. A bigram target; drafts follow it without penalties,
    so that they are accepted, rejected, and repeated within a step."""
    V, K, penalty, prompt = 11, 3, 1.6, [4, 2, 4]
    table = np.random.default_rng(11).standard_normal((V, V)).astype(np.float32)
    table += 1.5 * np.eye(V, dtype=np.float32)  # repeats itself if nothing is done about it

    def plain(penalty):
        text = list(prompt)
        while len(text) < 60:
            text.append(int(np.argmax(penalised(table[text[-1]], text, np.float32(penalty)))))
        return text

    text, counts = list(prompt), []
    cols = columns(f, 1, temperature=0.0, repetition_penalty=penalty)
    while len(text) < 60:
        drafts = [text[-1]]
        for _ in range(K):
            drafts.append(int(np.argmax(table[drafts[-1]])) if len(text) % 2 else (drafts[-1] * 5 + len(text)) % V)
        seen = bools(f, [np.isin(np.arange(V), text)])
        tokens, num_sampled = program(f.name, "verify", SamplingMode(penalised=True))(
            f.floats(table[drafts][None]), f.ints([drafts[1:]]), f.ints([K]), f.ints([len(text) - 1]), cols, seen=seen
        )
        counts.append(int(num_sampled[0]))
        text += numpy(tokens)[0, : counts[-1]].tolist()
    assert text[:60] == plain(penalty)
    assert plain(penalty) != plain(1.0)
    assert len(set(counts)) > 1


def test_penalised_and_filtered_output_follows_plain_decoding(f):
    """C86, sampled: the second token's distribution given the first, with a repetition penalty on the accepted draft, the
    temperature, top-k and top-p."""
    V, N, penalty, hot, k, top_p = 8, 20_000, 1.8, 0.7, 6, 0.9
    rng = np.random.default_rng(6)
    target, draft = 2 * rng.standard_normal((2, V)), 2 * rng.standard_normal((1, V))
    draft[0] += target[0]
    cols = columns(f, N, hot, k, top_p, penalty, np.arange(N))

    def step(target, draft, positions, seen, cols):
        logits, q = (f.floats(np.zeros((N, 1, 1))) + x for x in (target, draft))
        drafts = f.sampling.sample_drafts(q, cols.temperature, cols.seeds, positions[:, None])
        mode = SamplingMode(sampled=True, filtered=True, penalised=True)
        return f.sampling.verify(logits, drafts, positions * 0 + 1, positions, cols, mode, q, seen)

    arrays = f.floats(target), f.floats(draft), f.ints(np.arange(N) % 7)
    tokens, num_sampled = map(numpy, f.run(step, *arrays, bools(f, np.tile(np.arange(V) == 2, (N, 1))), cols))

    def plain(row, seen):
        p = softmax(penalised(target[row], seen, penalty) / hot)
        p = np.where(p >= np.sort(p)[-k], p, 0)
        p /= p.sum()
        order = np.argsort(-p)
        fewest = np.searchsorted(np.cumsum(p[order]), top_p) + 1
        p = np.where(np.isin(np.arange(V), order[:fewest]), p, 0)
        return p / p.sum()

    assert excess(np.bincount(tokens[:, 0], minlength=V), plain(0, [2])) < 0
    both = tokens[num_sampled == 2]
    checked = 0
    for first in np.unique(both[:, 0]):
        second = both[both[:, 0] == first, 1]
        if len(second) > 300:
            assert excess(np.bincount(second, minlength=V), plain(1, [2, first])) < 0, first
            checked += excess(np.bincount(second, minlength=V), plain(1, [2])) > 0  # the draft not counted as seen
    assert checked
