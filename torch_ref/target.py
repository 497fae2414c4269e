"""The simple target: a Qwen3, Qwen2 or Llama language model over the same paged pool, with its hidden states at the
drafter's taps.

B requests, T rows of one request, D model width, E taps, V vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_dflash.config import TargetConfig, load_target_config
from jax_dflash.names import target_tensors
from torch_ref.drafter import Attend
from torch_ref.layers import LayerWeights, Pool, decoder_layer, rms_norm, rope_table
from torch_ref.modules import DecoderLayer, Weight, from_tensors, tensors
from torch_ref.numerics import accum_linear
from torch_ref.weights import load_tensors, pack_layers


class Decoder(nn.Module):
    def __init__(self, config: TargetConfig, **kw):
        super().__init__()
        g = config.geometry
        self.embed_tokens = Weight(config.vocab_size, g.hidden_size, **kw)
        self.layers = nn.ModuleList([DecoderLayer(g, **kw) for _ in range(g.num_layers)])
        self.norm = Weight(g.hidden_size, **kw)


class Target(nn.Module):
    """The parameters of a language model under their checkpoint names."""

    def __init__(self, config: TargetConfig, *, generator: torch.Generator | None = None, dtype: torch.dtype):
        super().__init__()
        self.model = Decoder(config, generator=generator, dtype=dtype)
        if not config.tie_word_embeddings:
            head = (config.vocab_size, config.geometry.hidden_size)
            self.lm_head = Weight(*head, generator=generator, dtype=dtype)


def load_target(
    directory: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[TargetConfig, Target]:
    """A published checkpoint folder; tensors as stored, or converted to `dtype`. Raises InputError."""
    config = load_target_config(directory)
    return config, from_tensors(Target, config, load_tensors(directory, target_tensors(config), dtype, device))


class TargetWeights(NamedTuple):
    """What a step takes. A tied head is the embedding."""

    embed_tokens: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


def pack(values: dict[str, Tensor], config: TargetConfig) -> TargetWeights:
    """The canonical tree (checkpoint names) as the few arrays that a step takes."""
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
    x_BTD: Float[Tensor, "B T D"],
    positions_BT: Int[Tensor, "B T"],
    attend: Attend,
    taps: tuple[int, ...] = (),
) -> tuple[Pool, Float[Tensor, "B T D"], Float[Tensor, "B T F"]]:
    """Last hidden states after the final norm, and the features: hidden states at `taps` side by side (F = E D).

    Tap m is the residual stream after m layers (0 = embeddings), before the final norm also at the last layer.
    """
    x = x_BTD
    states = [x]
    table = rope_table(positions_BT, config.rope, x.dtype)
    for layer, layer_weights in enumerate(weights.layers):

        def attend_layer(pool, q, k, v, layer=layer):
            return attend(pool, layer, q, k, v)

        pool, x = decoder_layer(layer_weights, config.geometry, pool, x, table, attend_layer)
        states.append(x)
    features = torch.cat([states[m] for m in taps], dim=-1) if taps else x[..., :0]
    return pool, rms_norm(x, weights.norm, config.geometry.rms_norm_eps), features


def embed(weights: TargetWeights, ids: Int[Tensor, "..."]) -> Float[Tensor, "... D"]:
    """Rows of the embedding."""
    return weights.embed_tokens[ids]


def compute_logits(weights: TargetWeights, hidden: Float[Tensor, "... D"]) -> Float[Tensor, "... V"]:
    """The LM head, in the accumulation dtype."""
    return accum_linear(hidden, weights.lm_head)
