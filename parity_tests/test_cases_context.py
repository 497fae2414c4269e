"""cases.md, context K/V and the paged pool: what a step writes and what it must not touch or read.

Engines run on pools of NaN, so that every row that a step reads without having written it shows, and every row that it
writes too: what is still NaN afterwards was not touched.
"""

import functools
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

import jax_dflash.engine
import torch_ref.engine
from jax_dflash.batch import EngineConfig
from jax_dflash.config import InputError, plain_rope
from jax_dflash.names import draft_tensors, target_tensors
from jax_dflash.request_table import RequestTable
from parity_tests.engines import (
    CONFIG,
    KINDS,
    LIMITS,
    features,
    make_engine,
    one_thread,
    pool_of,
    prefill,
    set_pool,
    slots_of,
    step_for,
    weights_of,
)
from parity_tests.test_forward import run_python
from parity_tests.tiny import FRAMEWORKS, TARGET, draft_weights, numpy, random_values, relative_rmse, resized

__all__ = ["one_thread"]
K = LIMITS.num_speculative_tokens
kinds = pytest.mark.parametrize("kind", KINDS)


def written(engine) -> list[int]:
    """Slots that hold numbers in every layer, K and V; the others must be NaN in all of them."""
    finite = np.isfinite(pool_of(engine))
    some, every = (reduce(finite, axis=(0, 1, 3, 4)) for reduce in (np.any, np.all))
    np.testing.assert_array_equal(some, every)
    return np.flatnonzero(every).tolist()


def run_fixture(kind: str, rejected_row: float):
    """The cases' fixture F: request 0 decodes at positions 4 to 7 with one row rejected, request 1 is a new prompt."""
    engine = make_engine(kind, fill=np.nan, external_pages=True)
    engine.add_request(0)
    engine.propose(step_for([0], 4, block_tables=np.array([[5, 2, 0, 0]])), features(4))
    engine.add_request(1)
    rows = features(6, 1)
    rows[3] = rejected_row
    step = step_for(
        [0, 1], [4, 2], [1, 0], num_sampled=[3, 0], last=[50, 0], next_prefill=[0, 60],
        block_tables=np.array([[5, 2, 7, 0], [3, 6, 0, 0]]),
    )  # fmt: skip
    return engine, engine.propose(step, rows)


@kinds
def test_a_rejected_row_writes_nothing(kind):
    """C45: the rejected row's K/V in slot 11, where the anchor's own belongs; NaN in it reaching anybody."""
    (poisoned, drafts), (clean, expected) = (run_fixture(kind, value) for value in (np.nan, 0.5))
    np.testing.assert_array_equal(drafts, expected)
    np.testing.assert_array_equal(pool_of(poisoned), pool_of(clean))
    context, queries = [8, 9, 10, 12, 13], [11, 28, 29, 30, 14, 15, 24, 25]
    first_step = [20, 21, 22, 23]
    assert written(poisoned) == sorted(first_step + context + queries)

    f = FRAMEWORKS["jax" if kind == "jax" else "torch"]
    weights, g = weights_of(f.name), CONFIG.geometry

    def anchor_kv(weights, ids, positions):
        table = f.layers.rope_table(positions, plain_rope(g), weights.fc.dtype)
        attend = lambda pool, q, k, v: ((k, v), q)  # noqa: E731
        return f.layers.decoder_layer(weights.layers[0], g, None, f.drafter.embed(weights, CONFIG, ids), table, attend)[
            0
        ]

    k, v = f.run(anchor_kv, weights, f.ints([[50]]), f.ints([[7]]))
    np.testing.assert_allclose(pool_of(poisoned)[0, :, 11], [numpy(k)[0, 0], numpy(v)[0, 0]], atol=2e-6)


@kinds
def test_rejected_rows_behind_the_block_write_nothing(kind):
    """C45: rejected rows stored where no block comes over them: of 10 rows 8 are rejected, the block covers
    positions 2 to 5, and the pages go on to 7."""
    engine = make_engine(kind, fill=np.nan)
    engine.add_request(0)
    engine.propose(step_for([0], 10, 8), features(10))
    assert len(engine.requests.requests[0].pages[0].ids) == 2
    assert written(engine) == sorted(slots_of(engine, 0, 0, 2 + K + 1))


