"""TargetRunner in both frameworks, against the numpy reference: chunks, verification, padding, capture."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax

from jax_dflash import sampling as jax_sampling
from jax_dflash.batch import EngineConfig
from jax_dflash.buckets import BucketLadder, row_bucket_sizes
from jax_dflash.config import InputError
from jax_dflash.programs import num_compiles
from jax_dflash.target_batch import TargetBatch, TargetLimits
from parity_tests import target64
from parity_tests.target64 import FORMS
from parity_tests.tiny import DRAFT, FRAMEWORKS, numpy

K, Q, PAGE, TAPS = 3, 4, 4, (0, 1, 2)
NAMES = ["qwen3", "llama biases"]  # QK norms, own head; biases, llama3; both in JAX and PyTorch
# Buckets of 1 and 3 requests: two requests are padded. 3 x 16 rows are over the budget and have no program.
SIZES = {
    "num_speculative_tokens": K, "max_num_seqs": 3, "max_model_len": 40, "num_pages": 32, "page_size": PAGE,
    "widths": (1, Q, 16), "max_num_batched_tokens": 32, "ladder": BucketLadder([Q, 3 * Q], max_num_seqs=3, query_lens=Q),
}  # fmt: skip
TABLES = 1 + np.random.default_rng(5).permutation(30).reshape(3, 10)  # pages in random order


@functools.cache
def values(name):
    return target64.values_of(target64.config_of(name))


@functools.cache
def captured(framework: str, name: str):
    f, config = FRAMEWORKS[framework], target64.config_of(name)
    runner = f.target_runner.TargetRunner(config, f.target.pack(f.tree(values(name)), config), taps=TAPS, **SIZES)
    runner.capture(progress=False)
    return runner


def fresh(f, name):
    """The runner, its programs compiled once per process, over a pool of NaN: null page and everybody's pages."""
    runner = captured(f.name, name)
    fill = np.full(runner.pool.shape, np.nan, np.float32)
    runner.pool = f.pool(runner.pool.shape, fill=fill)
    return runner


@functools.cache
def exact(name, tokens: tuple[int, ...]):
    """Features `[S, F]` and greedy next tokens `[S]` of the reference, and the least distance of a token to the next."""
    states, logits = target64.forward(FORMS[name], values(name), tokens)
    top = np.sort(logits, axis=-1)[:, -2:]
    assert np.min(top[:, 1] - top[:, 0]) > 1e-4, "another seed: a tie says nothing"
    return np.concatenate([states[m] for m in TAPS], axis=-1), np.argmax(logits, axis=-1).tolist()


