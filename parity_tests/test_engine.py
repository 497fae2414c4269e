"""The JAX engine: buckets, padding, pages, capture, and what must not happen after capture."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import torch_ref.engine
from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import DraftConfig, Geometry, InputError, plain_layers
from jax_dflash.draft_step import DraftState
from jax_dflash.drafter import Drafter, pack_drafter
from jax_dflash.engine import DraftEngine
from jax_dflash.programs import forbid_compiles, num_compiles
from parity_tests.tiny import DRAFT, FRAMEWORKS, draft_weights

GEOMETRY = Geometry(
    hidden_size=24, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=8, intermediate_size=40, rms_norm_eps=1e-6,
    rope_theta=1e4, vocab_size=61, max_position_embeddings=128,
)  # fmt: skip
CONFIG = DraftConfig(
    geometry=GEOMETRY, layers=plain_layers(GEOMETRY), block_size=8, mask_token_id=60, hidden_state_indices=(1, 3),
    target_hidden_size=24, dtype="float32",
)  # fmt: skip
K, R, LEN, PAGE = 3, 5, 64, 4


@pytest.fixture(scope="module")
def weights():
    drafter = Drafter(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)
    table = jax.random.normal(jax.random.key(1), (61, 24))
    return pack_drafter(drafter, CONFIG, table, table)


def make_engine(weights, **changes) -> DraftEngine:
    arguments = {"max_num_seqs": R, "max_model_len": LEN, "num_speculative_tokens": K, "page_size": PAGE}
    engine = DraftEngine(CONFIG, weights, **arguments | {"max_num_batched_tokens": 48} | changes)
    engine.capture(progress=False)
    return engine


@pytest.fixture(scope="module")
def compiled(weights):
    """One captured engine whose programs every test may reuse through `fresh`."""
    return make_engine(weights)


@pytest.fixture
def engine(compiled, weights):
    """The captured programs under a fresh pool and request table."""
    return fresh(compiled, weights)


def fresh(compiled, weights, **changes) -> DraftEngine:
    arguments = {"max_num_seqs": R, "max_model_len": LEN, "num_speculative_tokens": K, "page_size": PAGE}
    engine = DraftEngine(CONFIG, weights, **arguments | {"max_num_batched_tokens": 48} | changes)
    engine.programs = engine.scheduled[engine.config.num_speculative_tokens] = compiled.programs
    engine.captured = True
    return engine


def step_for(ids, num_context, num_rejected=0, last=7, **more) -> TargetStep:
    n = len(ids)
    full = lambda value: np.broadcast_to(np.array(value, np.int32), (n,)).copy()  # noqa: E731
    return TargetStep(
        request_ids=list(ids), num_context=full(num_context), num_rejected=full(num_rejected), num_sampled=full(1),
        last_sampled=full(last), next_prefill=full(0), **more,
    )  # fmt: skip


def features(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, CONFIG.feature_size)).astype(np.float32)


def run_trace(engine, ids, steps=3, seed=0):
    """A prefill of ids[i] + 5 tokens each, then decode steps; the drafts of every step."""
    for request_id in ids:
        engine.add_request(request_id)
    lens = [5 + request_id for request_id in ids]
    drafts = [
        engine.propose(
            step_for(ids, lens), np.concatenate([features(n, 100 + i) for i, n in zip(ids, lens, strict=True)])
        )
    ]
    for step in range(steps):
        rows = np.concatenate([features(K + 1, 1000 * step + i) for i in ids])
        drafts.append(engine.propose(step_for(ids, K + 1, [(i + step) % (K + 1) for i in ids]), rows))
    return np.stack(drafts)


def context_pages(engine, request_id):
    request = engine.requests.requests[request_id]
    pool = np.asarray(engine.state.pools[0])
    return pool[:, :, request.pages[0].ids].reshape(2, 2, -1, 3, 8)[:, :, : request.context_len]


def test_capture_changes_no_page(weights, compiled):
    """Would catch: warm-up that writes through slot 0 or a wrapped -1 into a page."""
    engine = fresh(compiled, weights)
    sentinel = np.random.default_rng(3).standard_normal(engine.state.pools[0].shape).astype(np.float32)
    engine.state = DraftState((jnp.asarray(sentinel),))
    engine.capture(progress=False)
    np.testing.assert_array_equal(np.asarray(engine.state.pools[0]), sentinel)


def test_capture_order_is_largest_first(compiled):
    """Would catch: small programs captured first, so that later ones need new memory."""
    assert [d.num_reqs for d in compiled.programs.steps] == [5, 4, 2, 1]
    assert list(compiled.programs.contexts) == [48, 32, 16]


def test_pool_is_donated_and_aliased(compiled):
    """Would catch: a program that copies the pool instead of writing in place."""
    pool_bytes = 4 * int(np.prod(compiled.state.pools[0].shape))
    assert all(row.alias_bytes == pool_bytes for row in compiled.programs.report)


def test_nothing_compiles_over_mixed_traffic(engine):
    """Would catch: a weak type, a new shape or an eager op on the hot path (C69, C70)."""
    rng = np.random.default_rng(0)
    live: list[int] = []
    before = num_compiles()
    for step in range(60):
        if live and (len(live) == R or rng.random() < 0.3):
            engine.remove_request(live.pop(rng.integers(len(live))))
        else:
            engine.add_request(step)
            live.append(step)
        live = [i for i in live if engine.requests.requests[i].context_len < LEN - 10]
        for gone in set(engine.requests.requests) - set(live):
            engine.remove_request(gone)
        if live:
            counts = rng.integers(1, min(12, 48 // len(live)) + 1, len(live))
            drafts = engine.propose(
                step_for(live, counts, [rng.integers(0, c) for c in counts]), features(counts.sum(), step)
            )
            assert drafts.shape == (len(live), K)
    assert num_compiles() == before
    assert engine.eager_compiles == 0


def test_compile_guard_raises():
    """Would catch: a guard that listens to an event JAX no longer sends."""
    with pytest.raises(RuntimeError, match="compiled 1 program"), forbid_compiles("test"):
        jax.jit(lambda x: x * 3 + 0.25)(np.ones(13, np.float32)).block_until_ready()


@pytest.mark.parametrize("num_live", range(1, R + 1))
def test_drafts_do_not_depend_on_the_bucket(weights, compiled, num_live):
    """Would catch: padded requests that leak into real ones; a bucket with its own layout of rows."""
    ids = list(range(num_live))
    ours = fresh(compiled, weights)
    drafts = run_trace(ours, ids)
    ladder = BucketLadder([R * (K + 1)], max_num_seqs=R, query_lens=K + 1)
    largest = make_engine(weights, ladder=ladder)
    np.testing.assert_array_equal(run_trace(largest, ids), drafts)
    for i in ids:
        np.testing.assert_allclose(context_pages(largest, i), context_pages(ours, i), rtol=0, atol=2e-5)


def test_batch_mates_change_no_bit(weights, compiled):
    """Would catch: padding requests that share slot 0 with a live one (C51), cross-request attention."""
    three, four = fresh(compiled, weights), fresh(compiled, weights)
    drafts = run_trace(three, [0, 1, 2])
    with_mate = run_trace(four, [0, 1, 2, 9])
    np.testing.assert_array_equal(with_mate[:, :3], drafts)
    for i in (0, 1, 2):
        np.testing.assert_array_equal(context_pages(four, i), context_pages(three, i))


def test_large_batch_then_small_equals_fresh(weights, compiled):
    """Would catch: stale padding rows of an earlier step in the same bucket (C50, C57)."""
    used = fresh(compiled, weights)
    run_trace(used, [0, 1, 2, 3])
    for i in range(4):
        used.remove_request(i)
    np.testing.assert_array_equal(run_trace(used, [4, 5, 6]), run_trace(fresh(compiled, weights), [4, 5, 6]))


def test_foreign_pages_of_nan_change_nothing(weights, compiled):
    """Would catch: reads past seq_lens, or of the null page, whose weight 0 x NaN is NaN."""
    clean, poisoned = fresh(compiled, weights), fresh(compiled, weights)
    poisoned.state = DraftState((jnp.full_like(poisoned.state.pools[0], jnp.nan),))
    np.testing.assert_array_equal(run_trace(poisoned, [0, 1, 2]), run_trace(clean, [0, 1, 2]))
    assert np.isnan(np.asarray(poisoned.state.pools[0])[:, :, 0]).all(), "the null page was written"
    assert np.isfinite(context_pages(poisoned, 2)).all()


def test_rejected_rows_are_never_stored(weights, compiled):
    """Would catch: hidden states of rejected rows in the cache (C45): NaN there must stay out."""
    clean, poisoned = fresh(compiled, weights), fresh(compiled, weights)
    for engine in (clean, poisoned):
        engine.add_request(0)
        engine.propose(step_for([0], 6), features(6))
    rows = features(K + 1, 5)
    nan_rows = rows.copy()
    nan_rows[2:] = np.nan
    expected = clean.propose(step_for([0], K + 1, 2), rows)
    np.testing.assert_array_equal(poisoned.propose(step_for([0], K + 1, 2), nan_rows), expected)
    assert poisoned.requests.requests[0].context_len == 8
    np.testing.assert_array_equal(context_pages(poisoned, 0), context_pages(clean, 0))


def test_prefill_through_context_programs_equals_one_step(weights, compiled):
    """Would catch: context rows stored at other slots or positions by the row-bucket programs than by the step."""
    at_once, in_parts = fresh(compiled, weights), fresh(compiled, weights)
    rows = features(20)
    at_once.add_request(0)
    expected = at_once.propose(step_for([0], 20), rows)  # 20 rows > 4: a context program
    in_parts.add_request(0)
    for start in range(0, 20, 4):  # 4 rows: in the step
        drafts = in_parts.propose(step_for([0], 4), rows[start : start + 4])
    np.testing.assert_array_equal(drafts, expected)
    np.testing.assert_allclose(context_pages(in_parts, 0), context_pages(at_once, 0), rtol=0, atol=2e-5)


def test_context_outside_the_program_is_the_same(weights, compiled):
    """Would catch: the ablation's split computing something else."""
    split = make_engine(weights, context_in_program=False)
    np.testing.assert_array_equal(run_trace(split, [0, 1, 2]), run_trace(fresh(compiled, weights), [0, 1, 2]))


