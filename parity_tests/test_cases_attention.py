"""cases.md, attention: who sees whom, in every kernel there is. The kernels are called with literal keys and values."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_dflash import train
from jax_dflash.batch import EngineConfig
from jax_dflash.request_table import RequestTable
from parity_tests.engines import CONFIG, features, step_for, weights_of
from parity_tests.tiny import FRAMEWORKS, numpy

KERNELS = [("jax", {}), ("torch", {"kernel": "dense"}), ("torch", {"kernel": "sdpa"})]
PAGE = 4


@pytest.fixture(params=KERNELS, ids=["jax", "torch-dense", "torch-sdpa"])
def attend(request):
    """Attention over the keys and values `[B, S, K, H]` of each request, laid out in pages of 4 behind the null page."""
    name, kernel = request.param
    f = FRAMEWORKS[name]

    def run(q, k, v, seq_lens, positions=None, *, kind=(None, False), evicted=0):
        """`kind` is the layer's window and direction; the first `evicted` pages are gone, and the null page is NaN."""
        B, S, K, H = k.shape
        width = -(-S // PAGE)
        pool = np.zeros((1, 2, 1 + B * width, PAGE, K, H), np.float32)
        flat = pool.reshape(2, -1, K, H)
        tables = 1 + np.arange(B * width).reshape(B, width)
        for b in range(B):
            at = tables[b, np.arange(S) // PAGE] * PAGE + np.arange(S) % PAGE
            flat[0, at], flat[1, at] = k[b], v[b]
        pool[:, :, 0], tables[:, :evicted] = np.nan, 0
        args = f.pool(pool.shape, fill=pool), 0, f.floats(q), f.ints(tables), f.ints(seq_lens)
        bounds = f.dense.key_bounds(args[-1], q.shape[1], *kind) if positions is None else (f.ints(positions),)
        return numpy(f.dense.attention(*args, *bounds, **kernel))

    return run


def test_a_mask_is_no_number(attend):
    """C37: True and False added to the scores as 1 and 0, which gives the weights [0.731059, 0.268941]."""
    q, k = np.zeros((1, 1, 1, 2)), np.zeros((1, 2, 1, 2))
    v = np.eye(2)[None, :, None]  # the output is the weights
    assert attend(q, k, v, [1])[0, 0, 0].tolist() == [1, 0]
    assert attend(q, k, v, [2], [[0]])[0, 0, 0].tolist() == [1, 0]
    assert attend(q, k, v, [2])[0, 0, 0].tolist() == [0.5, 0.5]


def test_the_training_mask_is_no_number():
    """C37, in training."""
    q, k = jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 2, 1, 2))
    v = jnp.eye(2)[None, :, None]
    out = train.masked_attention(q, k, v, jnp.array([[[True, False]]]))
    assert out[0, 0, 0].tolist() == [1, 0]


def test_visible_keys(attend):
    """C33, C35: 7 keys of context and a block of 4: bidirectional sees [11, 11, 11, 11], causal [8, 9, 10, 11]."""
    q, k = np.zeros((1, 4, 1, 12)), np.zeros((1, 11, 1, 12))
    v = np.eye(11, 12)[None, :, None]
    assert (attend(q, k, v, [11])[0, :, 0] > 0).sum(axis=-1).tolist() == [11, 11, 11, 11]
    causal = attend(q, k, v, [11], [[7, 8, 9, 10]])[0, :, 0]
    assert (causal > 0).sum(axis=-1).tolist() == [8, 9, 10, 11]
    np.testing.assert_allclose(causal[0, :8], 1 / 8, rtol=1e-6)
    assert not causal[0, 8:].any()


SEEN = {
    (None, False): [11, 11, 11, 11],
    (None, True): [8, 9, 10, 11],
    (4, True): [4, 4, 4, 4],
    (4, False): [7, 6, 5, 4],
    (100, True): [8, 9, 10, 11],
    (100, False): [11, 11, 11, 11],
}