def continued(name, prompt, count):
    """The reference's greedy continuation."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(exact(name, tuple(tokens))[1][-1])
    return tokens


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


def batch_of(*requests):
    """(batch row, tokens, start, num_drafts) of each request."""
    rows, tokens, start, num_drafts = zip(*requests, strict=True)
    return TargetBatch(tokens=tokens, start=start, num_drafts=num_drafts, block_tables=TABLES[list(rows)])


def run(runner, *requests):
    """(tokens that were emitted, features) of each request."""
    output = runner.run(batch_of(*requests))
    features, at, results = numpy(output.features), 0, []
    for i, (_, tokens, _, _) in enumerate(requests):
        results.append((output.tokens[i, : output.num_sampled[i]].tolist(), features[at : at + len(tokens)]))
        assert not output.tokens[i, output.num_sampled[i] :].any()
        at += len(tokens)
    assert not features[at:].any()
    return results


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.sqrt(np.mean(theirs**2)), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [(14,), (4, 4, 4, 2), (5, 1, 8), (1,) * 14])
def test_a_prompt_in_chunks(f, name, chunks):
    """A chunk that does not see the ones before it, sees its own later rows, or takes its token from a padded row."""
    runner, prompt = fresh(f, name), prompt_of(14)
    features, own = exact(name, tuple(prompt))
    start = 0
    for count in chunks:
        ((emitted, rows),) = run(runner, (0, prompt[start : start + count], start, 0))
        close(rows, features[start : start + count])
        start += count
        assert emitted == [own[start - 1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_drafts, right", [(3, 3), (3, 2), (3, 1), (3, 0), (2, 2), (2, 0), (1, 1), (0, 0)])
def test_verification(f, name, num_drafts, right):
    """A draft accepted behind a wrong one, the bonus token of a wrong row or none, a padded row taken for a draft, or K/V of
    rejected drafts that the next step sees."""
    runner, prompt = fresh(f, name), prompt_of(9)
    text = continued(name, prompt, 8)
    run(runner, (1, prompt, 0, 0))
    drafts = text[10 : 10 + num_drafts]
    for i in range(right, num_drafts):
        drafts[i] = (drafts[i] + 1) % 61 if i == right else drafts[i]  # those behind the wrong one would be right
    ((emitted, rows),) = run(runner, (1, [text[9], *drafts], 9, num_drafts))
    assert emitted == text[10 : 11 + right]
    sequence = (*text[:10], *drafts)
    close(rows, exact(name, sequence)[0][9:])
    start = 9 + len(emitted)
    ((emitted, rows),) = run(runner, (1, text[start : start + 2], start, 1))
    assert emitted == text[start + 1 : start + 3]
    close(rows, exact(name, tuple(text[: start + 2]))[0][start:])


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_mate_changes_nothing(f, name):
    """Rows of different counts, lengths and drafts in one padded batch: features of a request at another's rows, a dead row
    that stores, reads NaN or is seen. Every page that nobody owns keeps its NaN."""
    requests = [(2, prompt_of(11, 1), 0, 0), (0, prompt_of(6, 2), 0, 0)]
    runner = fresh(f, name)
    for request in requests:
        run(runner, request)
    texts = [continued(name, prompt, 4) for _, prompt, _, _ in requests]
    step = [(2, texts[0][11:15], 11, 3), (0, texts[1][6:8], 6, 1), (1, [7], 0, 0)]
    together = run(runner, *step)
    assert [emitted for emitted, _ in together] == [texts[0][12:] + [exact(name, tuple(texts[0]))[1][-1]], texts[1][7:9],
                                                    [exact(name, (7,))[1][0]]]  # fmt: skip
    for (_, rows), tokens, start in zip(together, (texts[0], texts[1][:8], [7]), (11, 6, 0), strict=True):
        close(rows, exact(name, tuple(tokens))[0][start:])
    pool = numpy(runner.pool)
    written = ~np.isnan(pool.reshape(*pool.shape[:2], -1, *pool.shape[4:])).all(axis=(0, 1, 3, 4))
    slots = {int(TABLES[row, p // PAGE]) * PAGE + p % PAGE for row, n in ((2, 15), (0, 8), (1, 1)) for p in range(n)}
    assert set(np.flatnonzero(written)) == slots


def test_frameworks_agree():
    """A token or feature that differs between the frameworks over mixed traffic; features at other row counts."""
    rng = np.random.default_rng(11)
    for name in NAMES:
        runners = [fresh(f, name) for f in FRAMEWORKS.values()]
        lengths, last = [0, 0, 0], [3, 5, 7]
        for _ in range(12):
            chosen = rng.permutation(3)[: rng.integers(1, 4)]
            requests = []
            for row in chosen:
                num_drafts = int(rng.integers(0, K + 1))
                requests.append((row, [last[row], *rng.integers(0, 61, num_drafts)], lengths[row], num_drafts))
            outputs = [runner.run(batch_of(*requests)) for runner in runners]
            np.testing.assert_array_equal(outputs[0].tokens, outputs[1].tokens)
            np.testing.assert_array_equal(outputs[0].num_sampled, outputs[1].num_sampled)
            close(numpy(outputs[0].features), numpy(outputs[1].features))
            for i, row in enumerate(chosen):
                lengths[row] = (lengths[row] + int(outputs[0].num_sampled[i])) % 30
                last[row] = int(outputs[0].tokens[i, outputs[0].num_sampled[i] - 1])


def test_nothing_compiles_after_capture():
    """A shape without a program, or a conversion on the way that compiles; a pool that is not donated, held twice."""
    runner = fresh(FRAMEWORKS["jax"], "qwen3")
    assert sorted(runner.programs) == [(1, 1), (1, 4), (1, 16), (3, 1), (3, 4)]
    assert [row.alias_bytes >= runner.pool.nbytes for row in runner.report] == [True] * 5
    before = num_compiles()
    for n in (1, 2, 3):
        for rows in range(1, 17 if n == 1 else 5):
            for num_drafts in {0, min(rows - 1, K)}:
                runner.run(batch_of(*((i, prompt_of(rows), 0, num_drafts) for i in range(n))))
    assert num_compiles() == before


def test_features_outlive_the_next_step(f):
    """C64: features in memory that the target's next step writes to, at a row count of its own and of a row bucket."""
    runner, prompt = fresh(f, "qwen3"), prompt_of(16)
    outputs = [runner.run(batch_of((0, prompt[:rows], 0, 0))) for rows in (16, 4)]
    for seed in (1, 2):
        for rows in (16, 4):
            runner.run(batch_of((1, prompt_of(rows, seed), 0, 0)))
    for output, rows in zip(outputs, (16, 4), strict=True):
        close(numpy(output.features), exact("qwen3", tuple(prompt[:rows]))[0])