def test_device_features_at_a_row_bucket(engine, weights, compiled):
    """Would catch: padded rows of a device array taken for context; an array of odd length that would compile."""
    ours = fresh(compiled, weights)
    for e in (engine, ours):
        e.add_request(0)
    rows = features(10)
    padded = np.full((16, CONFIG.feature_size), np.nan, np.float32)
    padded[:10] = rows
    np.testing.assert_array_equal(
        ours.propose(step_for([0], 10), jax.device_put(padded)), engine.propose(step_for([0], 10), rows)
    )
    with pytest.raises(InputError, match=r"device have 10 rows for 10; pad them .* to 4 or one of \[16, 32, 48\]"):
        ours.propose(step_for([0], 10), jax.device_put(rows))
    with pytest.raises(InputError, match=r"expected \[rows, 48\]: 2 hidden states x width 24"):
        ours.propose(step_for([0], 10), features(10)[:, :24])
    with pytest.raises(InputError, match="features have 9 rows, the step's num_context add up to 10"):
        ours.propose(step_for([0], 10), rows[:9])


def test_off_the_ladder_is_eager_and_counted(weights, caplog):
    """Would catch: a hole in the ladder that compiles silently, or strict mode that does not refuse."""
    holes = BucketLadder([4], max_num_seqs=R, query_lens=K + 1)
    engine = make_engine(weights, ladder=holes)
    drafts = run_trace(engine, [0, 1])
    assert engine.eager_compiles == 1
    assert "no bucket covers 2 requests" in caplog.text
    assert drafts.shape == (4, 2, K)
    strict = make_engine(weights, ladder=holes, strict=True)
    with pytest.raises(InputError, match="no bucket covers 2 requests"):
        run_trace(strict, [0, 1])


