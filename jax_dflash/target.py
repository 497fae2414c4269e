"""The simple target: a Qwen3, Qwen2 or Llama language model over the same paged pool, with its hidden states at the
drafter's taps.

B requests, T rows of one request, D model width, E taps, V vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_dflash.config import TargetConfig, load_target_config
from jax_dflash.drafter import Attend
from jax_dflash.layers import LayerWeights, Pool, decoder_layer, rms_norm, rope_table
from jax_dflash.modules import DecoderLayer, Weight, from_tensors, tensors
from jax_dflash.names import target_tensors
from jax_dflash.numerics import accum_einsum
from jax_dflash.weights import load_tensors, pack_layers


class Decoder(nnx.Module):
    def __init__(self, config: TargetConfig, **kw):
        g = config.geometry
        self.embed_tokens = Weight(config.vocab_size, g.hidden_size, **kw)
        self.layers = nnx.List([DecoderLayer(g, **kw) for _ in range(g.num_layers)])
        self.norm = Weight(g.hidden_size, **kw)


class Target(nnx.Module):
    """The parameters of a language model under their checkpoint names."""

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        self.model = Decoder(config, rngs=rngs, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Weight(config.vocab_size, config.geometry.hidden_size, rngs=rngs, dtype=dtype)


def load_target(directory: str | Path, dtype: jnp.dtype | None = None) -> tuple[TargetConfig, Target]:
    """A published checkpoint folder; tensors as stored, or converted to `dtype`. Raises InputError."""
    config = load_target_config(directory)
    return config, from_tensors(Target, config, load_tensors(directory, target_tensors(config), dtype))


class TargetWeights(NamedTuple):
    """What a program takes. A tied head is the embedding."""

    embed_tokens: Array
    layers: tuple[LayerWeights, ...]
    norm: Array
    lm_head: Array


def pack(values: dict[str, Array], config: TargetConfig) -> TargetWeights:
    """The canonical tree (checkpoint names) as the few arrays that programs take."""
    embed_tokens = values["model.embed_tokens.weight"]
    return TargetWeights(
        embed_tokens=embed_tokens,
        layers=pack_layers(values, config.geometry, prefix="model."),
        norm=values["model.norm.weight"],
        lm_head=embed_tokens if config.tie_word_embeddings else values["lm_head.weight"],
    )


def pack_target(target: Target, config: TargetConfig) -> TargetWeights:
    """`pack` of a module's parameters."""
    return pack(tensors(target), config)


def target_forward(
    weights: TargetWeights,
    config: TargetConfig,
    pool: Pool,
    x_BTD: Float[Array, "B T D"],
    positions_BT: Int[Array, "B T"],
    attend: Attend,
    taps: tuple[int, ...] = (),
) -> tuple[Pool, Float[Array, "B T D"], Float[Array, "B T F"]]:
    """Last hidden states after the final norm, and the features: hidden states at `taps` side by side (F = E D).

    Tap m is the residual stream after m layers (0 = embeddings), before the final norm also at the last layer.
    """
    x = x_BTD
    states = [x]
    table = rope_table(positions_BT, config.rope, x.dtype)
    for layer, layer_weights in enumerate(weights.layers):
        with jax.named_scope(f"layers.{layer}"):

            def attend_layer(pool, q, k, v, layer=layer):
                return attend(pool, layer, q, k, v)

            pool, x = decoder_layer(layer_weights, config.geometry, pool, x, table, attend_layer)
            states.append(x)
    features = jnp.concatenate([states[m] for m in taps], axis=-1) if taps else x[..., :0]
    return pool, rms_norm(x, weights.norm, config.geometry.rms_norm_eps), features


def embed(weights: TargetWeights, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Rows of the embedding."""
    return weights.embed_tokens[ids]


def compute_logits(weights: TargetWeights, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """The LM head, in the accumulation dtype."""
    return accum_einsum("...d,vd->...v", hidden, weights.lm_head)
