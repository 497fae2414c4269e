"""Attention over gathered pages: PyTorch's `scaled_dot_product_attention`, or step by step as the JAX package rounds it.

Of the two kernels "sdpa" is what a user would run. "dense" follows the rounding contract to the letter (weights rounded
between the same rescalings): it is the one to compare numbers with, since a fused kernel rounds the weights its own way.

The work follows the width of the block tables: keys past a request's length are read and masked. Eager callers narrow
the tables on the host and name the key to begin with; a CUDA graph reads all of them.
B requests, T query rows of one request, N query heads, K KV heads, G = N/K, H head dim, S keys of a block table.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from jax_dflash.batch import CHUNK_KEYS
from torch_ref.kv_cache import Pool, gather_rows
from torch_ref.numerics import store, to_accum


class Keys(NamedTuple):
    """What the queries of a step read, the same in layers of one window and direction: pool rows and who sees them."""

    slots: Int[Tensor, "B S"]
    visible: Bool[Tensor, "B 1 T S"]
    live: Bool[Tensor, "B"]


def sdpa(q: Float[Tensor, "B K R H"], k: Tensor, v: Tensor, visible: Bool[Tensor, "B 1 R S"]) -> Tensor:
    """PyTorch's fused attention; its kernel rounds the weights as it likes."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def dense(q: Float[Tensor, "B K R H"], k: Tensor, v: Tensor, visible: Bool[Tensor, "B 1 R S"]) -> Tensor:
    """Online softmax over chunks of keys, as `jax_dflash.attention.dense` (Milakov & Gimelshein 2018)."""
    queries, scale = to_accum(q), q.shape[-1] ** -0.5
    running_max = torch.full_like(queries[..., 0], -torch.inf)
    total, out = torch.zeros_like(running_max), torch.zeros_like(queries)
    chunks = (a.split(CHUNK_KEYS, dim) for a, dim in ((to_accum(k), 2), (to_accum(v), 2), (visible, 3)))
    for keys, values, seen in zip(*chunks, strict=True):
        scores = (queries @ keys.mT * scale).masked_fill(~seen, -torch.inf)
        new_max = torch.maximum(running_max, scores.amax(-1))
        # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
        shift = new_max.masked_fill(new_max == -torch.inf, 0)
        weights = torch.exp(scores - shift[..., None])
        decay = torch.exp(running_max - shift)
        total = total * decay + weights.sum(-1)
        out = out * decay[..., None] + to_accum(store(weights, q.dtype)) @ values
        running_max = new_max
    return store(out / total.masked_fill(total == 0, 1)[..., None], q.dtype)


KERNELS = {"sdpa": sdpa, "dense": dense}


def key_bounds(
    seq_lens: Int[Tensor, "B"],
    num_rows: int,
    window: int | None,
    causal: bool,
    first_context_position: Int[Tensor, "B"] | None = None,
) -> tuple[Int[Tensor, "B T"] | None, Int[Tensor, "B _"] | None]:
    """(last key, first key) that each of a request's last `num_rows` rows sees, None where nothing bounds it; `window` and
    `causal` as in `checkpoint_forms.Layer`. The rows end with the request's keys: row i is key seq_len - num_rows + i. No
    row sees a key before its request's `first_context_position`; a bound that is all rows' is `[B, 1]`.
    """
    rows = seq_lens[:, None] - num_rows + torch.arange(num_rows, dtype=seq_lens.dtype, device=seq_lens.device)
    first = None if first_context_position is None else first_context_position[:, None]
    if window is None:
        return (rows if causal else None), first
    in_window = rows - window + 1
    return (rows if causal else rows + window - 1), in_window if first is None else torch.maximum(in_window, first)


def attention(
    pool: Pool,
    layer: int,
    q: Float[Tensor, "B T N H"],
    block_tables: Int[Tensor, "B W"],
    seq_lens: Int[Tensor, "B"],
    last_key: Int[Tensor, "B T"] | None = None,
    first_key: Int[Tensor, "B _"] | None = None,
    *,
    kernel: str = "sdpa",
) -> Float[Tensor, "B T N H"]:
    """Every query sees keys 0 to seq_len - 1 of its request; of these only those up to its `last_key` (for a causal row its
    own position) and from its `first_key` on.

    `pool` is a page group's and `layer` an index in it. Scale is H^-0.5. A request of seq_len 0 gets zeros. Rows of the pool
    from seq_len on may hold NaN, and so may those that no query of the request sees.
    """
    return attend_keys(pool, layer, q, find_keys(block_tables, seq_lens, pool.shape[3], last_key, first_key), kernel)


def find_keys(
    block_tables: Int[Tensor, "B W"],
    seq_lens: Int[Tensor, "B"],
    page_size: int,
    last_key: Int[Tensor, "B T"] | None = None,
    first_key: Int[Tensor, "B _"] | None = None,
    start: int = 0,
) -> Keys:
    """The part of `attention` that layers with the same bounds share. Keys before `start`, which no row sees, are not
    read."""
    width = block_tables.shape[1] * page_size
    keys = torch.arange(start, width, dtype=seq_lens.dtype, device=seq_lens.device)
    offsets = torch.arange(page_size, dtype=block_tables.dtype, device=block_tables.device)
    slots = (block_tables[..., None] * page_size + offsets).flatten(1)[:, start:]
    visible = (keys < seq_lens[:, None])[:, None]
    if last_key is not None:
        visible = visible & (keys <= last_key[..., None])
    if first_key is not None:
        visible = visible & (keys >= first_key[..., None])
    seen = visible.any(1)
    # A masked score still multiplies its value by 0, and 0 x NaN is NaN. So a key that no row sees is read from the row of
    # the request's last key: it is masked all the same, and finite where that is.
    last = (seq_lens[:, None].long() - 1 - start).clamp(min=0)
    slots = torch.where(seen, slots, slots.gather(1, last))
    return Keys(slots.long(), visible[:, None], seq_lens > 0)


def attend_keys(
    pool: Pool, layer: int, q: Float[Tensor, "B T N H"], keys: Keys, kernel: str
) -> Float[Tensor, "B T N H"]:
    """One layer's attention over `find_keys`."""
    B, T, N, H = q.shape
    K = pool.shape[4]
    G = N // K
    k, v = (a.transpose(1, 2) for a in gather_rows(pool, layer, keys.slots))  # [B, K, S, H]
    # The G heads of a group read the same keys: as rows of one head they need no copies of K and V.
    q = q.unflatten(2, (K, G)).permute(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    visible = keys.visible if keys.visible.shape[2] == 1 else keys.visible.repeat(1, 1, G, 1)
    o = KERNELS[kernel](q, k, v, visible)
    o = o.unflatten(2, (G, T)).permute(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return torch.where(keys.live[:, None, None, None], o, 0)