def test_external_pages(weights, compiled):
    """Would catch: block tables of the caller ignored, or page ids out of the pool accepted."""
    outside = fresh(compiled, weights, external_pages=True)
    outside.add_request(0)
    tables = np.array([[9, 4, 7]], np.int32)
    step = replace(step_for([0], 6), block_tables=tables)
    inside = fresh(compiled, weights)
    inside.add_request(0)
    np.testing.assert_array_equal(outside.propose(step, features(6)), inside.propose(step_for([0], 6), features(6)))
    pool = np.asarray(outside.state.pools[0])
    assert [p for p in range(pool.shape[2]) if pool[:, :, p].any()] == [4, 7, 9]
    with pytest.raises(
        InputError, match="has no page for position 8; its block sees positions 0 to 9; reserve 4 rows of lookahead"
    ):
        outside.propose(replace(step, block_tables=tables[:, :2], start_position=np.zeros(1, np.int32)), features(6))
    with pytest.raises(InputError, match="page ids outside 0 to 80"):
        outside.propose(replace(step, block_tables=tables + 80), features(6))


def test_refusals_change_nothing(weights, compiled):
    """Would catch: a refused step that leaks pages, rows or context lengths into the next one."""
    engine = fresh(compiled, weights, num_pages=81)
    with pytest.raises(InputError, match="a prompt of 65 tokens exceeds max_model_len=64"):
        engine.add_request("long", num_prompt_tokens=65)
    for i in range(R):
        engine.add_request(i)
    with pytest.raises(InputError, match="6 requests exceed max_num_seqs=5"):
        engine.add_request("sixth")
    with pytest.raises(InputError, match="request 3 is already live"):
        engine.add_request(3)
    free = engine.requests.allocators[0].num_free
    with pytest.raises(InputError, match="4 of 4 context rows rejected"):
        engine.propose(step_for([0, 1], 4, [0, 4]), features(8))
    with pytest.raises(InputError, match="49 context rows exceed max_num_batched_tokens=48"):
        engine.propose(step_for([0], 49), features(49))
    with pytest.raises(InputError, match="request 'ghost' is not live"):
        engine.propose(step_for(["ghost"], 4), features(4))
    with pytest.raises(InputError, match="name a request twice"):
        engine.propose(step_for([1, 1], 4), features(8))
    with pytest.raises(InputError, match="exceed max_model_len=64"):
        engine.propose(step_for([1], 4, start_position=np.array([62], np.int32)), features(4))
    with pytest.raises(InputError, match="start_position=2 leaves a gap after its 0 stored tokens"):
        engine.propose(step_for([1], 4, start_position=np.array([2], np.int32)), features(4))
    with pytest.raises(InputError, match="anchor token 61 is outside the vocabulary of 61"):
        engine.propose(step_for([1], 4, last=61), features(4))
    with pytest.raises(InputError, match="num_sampled is float64, expected integers"):
        engine.propose(replace(step_for([1], 4), num_sampled=np.array([1.5])), features(4))
    assert engine.requests.allocators[0].num_free == free
    assert all(request.context_len == 0 for request in engine.requests.requests.values())
    np.testing.assert_array_equal(np.asarray(engine.state.pools[0]), 0)