@kinds
def test_positions_past_the_limit_write_nothing(kind):
    """C28: the block's tail at max_model_len written over position 12 columns earlier, or anywhere."""
    engine = make_engine(kind, fill=np.nan)
    engine.add_request(0)
    prefill(engine, [0], 298)
    before, anchor = pool_of(engine), slots_of(engine, 0, 298, 300)
    engine.propose(step_for([0], 1), features(1, 9))  # position 298: of the block 299 to 302 only the anchor is left
    same = (pool_of(engine) == before) | (np.isnan(pool_of(engine)) & np.isnan(before))
    assert np.flatnonzero(~same.all(axis=(0, 1, 3, 4))).tolist() == sorted(anchor)
    with pytest.raises(InputError, match="context positions 299 to 300 exceed max_model_len=300"):
        engine.propose(step_for([0], 2), features(2))


@kinds
def test_positions_are_one_dimensional(kind):
    """C29: three rows of M-RoPE positions flattened, or the first taken, for slots and angles alike."""
    engine = make_engine(kind)
    engine.add_request(0)
    mrope = np.array([[0], [0], [0]], np.int32)
    with pytest.raises(InputError, match=r"start_position has shape \[3, 1\], expected \[1\], one entry a request"):
        engine.propose(step_for([0], 6, start_position=mrope), features(6))
    assert engine.requests.requests[0].context_len == 0


@kinds
def test_slots_follow_the_row_and_the_next_query_the_length(kind):
    """C29: slots [20, 21, 22, 22, 22, 23] of repeated positions; six rows of text stand in six slots of their own."""
    engine = make_engine(kind, fill=np.nan, external_pages=True)
    engine.add_request(0)
    engine.propose(step_for([0], 6, block_tables=np.array([[5, 2, 1]])), features(6))
    assert written(engine) == sorted([20, 21, 22, 23, 8, 9] + [10, 11, 4, 5])
    assert engine.requests.requests[0].context_len == 6


@kinds
def test_restored_context_must_have_been_stored(kind):
    """C46: a prompt whose first 6 tokens came from a prefix cache, or a request resumed after it lost its pages: the draft
    K/V of those tokens does not exist, and attention would read what the pages hold."""
    engine = make_engine(kind, fill=np.nan)
    engine.add_request(0)
    restored = step_for([0], 2, start_position=np.array([6], np.int32))
    with pytest.raises(InputError, match="start_position=6 leaves a gap after its 0 stored tokens"):
        engine.propose(restored, features(8)[6:])
    cold = engine.propose(step_for([0], 8), features(8))  # recomputed
    assert len(written(engine)) == 8 + K + 1
    engine.remove_request(0)
    engine.add_request(0)
    with pytest.raises(InputError, match="leaves a gap after its 0 stored tokens"):
        engine.propose(restored, features(8)[6:])
    np.testing.assert_array_equal(engine.propose(step_for([0], 8), features(8)), cold)


@kinds
def test_restored_context_is_masked(kind):
    """C46: a prompt of 8 whose first 6 tokens were restored and never ran: rows 0 to 5 of the pages are NaN, and a program
    that reads them drafts from NaN. Only positions 6, 7 and the block have slots. The drafts are those of a context of
    these two rows alone (K and V at other positions, but only distances count), now and after another step."""
    found = []
    for cached in (6, 0):
        engine = make_engine(kind, fill=np.nan)
        engine.add_request(0, cached + 2, cached_tokens=cached)
        drafts = [engine.propose(step_for([0], 2), features(2))]
        assert written(engine) == slots_of(engine, 0, cached, cached + 2 + K + 1)
        drafts.append(engine.propose(step_for([0], K + 1, 1, last=11), features(K + 1, 5)))
        assert engine.requests.requests[0].context_len == cached + 2 + K
        found.append(np.stack(drafts))
    np.testing.assert_array_equal(*found)
    cold = make_engine(kind, fill=np.nan)
    cold.add_request(0, 8)
    others = cold.propose(step_for([0], 8), np.concatenate([features(6, 3), features(2)]))
    assert (others != found[0][0]).any(), "six rows more of context must change a draft"