@pytest.mark.parametrize("kind", SEEN)
def test_windows(attend, kind):
    """C32, C33: a window ignored ([11, 11, 11, 11]), off by one, or to one side only where it is symmetric. 7 keys of
    context and a block of 4; what no row sees is NaN, and a shorter request in the batch has bounds of its own."""
    q, k = np.zeros((2, 4, 1, 12)), np.zeros((2, 11, 1, 12))
    v = np.stack([np.eye(11, 12)[:, None]] * 2)
    if kind[0] == 4:
        k[0, :4] = v[0, :4] = np.nan
    seen = attend(q, k, v, [11, 6], kind=kind)[:, :, 0] > 0
    assert seen[0].sum(axis=-1).tolist() == SEEN[kind]
    last = [6 - 4 + i if kind[1] else min(5, 2 + i + (kind[0] or 99) - 1) for i in range(4)]
    first = [max(0, 2 + i - (kind[0] or 99) + 1) for i in range(4)]
    for row, (low, high) in enumerate(zip(first, last, strict=True)):
        assert np.flatnonzero(seen[1, row]).tolist() == list(range(low, high + 1))


@pytest.mark.parametrize("causal", [True, False])
def test_evicted_pages_of_a_window_change_nothing(attend, causal):
    """C49: 12 keys of context, a window of 4 and a block of 2: pages that no row sees may be null (NaN here), and give
    the bits of a whole table."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, S, heads, 4)).astype(np.float32) for S, heads in ((2, 6), (14, 3), (14, 3)))
    whole, evicted = (attend(q, k, v, [14], kind=(4, causal), evicted=pages) for pages in (0, 2))
    np.testing.assert_array_equal(whole, evicted)
    assert np.isfinite(whole).all()


def test_kv_heads_repeat_in_place(attend):
    """C40: 4 query heads on 2 KV heads tiled, [10, 20, 10, 20]; with other queries in each head than in the test of the
    pool, so that a head reading the other's keys is seen too."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((1, 3, 2, 4)), np.zeros((1, 3, 2, 4))
    v[..., 0, :], v[..., 1, :] = 10, 20
    q = rng.standard_normal((1, 1, 4, 4))
    np.testing.assert_allclose(attend(q, k, v, [3])[0, 0, :, 0], [10, 10, 20, 20], rtol=1e-6)
    v = rng.standard_normal((1, 3, 2, 4))
    for n in range(4):
        weights = np.exp(k[0, :, n // 2] @ q[0, 0, n] / 2)
        expected = weights @ v[0, :, n // 2] / weights.sum()
        np.testing.assert_allclose(attend(q, k, v, [3])[0, 0, n], expected, atol=1e-6)


def test_training_repeats_kv_heads_in_place():
    """C40, in training."""
    v = jnp.stack([jnp.full((3, 4), 10.0), jnp.full((3, 4), 20.0)], axis=1)[None]
    out = train.masked_attention(jnp.ones((1, 1, 4, 4)), jnp.ones((1, 3, 2, 4)), v, jnp.ones((1, 1, 3), bool))
    assert out[0, 0, :, 0].tolist() == [10, 10, 20, 20]


def test_padded_query_rows(attend):
    """C38: 5 blocks of 4 rows rounded up to 128 rows: padding that indexes another request, or a fully masked softmax
    ([nan, nan]) that spreads."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((32, S, heads, 4)).astype(np.float32) for S, heads in ((4, 6), (9, 3), (9, 3)))
    seq_lens = np.array([9, 4, 5, 8, 6] + [0] * 27)
    live = attend(q[:5], k[:5], v[:5], seq_lens[:5])
    k[5:] = v[5:] = np.nan
    padded = attend(q, k, v, seq_lens)
    np.testing.assert_allclose(padded[:5], live, atol=1e-6)
    assert np.all(padded[5:] == 0)


@pytest.mark.parametrize("num_keys", [1000])
def test_softmax_over_equal_bfloat16_scores_sums_to_one(num_keys):
    """C79: the sum of the weights kept in bfloat16, where it stops at 256."""
    for name, kernel in KERNELS:
        f = FRAMEWORKS[name]
        shape = (1, 2, 2 + num_keys // 16, 16, 1, 4)
        pool = f.pool(shape, "bfloat16", fill=np.ones(shape, np.float32))
        tables = np.zeros((1, 64), np.int32)
        tables[0, :63] = 1 + np.arange(63) % 62
        q = f.floats(np.ones((1, 1, 2, 4)), "bfloat16")
        out = numpy(f.dense.attention(pool, 0, q, f.ints(tables), f.ints([num_keys]), **kernel))
        np.testing.assert_allclose(out, 1, atol=1e-3, err_msg=str((name, kernel)))


@functools.cache
def block_function(framework: str, causal: bool):
    """Final hidden states of one block of 4 rows behind 5 context rows, from the block's inputs."""
    f, g = FRAMEWORKS[framework], CONFIG.geometry
    positions, tables, seq_lens = 5 + np.arange(4)[None], [[2, 1, 3]], [9]
    # Positions 0 to 4 stand in slots 8 to 11 and 4.
    ints = tuple(map(f.ints, (positions, tables, seq_lens, [5, 6, 7, 12], [8, 9, 10, 11, 4], np.arange(5))))

    def run(weights, pool, x, combined, ints):
        positions, tables, seq_lens, slots, context_slots, context_positions = ints

        def attend(pool, layer, q, k, v):
            pool = f.kv_cache.store_layer(pool, layer, k[0], v[0], slots)
            return pool, f.dense.attention(pool, layer, q, tables, seq_lens, *([positions] if causal else []))

        kv = f.drafter.precompute_context_kv(weights, CONFIG, combined, context_positions)
        pool = f.kv_cache.store_context(pool, kv, context_slots)
        return f.drafter.query_forward(weights, CONFIG, pool, x, positions, attend)[1]

    def call(x):
        combined = np.random.default_rng(1).standard_normal((5, g.hidden_size))
        pool = f.pool(f.kv_cache.pool_shape(g, 4, PAGE))
        return numpy(f.run(run, weights_of(f.name), pool, f.floats(x), f.floats(combined), ints))[0]

    return call


def test_a_block_sees_itself_in_both_directions(f):
    """C35: the block masked causally. Rows 2 and 3 change places: row 1 must notice, and must not in a causal layer."""
    x = np.random.default_rng(0).standard_normal((1, 4, CONFIG.geometry.hidden_size))
    swapped = x[:, [0, 1, 3, 2]]
    full, causal = (block_function(f.name, causal) for causal in (False, True))
    assert np.abs(full(x)[1] - full(swapped)[1]).max() > 1e-2
    before, after = causal(x), causal(swapped)
    np.testing.assert_array_equal(before[:2], after[:2])
    assert np.abs(before[2:] - after[2:]).max() > 1e-2


def test_the_step_s_anchor_sees_the_whole_block(f):
    """C35: a causal mask in the step itself. K and V of the anchor in layer 1 come from what its row saw in layer 0, so
    that another embedding of the mask token, whose rows all follow it, must move them."""
    config = EngineConfig.make(
        CONFIG, max_num_seqs=1, max_model_len=64, num_speculative_tokens=3, page_size=PAGE, num_pages=6,
        table_width=16,
    )  # fmt: skip
    requests = RequestTable(config, external_pages=False)
    requests.add(0)
    ints = f.ints(config.layout(1).pack(requests.reserve(step_for([0], 3)), 3))
    options = {} if f.name == "jax" else {"table_width": 16, "attention": "sdpa"}

    def run(weights, pool, rows, ints):
        state = f.draft_step.DraftState((pool,))
        return f.draft_step.draft_step(config, weights, state, rows, ints, num_reqs=1, **options)[0].pools[0]

    weights, found = weights_of(f.name), []
    for changed in (0.0, 1.0):
        embedding = numpy(weights.embed_tokens)
        embedding[CONFIG.mask_token_id] += changed
        pool = f.pool(f.kv_cache.pool_shape(CONFIG.geometry, config.num_pages[0], PAGE))
        args = weights._replace(embed_tokens=f.floats(embedding)), pool, f.floats(features(3)), ints
        found.append(numpy(f.run(run, *args))[:, :, 1, 3])  # the first page, position 3
    before, after = found
    np.testing.assert_array_equal(before[0], after[0])  # layer 0: of the anchor's own embedding
    assert np.abs(before[1] - after[1]).max() > 1e-2
