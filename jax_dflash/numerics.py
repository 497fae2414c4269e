"""Where numbers are rounded, and the only place that names dtypes.

The rounding contract (both frameworks): matrix products accumulate in at least float32 and round once; norms, RoPE,
softmax and SwiGLU compute in at least float32 and round their result once; the residual add rounds once; logits stay in
the accumulation dtype. With a float64 model "at least float32" is float64, so the same code is its own oracle.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jax_dflash.config import InputError

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float64": jnp.float64}

# XLA's default lets it drop bfloat16 round trips inside a program, which is another rounding policy.
COMPILER_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}


def as_dtype(name: str) -> jnp.dtype:
    """The dtype of that name. Raises InputError; float64 needs JAX_ENABLE_X64, which holds for a whole process."""
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is unknown; pass one of {', '.join(DTYPES)}")
    if name == "float64" and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise InputError("float64 needs a process of its own with JAX_ENABLE_X64=1")
    return jnp.dtype(DTYPES[name])


def accum_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """At least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def to_accum(x: Array) -> Array:
    """The exact value in the accumulation dtype."""
    return x.astype(accum_dtype(x.dtype))


def store(x: Array, dtype: jnp.dtype) -> Array:
    """Round to the activation dtype: the only function that does."""
    return x.astype(dtype)


def accum_einsum(spec: str, a: Array, b: Array) -> Array:
    """A product that accumulates in, and returns, at least float32; float32 operands are never cut to TF32."""
    accum = accum_dtype(a.dtype)
    precision = lax.Precision.HIGHEST if a.dtype == accum else None
    return jnp.einsum(spec, a, b, preferred_element_type=accum, precision=precision)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """`x [..., in]` by a packed `weight [in, out]`, plus a bias if there is one, rounded once."""
    y = accum_einsum("...d,df->...f", x, weight)
    return store(y if bias is None else y + to_accum(bias), x.dtype)


def from_bits(bits: Array) -> Array:
    """float32 numbers that travelled as int32."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def to_bits(x: Array) -> Array:
    """float32 numbers as the int32 that `from_bits` takes."""
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
