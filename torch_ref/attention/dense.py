"""Attention over gathered pages with `scaled_dot_product_attention`.

The work follows the width of the block tables: keys past a request's length are read and masked, so eager callers
narrow the tables on the host, and a CUDA graph reads all of them.
B requests, T query rows of one request, N query heads, K KV heads, G = N/K, H head dim, S keys of a block table.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_ref.kv_cache import Pool, gather_rows


class Keys(NamedTuple):
    """What the queries of a step read, the same in every layer: pool rows of the keys and who sees them."""

    slots: Int[Tensor, "B S"]
    visible: Bool[Tensor, "B 1 T S"]
    live: Bool[Tensor, "B"]


def attention(
    pool: Pool,
    layer: int,
    q: Float[Tensor, "B T N H"],
    block_tables: Int[Tensor, "B W"],
    seq_lens: Int[Tensor, "B"],
    positions: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T N H"]:
    """Every query sees keys 0 to seq_len - 1 of its request; with `positions` only those up to its own (causal).

    Scale is H^-0.5. A request of seq_len 0 gets zeros. Rows of the pool from seq_len on may hold NaN.
    """
    return attend_keys(pool, layer, q, find_keys(block_tables, seq_lens, pool.shape[3], positions))


def find_keys(
    block_tables: Int[Tensor, "B W"],
    seq_lens: Int[Tensor, "B"],
    page_size: int,
    positions: Int[Tensor, "B T"] | None = None,
) -> Keys:
    """The layer-independent part of `attention`."""
    width = block_tables.shape[1] * page_size
    keys = torch.arange(width, dtype=seq_lens.dtype, device=seq_lens.device)
    offsets = torch.arange(page_size, dtype=block_tables.dtype, device=block_tables.device)
    slots = (block_tables[..., None] * page_size + offsets).flatten(1)
    seen = keys < seq_lens[:, None]
    # A masked score still multiplies its value by 0, and 0 x NaN is NaN. So a key past the length is read from the row
    # of the request's first key: it is masked all the same, and finite where that is.
    slots = torch.where(seen, slots, slots[:, :1])
    visible = seen[:, None] if positions is None else seen[:, None] & (keys <= positions[..., None])
    return Keys(slots.long(), visible[:, None], seq_lens > 0)


def attend_keys(pool: Pool, layer: int, q: Float[Tensor, "B T N H"], keys: Keys) -> Float[Tensor, "B T N H"]:
    """One layer's attention over `find_keys`."""
    B, T, N, H = q.shape
    K = pool.shape[4]
    G = N // K
    k, v = (a.transpose(1, 2) for a in gather_rows(pool, layer, keys.slots))  # [B, K, S, H]
    # The G heads of a group read the same keys: as rows of one head they need no copies of K and V.
    q = q.unflatten(2, (K, G)).permute(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    visible = keys.visible if keys.visible.shape[2] == 1 else keys.visible.repeat(1, 1, G, 1)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    o = o.unflatten(2, (G, T)).permute(0, 3, 1, 2, 4).reshape(B, T, N, H)
    return torch.where(keys.live[:, None, None, None], o, 0)
