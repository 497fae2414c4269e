"""The pool and attention over it, in both frameworks."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_dflash.attention import dense as jax_dense
from parity_tests.tiny import FRAMEWORKS, numpy

SHAPE = (2, 2, 5, 3, 2, 4)  # L, K/V, P, page, K, H


def context_kv(num_rows, seed=0):
    return np.random.default_rng(seed).standard_normal((2, 2, num_rows, 2, 4)).astype(np.float32)


def test_pad_and_null_page_write_nothing(f):
    """Slot -1 wrapping to the last row, or a padded row landing in some page."""
    sentinel = np.full(SHAPE, 512, np.float32)
    kv = context_kv(7)
    pool = f.kv_cache.store_context(f.pool(SHAPE, fill=sentinel), f.floats(kv), f.ints([-1, 4, -1, 13, 3, -1, -1]))
    expected = sentinel.reshape(2, 2, 15, 2, 4).copy()
    expected[:, :, [4, 13, 3]] = kv[:, :, [1, 3, 4]]
    np.testing.assert_array_equal(numpy(pool).reshape(expected.shape), expected)


def test_only_pads_leave_the_pool_as_it_is(f):
    """Capture, which runs every program on PAD slots alone, changing the pool."""
    fill = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    pool = f.kv_cache.store_context(f.pool(SHAPE, fill=fill), f.floats(context_kv(3)), f.ints([-1] * 3))
    pool = f.kv_cache.store_layer(pool, 1, *(f.floats(context_kv(3)[1, i]) for i in (0, 1)), f.ints([-1] * 3))
    np.testing.assert_array_equal(numpy(pool), fill)


@pytest.mark.parametrize("slot", [-1, 0, 14])
def test_one_row(f, slot):
    """A batch of one context row, which JAX stores as two: the second one must land nowhere."""
    fill = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    kv, expected = context_kv(1), fill.reshape(2, 2, 15, 2, 4).copy()
    if slot >= 0:
        expected[:, :, slot] = kv[:, :, 0]
    pool = f.kv_cache.store_context(f.pool(SHAPE, fill=fill), f.floats(kv), f.ints([slot]))
    np.testing.assert_array_equal(numpy(pool).reshape(expected.shape), expected)
    pool = f.pool(SHAPE, fill=fill)
    for layer in range(2):
        k, v = (f.floats(kv[layer, i]) for i in (0, 1))
        pool = f.kv_cache.store_layer(pool, layer, k, v, f.ints([slot]))
    np.testing.assert_array_equal(numpy(pool).reshape(expected.shape), expected)


def test_store_context_equals_store_layer_by_layer(f):
    """Layers, or K and V, swapped in the one scatter of all layers."""
    kv, slots = context_kv(5), f.ints([14, 3, 7, -1, 9])
    at_once = f.kv_cache.store_context(f.pool(SHAPE), f.floats(kv), slots)
    by_layer = f.pool(SHAPE)
    for layer in range(2):
        by_layer = f.kv_cache.store_layer(by_layer, layer, f.floats(kv[layer, 0]), f.floats(kv[layer, 1]), slots)
    np.testing.assert_array_equal(numpy(at_once), numpy(by_layer))
    assert numpy(at_once)[1, 0, 4, 2].tolist() == kv[1, 0, 0].astype(np.float64).tolist()


def test_torch_refuses_a_pool_without_the_hidden_row():
    """A plain tensor as pool: PAD would wrap to its last row."""
    f = FRAMEWORKS["torch"]
    with pytest.raises(ValueError, match="no hidden row"):
        f.kv_cache.store_context(f.floats(np.zeros(SHAPE)), f.floats(context_kv(1)), f.ints([-1]))


def reference_attention(pool, layer, q, tables, seq_lens, positions=None):
    """Attention request by request, head by head, in numpy float64."""
    B, T, N, H = q.shape
    page, K = pool.shape[3:5]
    out = np.zeros(q.shape)
    for b in range(B):
        at = np.arange(seq_lens[b])
        k, v = (pool[layer, i, tables[b, at // page], at % page] for i in (0, 1))
        for t in range(T):
            see = at if positions is None else at[at <= positions[b, t]]
            for n in range(N if len(see) else 0):
                scores = k[see, n // (N // K)] @ q[b, t, n] / np.sqrt(H)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v[see, n // (N // K)] / weights.sum()
    return out


def attention_case(seed=0):
    """Three requests of lengths 11, 0 and 5, five query rows, 6 heads on 2 KV heads, pages out of order."""
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((2, 2, 11, 3, 2, 4)).astype(np.float32)
    q = rng.standard_normal((3, 5, 6, 4)).astype(np.float32)
    tables = np.array([[7, 2, 9, 4, 0], [0, 0, 0, 0, 0], [5, 1, 0, 0, 0]], np.int32)
    seq_lens = np.array([11, 0, 5], np.int32)
    positions = np.array([[6, 7, 8, 9, 10], [0] * 5, [0, 1, 2, 3, 4]], np.int32)
    return pool, q, tables, seq_lens, positions


@pytest.mark.parametrize("causal", [False, True])
def test_dense_attention_against_numpy(f, causal):
    """Wrong scale, mask, page order, head grouping, or NaN for a request of length 0."""
    pool, q, tables, seq_lens, positions = attention_case()
    expected = reference_attention(
        pool.astype(np.float64), 1, q.astype(np.float64), tables, seq_lens, positions if causal else None
    )
    args = f.pool(pool.shape, fill=pool), 1, f.floats(q), f.ints(tables), f.ints(seq_lens)
    found = numpy(f.dense.attention(*args, *([f.ints(positions)] if causal else [])))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.all(found[1] == 0)


@pytest.mark.parametrize("causal", [False, True])
def test_nan_outside_a_request_reaches_nobody(f, causal):
    """0 x NaN: masked scores still multiply values that a freed page, the null page or a row past the end holds."""
    pool, q, tables, seq_lens, positions = attention_case()
    poisoned = np.full_like(pool, np.nan)
    for b, length in enumerate(seq_lens):
        for at in range(length):
            where = np.s_[:, :, tables[b, at // 3], at % 3]
            poisoned[where] = pool[where]

    def run(pool):
        args = f.pool(pool.shape, fill=pool), 0, f.floats(q), f.ints(tables), f.ints(seq_lens)
        return numpy(f.dense.attention(*args, *([f.ints(positions)] if causal else [])))

    np.testing.assert_array_equal(run(poisoned), run(pool))


def test_kv_heads_repeat_in_place(f):
    """GQA tiled [0, 1, 0, 1] instead of repeated [0, 0, 1, 1]."""
    pool = np.zeros((1, 2, 2, 3, 2, 4), np.float32)
    pool[0, 1, 1, :, 0], pool[0, 1, 1, :, 1] = 10, 20
    q = f.floats(np.ones((1, 1, 4, 4)))
    out = f.dense.attention(f.pool(pool.shape, fill=pool), 0, q, f.ints([[1, 0]]), f.ints([3]))
    assert numpy(out)[0, 0, :, 0].tolist() == [10, 10, 20, 20]


@pytest.mark.parametrize(
    "seq_lens, trips",
    [([0, 0], 0), ([0, 1], 1), ([256, 3], 1), ([1, 257], 2), ([512, 5], 2), ([513, 0], 3), ([767, 767], 3)],
)
def test_the_loop_follows_the_longest_live_request(seq_lens, trips):
    """A program captured for max_model_len that always reads all of it, or that stops one chunk short."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((1, 2, 193, 4, 1, 2)).astype(np.float32)
    tables = 1 + np.stack([rng.permutation(192), rng.permutation(192)]).astype(np.int32)
    q = rng.standard_normal((2, 3, 2, 2)).astype(np.float32)
    lens = np.array(seq_lens, np.int32)
    out, found = jax_dense._attention(
        *map(jnp.asarray, (pool,)), 0, jnp.asarray(q), jnp.asarray(tables), jnp.asarray(lens), None
    )
    assert int(found) == trips
    expected = reference_attention(pool.astype(np.float64), 0, q.astype(np.float64), tables, lens)
    np.testing.assert_allclose(numpy(out), expected, atol=2e-6)