def test_capture_keeps_the_pool():
    """Padding that a warm-up run stores in the null page or the last slot."""
    f, config = FRAMEWORKS["jax"], target64.config_of("qwen3")
    sizes = SIZES | {"widths": (Q,), "max_num_seqs": 1, "ladder": None}
    runner = f.target_runner.TargetRunner(config, f.target.pack(f.tree(values("qwen3")), config), taps=(), **sizes)
    with pytest.raises(InputError, match="no programs yet; call capture"):
        runner.run(batch_of((0, [1], 0, 0)))
    runner.pool = jnp.full_like(runner.pool, 7.0)
    runner.capture(progress=False)
    assert (numpy(runner.pool) == 7).all()


def test_features_fit_the_drafter():
    """Row counts that `DraftEngine.propose` refuses of a device array, or a context program run where the step itself could
    store the rows."""
    config = target64.config_of("qwen3")
    sizes = {"num_speculative_tokens": 6, "max_num_seqs": 6, "max_model_len": 64, "max_num_batched_tokens": 100}
    limits = TargetLimits.make(config, **sizes, num_pages=9, widths=(1, 7, 32, 100))
    engine = EngineConfig.make(DRAFT, **sizes)
    assert limits.buckets == (1, 2, 4, 6)
    assert (6, 32) not in limits.programs and (2, 32) in limits.programs
    for num_reqs, width in limits.programs:
        rows, own = limits.feature_rows(num_reqs, width), engine.context_rows(num_reqs)
        num_rows = num_reqs * width
        assert engine.padded_rows((rows, DRAFT.feature_size), num_rows, own, on_device=True) == rows
        assert rows == own if width <= 7 else rows in row_bucket_sizes(100)


def test_logits_are_of_the_verified_rows_only(f, monkeypatch):
    """A large vocabulary times every row of a prompt's chunk."""
    seen, right = [], f.target_runner.compute_logits

    def spy(weights, hidden):
        seen.append(tuple(hidden.shape))
        return right(weights, hidden)

    monkeypatch.setattr(f.target_runner, "compute_logits", spy)
    config, runner = target64.config_of("qwen3"), fresh(f, "qwen3")
    weights = f.target.pack(f.tree(values("qwen3")), config)
    for width in (16, 1):
        ints = runner.limits.empty(1, width)
        step = functools.partial(
            f.target_runner.verify_step, config, runner.limits, taps=TAPS, feature_rows=16,
            **({} if f.name == "jax" else {"table_width": 10}),
        )  # fmt: skip
        if f.name == "jax":
            jax.eval_shape(step, weights, runner.pool, ints)
        else:
            step(weights, runner.pool, torch.from_numpy(ints))
    assert seen == [(1, Q, 24), (1, 1, 24)]