@kinds
def test_a_gap_needs_a_first_context_position(kind):
    """C46: with the caller's pages a gap after the stored context passed unseen. `first_context_position` says that nobody
    looks there (pages before it may be null); of a caller's own pages also that they hold those keys."""
    tables = np.array([[0, 2, 1]])
    drafts = []
    for external in (False, True):
        engine = make_engine(kind, fill=np.nan, external_pages=external)
        engine.add_request(0)
        more = {"start_position": np.array([6])} | ({"block_tables": tables} if external else {})
        with pytest.raises(
            InputError, match="start_position=6 leaves a gap after its 0 stored tokens; .*first_context_pos"
        ):
            engine.propose(step_for([0], 2, **more), features(2))
        with pytest.raises(InputError, match="first_context_position=7; expected 0 to its start_position=6"):
            engine.propose(step_for([0], 2, first_context_position=np.array([7]), **more), features(2))
        drafts.append(engine.propose(step_for([0], 2, first_context_position=np.array([6]), **more), features(2)))
    np.testing.assert_array_equal(*drafts)
    with pytest.raises(InputError, match="has no page for position 0; its block sees positions 0 to 11"):
        engine.propose(step_for([0], 2, first_context_position=np.array([0]), **more), features(2))
    set_pool(engine, 0.25)
    engine.propose(
        step_for([0], 2, first_context_position=np.array([0]), **more | {"block_tables": np.array([[3, 2, 1]])}),
        features(2),
    )
    assert engine.requests.requests[0].first_context_position == 0


def test_a_cached_prompt_still_runs_its_last_token():
    """C46: a prompt that was restored whole, or more than whole, leaves a step without context rows."""
    config = EngineConfig.make(CONFIG, max_num_seqs=2, max_model_len=64, num_speculative_tokens=K)
    requests = RequestTable(config, external_pages=False)
    for cached in (8, 9, -1):
        with pytest.raises(
            InputError, match=f"cached_tokens={cached}; expected 0 or more and fewer than its prompt's 8"
        ):
            requests.add(0, 8, cached)
    requests.add(0, 8, 7)
    requests.add(1, cached_tokens=6)
    assert [r.context_len for r in requests.requests.values()] == [7, 6]


@kinds
def test_a_shorter_request_on_a_used_slot(kind):
    """C50, C90: lengths, pages or state of request A (9 tokens) left for B (5 tokens) on the same slot, which then drafts
    otherwise, or not at all."""
    used, fresh = (make_engine(kind, fill=np.nan) for _ in range(2))
    used.add_request("A")
    index = used.requests.requests["A"].index
    prefill(used, ["A"], 9, seed=1)
    used.propose(step_for(["A"], K + 1, 2), features(K + 1, 5))
    used.remove_request("A")
    found = []
    for engine in (used, fresh):
        engine.add_request("B")
        drafts = [engine.propose(step_for(["B"], 5), features(5))]
        drafts += [engine.propose(step_for(["B"], K + 1, i), features(K + 1, 10 + i)) for i in range(K)]
        found.append((np.stack(drafts), pool_of(engine)[:, :, slots_of(engine, "B")]))
    assert used.requests.requests["B"].index == index
    assert found[0][0].shape == (K + 1, 1, K)
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@kinds
def test_a_cached_prompt_is_drafted_for_again(kind):
    """C90: no drafts for the second request with a prompt; the count of drafts is K a live request at every step."""
    engine, proposed = make_engine(kind), []
    for request_id in ("first", "second"):
        engine.add_request(request_id)
        proposed.append(prefill(engine, [request_id], 10, seed=3).tolist())
        proposed[-1] += engine.propose(step_for([request_id], K + 1), features(K + 1)).tolist()
    assert np.array(proposed).shape == (2, 2, K)
    assert proposed[0] == proposed[1]
    with pytest.raises(InputError, match="the step holds no request"):
        engine.propose(step_for([], 0), features(0))


