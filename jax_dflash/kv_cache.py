"""The paged pool: for each page group one array `[L, 2, P, page, K, H]` of its layers' keys (0) and values (1).

P and page flatten for free, so a slot is a row: slot = page_id * page_size + offset. Page 0 is the null page: block
tables are filled with it and nothing is ever written there. Slot -1 is PAD: the row writes nothing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_dflash.batch import PAD_SLOT, EngineConfig
from jax_dflash.config import DraftConfig, Geometry

Pool = Float[Array, "L 2 P page K H"]


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


def _scatter(flat: Float[Array, "L 2 R K H"], at: tuple, slots: Int[Array, "S"], kv: Array, axis: int) -> Array:
    """Write rows of `kv` at their slots; `axis` is where kv counts them, `at` indexes before the rows."""
    if slots.shape[0] == 1:
        # XLA rewrites a scatter of one row as a select over the whole pool, a copy of it: a second row that is dropped
        # keeps it a scatter.
        slots = jnp.concatenate([slots, jnp.full(1, PAD_SLOT, slots.dtype)])
        kv = jnp.repeat(kv, 2, axis=axis)
    # PAD as distinct rows past the end, which a scatter drops. -1 itself would wrap to the last row.
    num_rows = flat.shape[2]
    rows = jnp.where(slots < 0, num_rows + jnp.arange(slots.shape[0], dtype=slots.dtype), slots)
    return flat.at[(*at, rows)].set(kv, mode="drop", unique_indices=True)


def store_context(pool: Pool, kv_L2CKH: Float[Array, "L 2 C K H"], slots: Int[Array, "C"]) -> Pool:
    """Write the context K/V of all layers of a group at their slots in one scatter."""
    flat = pool.reshape(*pool.shape[:2], -1, *pool.shape[4:])
    with jax.named_scope("store_context"):
        return _scatter(flat, (slice(None), slice(None)), slots, kv_L2CKH, axis=2).reshape(pool.shape)


def store_layer(
    pool: Pool, layer: int, k: Float[Array, "S K H"], v: Float[Array, "S K H"], slots: Int[Array, "S"]
) -> Pool:
    """Write one layer's K/V at their slots."""
    flat = pool.reshape(*pool.shape[:2], -1, *pool.shape[4:])
    with jax.named_scope("store"):
        return _scatter(flat, (layer, slice(None)), slots, jnp.stack([k, v], axis=1), axis=0).reshape(pool.shape)


def layers_in_order(config: DraftConfig, pools: tuple[Pool, ...]) -> Pool:
    """All groups' layers in one array, by index; groups of fewer pages end in zeros. One group's pool is it already."""
    if len(pools) == 1:
        return pools[0]
    most = max(pool.shape[2] for pool in pools)
    pools = tuple(jnp.pad(pool, [(0, 0)] * 2 + [(0, most - pool.shape[2])] + [(0, 0)] * 3) for pool in pools)
    return jnp.stack([pools[group][at] for group, at in config.layer_places])


def gather_pages(pool: Pool, layer: int, pages: Int[Array, "B W"]) -> tuple[Array, Array]:
    """One layer's keys and values of these pages, each `[B, W * page, K, H]`. Page ids must be in range."""
    kv = pool.at[layer, :, pages].get(mode="promise_in_bounds")  # [B, W, 2, page, K, H]
    k, v = kv[:, :, 0], kv[:, :, 1]
    shape = (pages.shape[0], -1, *pool.shape[4:])
    return k.reshape(shape), v.reshape(shape)