def test_features_have_the_weights_dtype(f):
    """Features cast on the way, which the drafter's programs refuse; a pool of another dtype than its target."""
    config = target64.config_of("llama biases")
    weights = f.target.pack(f.tree(values("llama biases"), "bfloat16"), config)
    sizes = SIZES | {"widths": (Q,), "max_num_seqs": 1, "ladder": None}
    runner = f.target_runner.TargetRunner(config, weights, taps=(1,), **sizes)
    runner.capture(progress=False)
    output = runner.run(batch_of((0, [1, 2, 3], 0, 2)))
    assert str(output.features.dtype).endswith("bfloat16") and str(runner.pool.dtype).endswith("bfloat16")
    assert output.features.shape == (Q, 24) and output.tokens.dtype == output.num_sampled.dtype == np.int32


LOGITS = np.zeros((5, 3, 6))
for _request, _rows in enumerate([(1, 2, 3), (1, 2, 3), (1, 2, 3), (4, 4, 4), (0, 0, 0)]):
    for _row, _token in enumerate(_rows):
        LOGITS[_request, _row, _token] = 1
LOGITS[4] = 0  # all equal: token 0
DRAFTS, COUNTS = [[1, 2], [1, 2], [5, 2], [0, 0], [0, 0]], [2, 1, 2, 0, 2]
VERIFIED = [[1, 2, 3], [1, 2, 0], [1, 0, 0], [4, 0, 0], [0, 0, 0]], [3, 2, 1, 1, 3]


def test_greedy_verify(f):
    """All right, fewer drafts than K of which a padded one would match, wrong first, none, and ties (the lowest id)."""
    outputs = f.run(f.sampling.greedy_verify, f.floats(LOGITS), f.ints(DRAFTS), f.ints(COUNTS))
    assert [numpy(x).tolist() for x in outputs] == [*VERIFIED]
    assert all(numpy(x).dtype == np.int32 for x in outputs)


def test_verification_runs_in_a_loop_on_the_device():
    """A host value or changing dtype, which a while_loop cannot carry."""
    verify = jax_sampling.greedy_verify

    def body(carry):
        i, _, _ = carry
        return i + 1, *verify(
            jnp.asarray(LOGITS, "float32"), jnp.asarray(DRAFTS, "int32"), jnp.asarray(COUNTS, "int32")
        )

    start = jnp.int32(0), jnp.zeros((5, 3), "int32"), jnp.zeros(5, "int32")
    _, tokens, num_sampled = jax.jit(lambda: lax.while_loop(lambda carry: carry[0] < 2, body, start))()
    assert (tokens.tolist(), num_sampled.tolist()) == VERIFIED


