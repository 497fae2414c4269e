"""Draft sampling."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def greedy(logits: Float[Array, "... V"]) -> Int[Array, "..."]:
    """The most likely token; the lowest id on ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
