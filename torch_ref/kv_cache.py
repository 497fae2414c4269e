"""The paged pool: for each page group one array `[L, 2, P, page, K, H]` of its layers' keys (0) and values (1), written
in place.

P and page flatten for free, so a slot is a row: slot = page_id * page_size + offset. Page 0 is the null page: block
tables are filled with it and nothing is ever written there. Slot -1 is PAD: the row writes nothing.

Behind each layer's last page lies one row that the pool's shape does not show. An index of -1 wraps to it, so PAD rows
land there and nobody reads them: a scatter without a condition, which a CUDA graph can hold.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from jax_dflash.batch import EngineConfig
from jax_dflash.config import DraftConfig, Geometry

Pool = Float[Tensor, "L 2 P page K H"]


def pool_shape(geometry: Geometry, num_pages: int, page_size: int, num_layers: int | None = None) -> tuple[int, ...]:
    """The shape of a group's pool, by default of all layers; page 0, the null page, is one of `num_pages`."""
    num_layers = geometry.num_layers if num_layers is None else num_layers
    return (num_layers, 2, num_pages, page_size, geometry.num_kv_heads, geometry.head_dim)


def pool_shapes(config: EngineConfig) -> list[tuple[int, ...]]:
    """The shapes of an engine's pools, page group by page group."""
    groups = zip(config.draft.page_groups, config.num_pages, strict=True)
    return [
        pool_shape(config.draft.geometry, num_pages, config.page_size, len(group.layers)) for group, num_pages in groups
    ]


def zero_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Pool:
    """A fresh pool of `pool_shape`, with the hidden row that PAD writes to."""
    L, two, P, page, K, H = shape
    return torch.zeros(L, two, P * page + 1, K, H, dtype=dtype, device=device)[:, :, :-1].unflatten(2, (P, page))


def _rows(pool: Pool) -> Float[Tensor, "L 2 R K H"]:
    """The pool slot by slot, the hidden row last."""
    L, two, P, page, K, H = pool.shape
    row = K * H
    if pool.stride() != (2 * (P * page + 1) * row, (P * page + 1) * row, page * row, row, H, 1):
        raise ValueError("this pool has no hidden row for PAD slots; make it with zero_pool()")
    return pool.as_strided((L, two, P * page + 1, K, H), (*pool.stride()[:2], row, H, 1))


def store_context(pool: Pool, kv_L2CKH: Float[Tensor, "L 2 C K H"], slots: Int[Tensor, "C"]) -> Pool:
    """Write the context K/V of all layers of a group at their slots in one scatter."""
    _rows(pool)[:, :, slots] = kv_L2CKH
    return pool


def store_layer(
    pool: Pool, layer: int, k: Float[Tensor, "S K H"], v: Float[Tensor, "S K H"], slots: Int[Tensor, "S"]
) -> Pool:
    """Write one layer's K/V at their slots."""
    k_rows, v_rows = _rows(pool)[layer]
    k_rows[slots] = k
    v_rows[slots] = v
    return pool


def layers_in_order(config: DraftConfig, pools: tuple[Pool, ...]) -> Pool:
    """All groups' layers in one array, by index; groups of fewer pages end in zeros. One group's pool is it already."""
    if len(pools) == 1:
        return pools[0]
    most = max(pool.shape[2] for pool in pools)
    pools = tuple(F.pad(pool, (0, 0) * 3 + (0, most - pool.shape[2])) for pool in pools)
    return torch.stack([pools[group][at] for group, at in config.layer_places])


def gather_rows(pool: Pool, layer: int, slots: Int[Tensor, "B S"]) -> tuple[Tensor, Tensor]:
    """One layer's keys and values at these slots, each `[B, S, K, H]`."""
    k_rows, v_rows = _rows(pool)[layer]
    return k_rows[slots], v_rows[slots]
