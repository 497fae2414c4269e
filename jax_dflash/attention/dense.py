"""Attention over gathered pages, in key chunks with an online softmax (Milakov & Gimelshein 2018).

The number of chunks is data: from the first that a live request sees to the end of the longest one, not the width of the
block tables.
B requests, T query rows of one request, N query heads, K KV heads, G = N/K, H head dim, S keys of one chunk.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jax_dflash.batch import CHUNK_KEYS
from jax_dflash.kv_cache import Pool, gather_pages
from jax_dflash.numerics import accum_dtype, accum_einsum, store


def chunk_pages(table_width: int, page_size: int) -> int:
    """Pages that one trip of the loop reads."""
    return min(max(1, CHUNK_KEYS // page_size), table_width)


def padded_width(num_pages: int, page_size: int) -> int:
    """The width of a block table for `num_pages` pages: a whole number of chunks."""
    width = chunk_pages(num_pages, page_size)
    return -(-num_pages // width) * width


def chunk_range(
    seq_lens: Int[Array, "B"], first_key: Int[Array, "B _"] | None, chunk_keys: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """(first, stop) of the loop: from the first chunk that a live row of the batch sees to the longest request."""
    longest = jnp.max(seq_lens)
    stop = (longest + chunk_keys - 1) // chunk_keys
    if first_key is None:
        return jnp.zeros_like(stop), stop
    first = jnp.where(seq_lens > 0, jnp.min(first_key, axis=1), longest)
    return jnp.maximum(jnp.min(first), 0) // chunk_keys, stop


def key_bounds(
    seq_lens: Int[Array, "B"],
    num_rows: int,
    window: int | None,
    causal: bool,
    first_context_position: Int[Array, "B"] | None = None,
) -> tuple[Int[Array, "B T"] | None, Int[Array, "B _"] | None]:
    """(last key, first key) that each of a request's last `num_rows` rows sees, None where nothing bounds it; `window` and
    `causal` as in `checkpoint_forms.Layer`. The rows end with the request's keys: row i is key seq_len - num_rows + i. No
    row sees a key before its request's `first_context_position`; a bound that is all rows' is `[B, 1]`.
    """
    rows = seq_lens[:, None] - num_rows + jnp.arange(num_rows, dtype=seq_lens.dtype)
    first = None if first_context_position is None else first_context_position[:, None]
    if window is None:
        return (rows if causal else None), first
    in_window = rows - window + 1
    return (rows if causal else rows + window - 1), in_window if first is None else jnp.maximum(in_window, first)


def attention(
    pool: Pool,
    layer: int,
    q: Float[Array, "B T N H"],
    block_tables: Int[Array, "B W"],
    seq_lens: Int[Array, "B"],
    last_key: Int[Array, "B T"] | None = None,
    first_key: Int[Array, "B _"] | None = None,
) -> Float[Array, "B T N H"]:
    """Every query sees keys 0 to seq_len - 1 of its request; of these only those up to its `last_key` (for a causal row its
    own position) and from its `first_key` on.

    `pool` is a page group's and `layer` an index in it. Scale is H^-0.5. A request of seq_len 0 gets zeros. Rows of the pool
    from seq_len on may hold NaN, and so may those that no query of the request sees.
    """
    return _attention(pool, layer, q, block_tables, seq_lens, last_key, first_key)[0]


def _attention(pool, layer, q, block_tables, seq_lens, last_key=None, first_key=None):
    """`attention` and the number of trips its loop made."""
    B, T, N, H = q.shape
    K, page_size = pool.shape[4], pool.shape[3]
    width = chunk_pages(block_tables.shape[1], page_size)
    if block_tables.shape[1] % width:
        raise ValueError(f"block tables of width {block_tables.shape[1]} are not whole chunks of {width} pages")
    accum = accum_dtype(q.dtype)
    # The G heads of a group read the same keys: as rows of one head they need no copies of them.
    R = N // K * T
    q = q.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4).reshape(B, K, R, H)

    def by_row(bound):
        return jnp.tile(bound, (1, N // K))[:, None, :, None]  # [B, 1, R, 1]

    first, stop = chunk_range(seq_lens, first_key, width * page_size)

    def read_chunk(carry):
        chunk, running_max, total, out = carry
        pages = lax.dynamic_slice_in_dim(block_tables, chunk * width, width, axis=1)
        k, v = gather_pages(pool, layer, pages)
        keys = chunk * width * page_size + jnp.arange(width * page_size, dtype=seq_lens.dtype)
        live = keys < seq_lens[:, None]
        if first_key is not None:
            live &= keys >= jnp.min(first_key, axis=1, keepdims=True)
        visible = live[:, None, None]
        if last_key is not None:
            visible &= keys <= by_row(last_key)
            live &= keys <= jnp.max(last_key, axis=1, keepdims=True)
        if first_key is not None and first_key.shape[1] > 1:
            visible &= keys >= by_row(first_key)
        # A masked score still multiplies its value by 0, and 0 x NaN is NaN: select the values too.
        v = jnp.where(live[:, :, None, None], v, 0)
        scores = accum_einsum("bkrh,bskh->bkrs", q, k) * H**-0.5
        scores = jnp.where(visible, scores, -jnp.inf)
        new_max = jnp.maximum(running_max, jnp.max(scores, axis=-1))
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = jnp.where(new_max == -jnp.inf, 0, new_max)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(running_max - shift)
        total = total * decay + jnp.sum(weights, axis=-1)
        read = accum_einsum("bkrs,bskh->bkrh", store(weights, q.dtype), v)
        return chunk + 1, new_max, total, out * decay[..., None] + read

    zeros = jnp.zeros((B, K, R), accum)
    start = (first, zeros - jnp.inf, zeros, jnp.zeros((B, K, R, H), accum))
    with jax.named_scope("attend"):
        end, _, total, out = lax.while_loop(lambda carry: carry[0] < stop, read_chunk, start)
        out = out / jnp.where(total == 0, 1, total)[..., None]
        out = out.reshape(B, K, N // K, T, H).transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)
        return store(out, q.dtype), end - first