def test_out_of_pages_harms_nobody(weights):
    """Would catch: pages given to the first requests of a step that is then refused."""
    engine = make_engine(weights, num_pages=8)  # 7 pages of 4 for everybody
    engine.add_request(0)
    engine.add_request(1)
    first = engine.propose(step_for([0], 8), features(8))  # 8 + 4 rows: 3 pages
    pool = np.asarray(engine.state.pools[0])
    with pytest.raises(InputError, match="needs 7 more pages of 4 tokens, 4 are free"):
        engine.propose(step_for([0, 1], [8, 13]), features(21))
    np.testing.assert_array_equal(np.asarray(engine.state.pools[0]), pool)
    assert engine.requests.requests[0].context_len == 8
    assert engine.requests.requests[1].pages[0].ids == []
    engine.remove_request(0)
    engine.add_request(2)
    np.testing.assert_array_equal(engine.propose(step_for([2], 8), features(8)), first)


def test_near_max_model_len(weights, compiled):
    """Would catch: positions past the limit that alias into the last page (C28)."""
    engine = fresh(compiled, weights)
    engine.add_request(0)
    for start in range(0, 60, 20):
        engine.propose(step_for([0], 20), features(20, start))
    drafts = engine.propose(step_for([0], 3), features(3))  # 63 tokens: one position is left for a block of 4
    assert drafts.shape == (1, K)
    assert engine.requests.requests[0].context_len == 63
    assert len(engine.requests.requests[0].pages[0].ids) == 16