@pytest.mark.parametrize("changes, message", [
    ({"tokens": []}, "the batch has 0 requests, expected 1 to max_num_seqs=3"),
    ({"tokens": [[1]] * 4}, "the batch has 4 requests"),
    ({"tokens": [[]], "num_drafts": [0]}, "tokens[0] has shape [0] of float64"),
    ({"tokens": [[1.5]]}, "tokens[0] has shape [1] of float64, expected integers"),
    ({"tokens": [[61, 1]]}, "request 0: token 61 is outside the vocabulary of 61"),
    ({"tokens": [[1, 2**32 + 5]]}, "request 0: token 4294967301 is outside"),
    ({"tokens": [[-1, 1]]}, "request 0: token -1 is outside"),
    ({"start": [0, 0]}, "start has 2 rows for 1 requests"),
    ({"start": [-1]}, "request 0: positions -1 to 0 are outside 0 to max_model_len=40"),
    ({"start": [39]}, "request 0: positions 39 to 40 are outside"),
    ({"num_drafts": [2]}, "request 0: num_drafts=2 of 2 rows; expected at least one row before the drafts"),
    ({"num_drafts": [-1]}, "request 0: num_drafts=-1"),
    ({"tokens": [[1] * 6], "num_drafts": [4]}, "and 0 to 3 drafts"),
    ({"block_tables": np.array([[1, 32]])}, "block_tables holds page ids outside 0 to 31"),
    ({"block_tables": np.array([[0, 1]])}, "its block table has no page for each of positions 0 to 1"),
    ({"block_tables": np.array([[1]]), "start": [3]}, "its block table has no page for each of positions 0 to 4"),
    ({"block_tables": np.array([1])}, "block_tables has shape [1]"),
    ({"tokens": [[1] * 17], "block_tables": TABLES[:1]}, "17 rows of one request among 1 exceed the 16 that"),
    ({"tokens": [[1] * 5, [1]], "start": [0, 0], "num_drafts": [0, 0], "block_tables": TABLES[:2]},
     "5 rows of one request among 2 exceed the 4 that max_num_batched_tokens=32"),
])  # fmt: skip
def test_batches_that_cannot_run(f, changes, message):
    """Positions, pages, drafts or ids outside what the caller promised: K/V of a stranger overwritten, or an id that wraps.
    A refused batch changes nothing."""
    good = {"tokens": [[1, 2]], "start": [0], "num_drafts": [1], "block_tables": np.array([[1, 2]])}
    runner = fresh(f, "qwen3")
    with pytest.raises(InputError) as caught:
        runner.run(TargetBatch(**good | changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert np.isnan(numpy(runner.pool)).all()


@pytest.mark.parametrize("changes, message", [
    ({"widths": (1, 2)}, "widths=[1, 2]; pass row counts from 1 on, 4 rows of a verify among them"),
    ({"widths": ()}, "widths=[]"),
    ({"widths": (0, 4)}, "widths=[0, 4]"),
    ({"widths": (11,)}, "widths=[11]"),
    ({"max_num_batched_tokens": 11}, "max_num_batched_tokens=11 is less than a verify of 3 requests x 4 rows"),
    ({"max_model_len": 257}, "max_model_len=257; this target is made for 256 positions"),
    ({"num_pages": 1}, "num_pages=1; pass at least 2"),
    ({"ladder": BucketLadder([8], max_num_seqs=3, query_lens=4)}, "buckets [2] do not end with max_num_seqs=3"),
])  # fmt: skip
def test_limits_that_no_batch_could_use(changes, message):
    """A runner that finds out in the middle of a request, or an attention past the target's positions."""
    with pytest.raises(InputError) as caught:
        TargetLimits.make(target64.config_of("qwen3"), **SIZES | changes)
    assert message in str(caught.value)


def test_taps_of_another_target(f):
    """A tap past the last layer, which indexes from the end in no framework's favour."""
    config = target64.config_of("qwen3")
    weights = f.target.pack(f.tree(values("qwen3")), config)
    for tap in (3, -1):
        with pytest.raises(InputError, match="expected hidden states 0 to 2"):
            f.target_runner.TargetRunner(config, weights, taps=(tap,), **SIZES)


def test_a_failed_step_says_so():
    """A donated pool read again as if nothing had happened."""
    runner = captured("jax", "qwen3")
    programs = runner.programs
    runner.programs = dict.fromkeys(programs, lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            runner.run(batch_of((0, [1], 0, 0)))
        with pytest.raises(RuntimeError, match="lost its pool"):
            runner.run(batch_of((0, [1], 0, 0)))
    finally:
        runner.programs = programs
        runner.pool = jnp.zeros((2, 2, 32, PAGE, 3, 10), "float32")


def test_max_rows():
    """A prompt's chunk sized for one request among many, which has no program."""
    limits = TargetLimits.make(target64.config_of("qwen3"), **SIZES)
    assert [limits.max_rows(n) for n in (1, 2, 3)] == [16, 4, 4]
    assert limits.dispatch(2, 3) == (3, 4) and limits.dispatch(1, 5) == (1, 16)
    assert replace(limits, max_num_batched_tokens=48).max_rows(3) == 16