@pytest.mark.parametrize(
    "seq_lens, window, trips",
    [([700, 0], 5, 1), ([700, 300], 5, 2), ([513, 513], 3, 2), ([700, 3], 5, 3), ([700, 0], 900, 3), ([0, 0], 5, 0)],
)
def test_the_loop_begins_with_the_first_chunk_that_a_row_sees(seq_lens, window, trips):
    """A windowed layer that reads everything before its window, or from its longest request's window on; a padded request
    counted as one that sees key 0. Three rows: the first of the window is key length - 3 - (window - 1)."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((1, 2, 193, 4, 1, 2)).astype(np.float32)
    tables = 1 + np.stack([rng.permutation(192), rng.permutation(192)]).astype(np.int32)
    q, lens = rng.standard_normal((2, 3, 2, 2)).astype(np.float32), np.array(seq_lens, np.int32)
    args = jnp.asarray(pool), 0, jnp.asarray(q), jnp.asarray(tables), jnp.asarray(lens)
    bounds = jax_dense.key_bounds(args[-1], 3, window, False)
    out, found = jax_dense._attention(*args, *bounds)
    assert int(found) == trips
    dense = FRAMEWORKS["torch"].dense
    args = [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in (pool, 0, q, tables, lens)]
    args[0] = FRAMEWORKS["torch"].pool(pool.shape, fill=pool)
    bounds = dense.key_bounds(args[-1], 3, window, False)
    start = min([max(0, n - 3 - (window - 1)) for n in seq_lens if n], default=0) // 256 * 256
    keys = dense.find_keys(args[3], args[4], 4, *bounds, start)
    assert keys.slots.shape[1] == 768 - start
    whole = dense.attention(*args, *bounds, kernel="dense")
    assert torch.equal(dense.attend_keys(args[0], 0, args[2], keys, "dense"), whole)
    np.testing.assert_allclose(numpy(out), numpy(whole), atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_kernels_agree(causal):
    """The contract's attention and the fused one computing different functions: NaN, length 0, two chunks of keys."""
    f = FRAMEWORKS["torch"]
    rng = np.random.default_rng(4)
    pool = rng.standard_normal((1, 2, 60, 16, 2, 8)).astype(np.float32)
    pool[:, :, 40:] = np.nan
    tables = np.zeros((3, 20), np.int32)
    tables[0], tables[2, :2] = np.arange(1, 21), [30, 31]
    q, lens = f.floats(rng.standard_normal((3, 4, 6, 8))), f.ints([309, 0, 20])
    positions = f.ints([[305, 306, 307, 308], [0] * 4, [16, 17, 18, 19]]) if causal else None
    args = f.pool(pool.shape, fill=pool), 0, q, f.ints(tables), lens, positions
    dense, fused = (numpy(f.dense.attention(*args, kernel=kernel)) for kernel in ("dense", "sdpa"))
    np.testing.assert_allclose(dense, fused, atol=2e-6)
    assert np.all(dense[1] == 0)


def test_bfloat16_attention_rounds_alike():
    """Weights rounded at other places than the contract says: the frameworks would part by a rounding, not by its last
    ulp here and there."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal((1, 2, 80, 16, 2, 32)).astype(np.float32)
    q = rng.standard_normal((4, 8, 6, 32)) * 2
    tables = np.zeros((4, 32), np.int32)
    tables[:, :19] = 1 + np.arange(76).reshape(4, 19)
    found = {}
    for name, f in FRAMEWORKS.items():
        kernel = {"kernel": "dense"} if name == "torch" else {}
        args = f.pool(pool.shape, "bfloat16", fill=pool), 0, f.floats(q, "bfloat16"), f.ints(tables), f.ints([300] * 4)
        found[name] = numpy(f.dense.attention(*args, **kernel))
    assert np.mean(found["jax"] == found["torch"]) > 0.998