def test_limits_at_the_start(weights):
    """Would catch: a token budget under one verify of all requests, or K that no block has (C54)."""
    with pytest.raises(
        InputError, match="max_num_batched_tokens=19 is less than a verify of 5 requests x 4 rows; pass 20"
    ):
        make_engine(weights, max_num_batched_tokens=19)
    with pytest.raises(InputError, match="num_speculative_tokens=8: this drafter's blocks of 8"):
        make_engine(weights, num_speculative_tokens=8)
    with pytest.raises(InputError, match="max_model_len=129"):
        make_engine(weights, max_model_len=129)
    with pytest.raises(InputError, match="call capture\\(\\) first"):
        engine = DraftEngine(CONFIG, weights, max_num_seqs=1, max_model_len=LEN)
        engine.add_request(0)
        engine.propose(step_for([0], 4), features(4))


def test_a_failed_step_loses_the_engine(weights, compiled, monkeypatch):
    """Would catch: an engine that goes on over a pool that a failed donated call has consumed."""
    engine = fresh(compiled, weights)
    engine.add_request(0)

    def broken(*_):
        raise RuntimeError("device on fire")

    monkeypatch.setattr(engine.programs, "run_step", broken)
    with pytest.raises(RuntimeError, match="device on fire"):
        engine.propose(step_for([0], 4), features(4))
    with pytest.raises(RuntimeError, match="the engine lost its pool"):
        engine.propose(step_for([0], 4), features(4))


CACHE_SCRIPT = """
import sys, jax
from collections import Counter
counts = Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
from jax_dflash.programs import compile_cache
from parity_tests import test_engine as t
import jax.numpy as jnp
from flax import nnx
drafter = t.Drafter(t.CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)
weights = t.pack_drafter(drafter, t.CONFIG, jnp.ones((61, 24)), jnp.ones((61, 24)))
counts.clear()
with compile_cache(sys.argv[1]):
    t.make_engine(weights)
print(counts["/jax/compilation_cache/cache_hits"], counts["/jax/compilation_cache/cache_misses"])
"""


def test_second_process_compiles_nothing(tmp_path):
    """Would catch: a cache key that differs from process to process, or programs below the size that is kept (C68)."""
    outputs = [
        subprocess.run([sys.executable, "-c", CACHE_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = (list(map(int, out.stdout.split())) for out in outputs)
    assert first[1] >= 7, "seven draft programs were not written"
    assert second == [first[1], 0]


@pytest.mark.parametrize("package", ["jax", "torch"])
def test_a_long_block_must_be_asked_for(package):
    """More drafts than the drafter was trained for, silently; or refused to somebody who knows it."""
    engine_class = {"jax": DraftEngine, "torch": torch_ref.engine.DraftEngine}[package]
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "page_size": 4, "num_speculative_tokens": DRAFT.block_size}
    weights = draft_weights(FRAMEWORKS[package])
    with pytest.raises(InputError, match="more need allow_long_block"):
        engine_class(DRAFT, weights, **sizes)
    assert engine_class(DRAFT, weights, **sizes, allow_long_block=True).config.query_len == DRAFT.block_size + 1