@kinds
def test_a_fourth_request_changes_no_bit(kind):
    """C51: padding that lives in slot 0, or a batch mate that reaches another's state. The bucket of 4 is the same."""
    engines, drafts = [], []
    for ids in ([0, 1, 2], [0, 1, 2, 3]):
        engine = make_engine(kind, fill=np.nan)
        for i in ids:
            engine.add_request(i)
        steps = []
        for step in range(3):
            rows = np.concatenate([features(4, 10 * step + i) for i in ids])
            steps.append(engine.propose(step_for(ids, 4, [(i + step) % 3 if step else 0 for i in ids]), rows)[:3])
        engines.append(engine)
        drafts.append(steps)
    three, four = engines
    np.testing.assert_array_equal(*drafts)
    for i in (0, 1, 2):
        slots = slots_of(three, i, 0, three.requests.requests[i].context_len + K + 1)
        other = slots_of(four, i, 0, four.requests.requests[i].context_len + K + 1)
        np.testing.assert_array_equal(pool_of(three)[:, :, slots], pool_of(four)[:, :, other])
    pages = {page for request in three.requests.requests.values() for page in request.pages[0].ids}
    assert {slot // LIMITS.page_size for slot in written(three)} == pages


@kinds
def test_padded_rows_of_a_later_step_change_nothing(kind):
    """C57: a batch of 4, then request 3 alone, then the other three in the bucket of 4, whose padded row still says what
    request 3 was at first: its new context must stay. And a first-ever replay before any batch."""
    engine = make_engine(kind, fill=np.nan)
    assert written(engine) == []
    for i in range(4):
        engine.add_request(i)
    engine.propose(step_for(range(4), 4), features(16))
    engine.propose(step_for([3], 4), features(4, 1))
    before = pool_of(engine)
    engine.propose(step_for([0, 1, 2], 4, last=11), features(12, 2))
    kept = slots_of(engine, 3, 0, 8 + K + 1)
    np.testing.assert_array_equal(pool_of(engine)[:, :, kept], before[:, :, kept])
    for i in range(3):
        first = slots_of(engine, i, 0, 4)
        np.testing.assert_array_equal(pool_of(engine)[:, :, first], before[:, :, first])


BIG = replace(
    resized(num_layers=5, num_heads=4, num_kv_heads=4, head_dim=128, vocab_size=101, max_position_embeddings=131_091),
    mask_token_id=99,
    block_size=16,
)


@pytest.fixture(scope="module")
def big_weights():
    return {name: draft_weights(f, BIG, "bfloat16") for name, f in FRAMEWORKS.items()}


@pytest.mark.parametrize("max_num_seqs, max_model_len", [(1, 17), (64, 131_091)])
def test_the_pool_is_pages(f, big_weights, max_num_seqs, max_model_len):
    """C52: a buffer of max_num_seqs x max_model_len rows (80 GiB here) instead of 10 pages of 16 rows of 10,240 bytes."""
    assert 64 * 131_091 * 5 * 4 * 128 * 2 * 2 == 85_911_797_760
    engine = {"jax": jax_dflash.engine, "torch": torch_ref.engine}[f.name].DraftEngine(
        BIG, big_weights[f.name], max_num_seqs=max_num_seqs, max_model_len=max_model_len, page_size=16, num_pages=10
    )
    pool = engine.state.pools[0]
    assert pool.nbytes == 1_638_400
    if f.name == "torch":  # and the row behind the last page of each layer's K and V, where PAD goes
        assert pool.untyped_storage().nbytes() == 1_638_400 + 10_240
    assert len(jax.tree.leaves(tuple(engine.state))) == 1


def test_a_verify_of_everybody_fits_or_is_refused():
    """C54: buffers of max_num_batched_tokens=2048 rows for a step of 256 x 9 = 2304."""
    config = replace(CONFIG, block_size=9)
    make = {"max_num_seqs": 256, "max_model_len": 64}
    with pytest.raises(InputError, match="is less than a verify of 256 requests x 9 rows; pass 2304 or more"):
        EngineConfig.make(config, max_num_batched_tokens=2048, **make)
    for given in (None, 2304):
        engine = EngineConfig.make(config, max_num_batched_tokens=given, **make)
        assert (engine.max_num_batched_tokens, engine.row_buckets[-1], engine.context_rows(256)) == (2304,) * 3


@pytest.mark.parametrize("context, pages", [(1, 1), (12, 1), (13, 2), (16, 2), (28, 2), (29, 3), (60, 4), (64, 4)])
def test_a_step_reserves_the_anchor_and_its_drafts(context, pages):
    """C54: K rows of lookahead instead of K + 1, so that the last draft's K/V has no page; or pages past the limit."""
    config = EngineConfig.make(CONFIG, max_num_seqs=1, max_model_len=64, num_speculative_tokens=3, page_size=16)
    requests = RequestTable(config, external_pages=False)
    requests.add(0)
    requests.reserve(step_for([0], context))
    assert len(requests.requests[0].pages[0].ids) == pages


@pytest.mark.parametrize("num_live", range(1, 9))
@kinds
def test_every_number_of_live_requests(kind, num_live):
    """C55: a phantom row of a padded request, or a live one cut off, at some batch sizes: written slots and result rows
    are those of the live requests, for 1 to 8 of them in buckets of 2, 4 and 8."""
    engine = make_engine(kind, fill=np.nan)
    ids = list(range(num_live))
    for i in ids:
        engine.add_request(i)
    drafts = engine.propose(step_for(ids, 3), features(3 * num_live))
    assert drafts.shape == (num_live, K)
    assert written(engine) == sorted(slot for i in ids for slot in slots_of(engine, i, 0, 3 + K + 1))


def test_target_and_draft_pools_keep_their_dtypes(f):
    """C18: the draft pool made in the target's dtype, or the other way round, and left so by a construction that fails."""
    engines = {"jax": jax_dflash.engine, "torch": torch_ref.engine}
    weights = f.target.pack(f.tree(random_values(target_tensors(TARGET))), TARGET)
    sizes = {"num_speculative_tokens": 0, "max_num_seqs": 1, "max_model_len": 32, "num_pages": 3}
    target = f.target_runner.TargetRunner(TARGET, weights, taps=(), widths=(1,), **sizes).pool
    make = {"max_num_seqs": 2, "max_model_len": 32, "page_size": 4}
    draft = engines[f.name].DraftEngine(CONFIG, weights_of(f.name, "bfloat16"), **make)
    for attempt in range(2):
        assert str(target.dtype).endswith("float32")
        assert str(draft.state.pools[0].dtype).endswith("bfloat16")
        if attempt == 0:
            with pytest.raises(InputError, match="num_pages=1: page 0 is the null page"):
                engines[f.name].DraftEngine(CONFIG, weights_of(f.name), **make, num_pages=1)


W = 6  # context rows of the window


def window_function(f):
    """Hidden states of a block behind a window of W context rows, all positions shifted by `offset`."""
    tables, seq_lens = [[2, 1, 3]], [W + K + 1]
    slots = [8, 9, 10, 11, 4, 5, 6, 7, 12, 13]
    ints = f.ints(tables), f.ints(seq_lens), f.ints(slots[:W]), f.ints(slots[W:])

    def run(weights, pool, combined, x, context_positions, positions):
        tables, seq_lens, context_slots, query_slots = ints

        def attend(pool, layer, q, k, v):
            pool = f.kv_cache.store_layer(pool, layer, k[0], v[0], query_slots)
            return pool, f.dense.attention(pool, layer, q, tables, seq_lens)

        kv = f.drafter.precompute_context_kv(weights, CONFIG, combined, context_positions)
        pool = f.kv_cache.store_context(pool, kv, context_slots)
        return f.drafter.query_forward(weights, CONFIG, pool, x, positions, attend)[1]

    return run


def shift_errors(f, dtype: str, offsets=(100, 500, 11_000)) -> dict[str, float]:
    """What shifting all positions changes, relative to the output, by offset; "apart" where only the context is shifted."""
    rng = np.random.default_rng(0)
    D = CONFIG.geometry.hidden_size
    combined, x = (f.floats(rng.standard_normal(shape), dtype) for shape in ((W, D), (1, K + 1, D)))
    run, weights = window_function(f), draft_weights(f, CONFIG, dtype)

    def hidden(context_offset, query_offset):
        pool = f.pool(f.kv_cache.pool_shape(CONFIG.geometry, 4, 4), dtype)
        positions = f.ints(context_offset + np.arange(W)), f.ints(query_offset + W + np.arange(K + 1)[None])
        return numpy(f.run(run, weights, pool, combined, x, *positions))

    base = hidden(0, 0)
    errors = {str(n): relative_rmse(hidden(n, n), base) for n in offsets}
    return errors | {"apart": relative_rmse(hidden(100, 0), base)}


def test_only_distances_count(f):
    """C31: context and block with positions of different origins (absolute, and relative to a clipped window)."""
    errors = shift_errors(f, "float32")
    assert errors["100"] <= 1e-5 and errors["500"] <= 1e-5 and errors["11000"] <= 3e-5, errors
    assert errors["apart"] > 0.01


def test_only_distances_count_in_float64():
    """C31: an angle rounded to float32 on the way, which float32 itself hides."""
    code = (
        "import json; from parity_tests.test_cases_context import FRAMEWORKS, shift_errors; "
        "print(json.dumps({f.name: shift_errors(f, 'float64') for f in FRAMEWORKS.values()}))"
    )
    found = json.loads(run_python(code, JAX_ENABLE_X64="1").splitlines()[-1])
    for errors in found.values():
        assert max(errors[n] for n in ("100", "500", "11000")) <= 1e-12, found
        assert errors["apart"] > 0.01


NO_EPSILON = replace(CONFIG, geometry=replace(CONFIG.geometry, rms_norm_eps=0.0, head_dim=12))


def rotated_in_part(rotary_dim: int):
    """NO_EPSILON with RoPE of so many of a head's 12 channels."""
    rope = replace(plain_rope(NO_EPSILON.geometry), rotary_dim=rotary_dim)
    return replace(NO_EPSILON, layers=tuple(replace(layer, rope=rope) for layer in NO_EPSILON.layers))


@functools.cache
def fused_context_kv(framework: str, rotary_dim: int):
    """precompute_context_kv, one function object so that JAX compiles each shape once."""
    f, config = FRAMEWORKS[framework], rotated_in_part(rotary_dim)
    return lambda weights, x, positions: f.drafter.precompute_context_kv(weights, config, x, positions)


def context_kv_by_layer(values: dict[str, np.ndarray], x: np.ndarray, positions: np.ndarray, rotary_dim: int):
    """Each layer's own projections of each row by itself, in numpy float64: [L, 2, C, K, H]."""
    g, out = NO_EPSILON.geometry, []
    for layer in range(g.num_layers):
        p = f"layers.{layer}.self_attn."
        for row, position in zip(x.astype(np.float64), positions, strict=True):
            y = row / np.sqrt(np.mean(row**2)) * values["hidden_norm.weight"]
            k, v = (values[f"{p}{n}_proj.weight"].astype(np.float64) @ y for n in "kv")
            k, v = (a.reshape(g.num_kv_heads, g.head_dim) for a in (k, v))
            k = k / np.sqrt(np.mean(k**2, axis=-1, keepdims=True)) * values[f"{p}k_norm.weight"]
            angles = position * g.rope_theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
            cos, sin, half = np.cos(angles), np.sin(angles), rotary_dim // 2
            a, b, rest = np.split(k, [half, rotary_dim], axis=-1)
            out.append((np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1), v))
    kv = np.array(out).reshape(g.num_layers, len(x), 2, g.num_kv_heads, g.head_dim)
    return kv.swapaxes(1, 2)


