"""One decoder layer (Qwen3, Qwen2, Llama) as pure functions; drafter and target share it.

B requests, T rows of one request, D model width, N query heads, K KV heads, H head dim, F MLP width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jax_dflash.checkpoint_forms import Rope
from jax_dflash.config import Geometry
from jax_dflash.numerics import accum_dtype, linear, store, to_accum
from jax_dflash.taps import TapCall, no_taps

Pool = TypeVar("Pool")


class LayerWeights(NamedTuple):
    """One layer as few arrays: `qkv [D, (N+2K)H]`, `o_proj [NH, D]`, `gate_up [D, 2F]`, `down [F, D]` and
    `norms [2D+2H]`, which holds input, post-attention, query and key norm end to end (`[2D]` without QK norms); `qkv_bias`
    and `o_bias` where attention has them.

    Matrices are `[in, out]`, the transpose of a checkpoint's: on a CPU a product of 2 to 16 rows takes half as long.
    """

    norms: Array
    qkv: Array
    o_proj: Array
    gate_up: Array
    down: Array
    qkv_bias: Array | None = None
    o_bias: Array | None = None


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """x / sqrt(mean(x^2) + eps) * weight, rounded once after the weight (Zhang & Sennrich 2019)."""
    y = to_accum(x)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return store(y * to_accum(weight), x.dtype)


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """The angle of each channel pair at position 1, float64 `[rotary_dim/2]`: theta^(-2j/rotary_dim) (Su et al. 2021).
    YaRN (Peng et al. 2023, section 3.2; transformers' rounding) divides it by `factor` for pairs that turn less than
    `beta_slow` times in the original positions, keeps it where more than `beta_fast` times, and ramps between.
    Llama 3.1 does so between `low_freq_factor` and `high_freq_factor` turns, with a ramp in the number of turns."""
    R, original = rope.rotary_dim, rope.original_max_position_embeddings
    inv_freq = rope.theta ** -(np.arange(0, R, 2, dtype=np.float64) / R)
    if rope.type == "default":
        return inv_freq
    assert original is not None
    if rope.type == "llama3":
        turns = original * inv_freq / math.tau
        kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        return inv_freq * kept + inv_freq / rope.factor * (1 - kept)

    def pair_that_turns(times: float) -> float:
        return R * math.log(original / (times * math.tau)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)
    ramp = np.clip((np.arange(R // 2) - low) / max(high - low, 0.001), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / rope.factor * ramp


def rope_table(positions: Int[Array, "..."], rope: Rope, dtype: jnp.dtype) -> tuple[Array, Array]:
    """cos and sin `[..., rotary_dim/2]`, times the attention factor, in the accumulation dtype. The frequencies are computed
    in float64 and rounded once, so that no framework's own pow decides the angle at a large position."""
    accum = accum_dtype(dtype)
    angles = positions[..., None].astype(accum) * jnp.asarray(inverse_frequencies(rope), accum)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    factor = rope.attention_factor
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def apply_rope(x: Float[Array, "... A H"], table: tuple[Array, Array]) -> Float[Array, "... A H"]:
    """Rotate channel j with channel j + rotary_dim/2 (the half-split layout); channels from rotary_dim on pass as they are.
    The table has no head axis."""
    cos, sin = (t[..., None, :] for t in table)
    half = cos.shape[-1]
    a, b, rest = jnp.split(to_accum(x), [half, 2 * half], axis=-1)
    return store(jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1), x.dtype)


def swiglu(gate_up: Float[Array, "... 2F"]) -> Float[Array, "... F"]:
    """silu(gate) * up, rounded once."""
    gate, up = jnp.split(to_accum(gate_up), 2, axis=-1)
    return store(gate * jax.nn.sigmoid(gate) * up, gate_up.dtype)


def decoder_layer(
    weights: LayerWeights,
    geometry: Geometry,
    pool: Pool,
    x: Float[Array, "B T D"],
    table: tuple[Array, Array],
    attend: Callable[[Pool, Array, Array, Array], tuple[Pool, Array]],
    tap: TapCall = no_taps,
) -> tuple[Pool, Float[Array, "B T D"]]:
    """Attention and MLP with their residuals. `attend(pool, q, k, v) -> (pool, o)` stores K/V and reads them;
    `tap` sees what `taps.py` lists of a layer."""
    D, H, N, K = geometry.hidden_size, geometry.head_dim, geometry.num_heads, geometry.num_kv_heads
    input_norm, post_norm, *qk_norms = jnp.split(weights.norms, [D, 2 * D, 2 * D + H][: 3 if geometry.qk_norm else 1])
    with jax.named_scope("attention"):
        qkv = linear(tap("n1", rms_norm(x, input_norm, geometry.rms_norm_eps)), weights.qkv, weights.qkv_bias)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:-1], N + 2 * K, H), [N, N + K], axis=-2)
        if geometry.qk_norm:
            q, k = (rms_norm(x, norm, geometry.rms_norm_eps) for x, norm in zip((q, k), qk_norms, strict=True))
        q, k = tap("q", apply_rope(q, table)), tap("k", apply_rope(k, table))
        pool, o = attend(pool, q, k, tap("v", v))
        o = tap("attn", o).reshape(*x.shape[:-1], N * H)
        x = tap("post_attention", add(x, linear(o, weights.o_proj, weights.o_bias)))
    with jax.named_scope("mlp"):
        y = tap("n2", rms_norm(x, post_norm, geometry.rms_norm_eps))
        x = tap("out", add(x, linear(tap("act", swiglu(linear(y, weights.gate_up))), weights.down)))
    return pool, x


def add(x: Array, y: Array) -> Array:
    """The residual add, rounded once."""
    return store(to_accum(x) + to_accum(y), x.dtype)