@pytest.mark.parametrize("rotary_dim", [12, 6], ids=["full", "half"])
@pytest.mark.parametrize("num_rows", [1, 3, 4, 5, 63, 64, 65, 257])
def test_fused_context_kv_of_any_number_of_rows(f, num_rows, rotary_dim):
    """C43: rows mixed or misplaced at some row counts (a tile of 4 or 64, one more, one less), which happens to long
    prompts only. In whole numbers every sum is exact in any order, so V is equal bit for bit, and K up to the rounding of
    its norm and angles; then random values, each element against the root mean square of its row. Rotary of all 12 channels
    of a head and of 6."""
    rng = np.random.default_rng(num_rows)
    positions = np.arange(num_rows) + 7
    table = np.zeros((1, CONFIG.geometry.hidden_size))
    config = rotated_in_part(rotary_dim)
    random = random_values(draft_tensors(config))
    whole = {n: np.ones_like(v) if v.ndim == 1 else np.sign(v) for n, v in random.items()}
    normal = rng.standard_normal((num_rows, CONFIG.geometry.hidden_size))
    for dtype, values, x, limit in (
        ("float32", whole, np.sign(normal), 1e-5),  # rows of mean square 1: the norm changes nothing
        ("float32", random, normal, 1e-5),
        ("bfloat16", random, normal, 3e-2),
    ):
        weights = f.drafter.pack(f.tree(values, dtype), config, *[f.floats(table, dtype)] * 2)
        x = f.floats(x, dtype)
        found = numpy(f.run(fused_context_kv(f.name, rotary_dim), weights, x, f.ints(positions)))
        rounded = {name: numpy(value) for name, value in f.tree(values, dtype).items()}
        expected = context_kv_by_layer(rounded, numpy(x), positions, rotary_dim)
        rms = np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
        assert np.max(np.abs(found - expected) / rms) <= limit
        if values is whole:
            np.testing.assert_array_equal(found[:, 1], expected[:, 1])
