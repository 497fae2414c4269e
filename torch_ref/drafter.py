"""The DFlash drafter: target features to context K/V, and one pass over [anchor, mask x K] per request.

B requests, T query rows of one request, C context rows of a batch, E target feature layers, D model width, L draft
layers, K KV heads, H head dim, V vocabulary.
"""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from jax_dflash.config import DraftConfig, InputError, load_draft_config
from jax_dflash.mask_embedding import MASK_EMBEDDING
from jax_dflash.names import vocabulary_tensors
from jax_dflash.taps import TapCall, no_taps
from torch_ref.layers import LayerWeights, Pool, apply_rope, decoder_layer, rms_norm, rope_table
from torch_ref.modules import DecoderLayer, Weight, from_tensors, tensors
from torch_ref.numerics import accum_linear, linear, store, to_accum
from torch_ref.weights import load_draft_tensors, pack_layers, unpack_layers

Attend = Callable[[Pool, int, Tensor, Tensor, Tensor], tuple[Pool, Tensor]]


class Drafter(nn.Module):
    """The parameters of a drafter under their checkpoint names. Tables of tokens are its own where it must have them (a
    reduced LM head and its map `d2t`) and where `own` names them (`embed_tokens.weight`, `lm_head.weight`, and
    `mask_embedding`, a mask row of its own)."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        own: Collection[str] = (),
        generator: torch.Generator | None = None,
        dtype: torch.dtype,
    ):
        super().__init__()
        g, kw = config.geometry, {"generator": generator, "dtype": dtype}
        self.fc = Weight(g.hidden_size, config.feature_size, **kw)
        self.hidden_norm = Weight(g.hidden_size, **kw)
        self.layers = nn.ModuleList([DecoderLayer(g, **kw) for _ in range(g.num_layers)])
        self.norm = Weight(g.hidden_size, **kw)
        required, optional = vocabulary_tensors(config)
        tables = required | {name: shape for name, shape in optional.items() if name in own}
        for name in ("embed_tokens", "lm_head"):
            if (shape := tables.get(f"{name}.weight")) is not None:
                setattr(self, name, Weight(*shape, **kw))
        if "d2t" in tables:
            self.register_buffer("d2t", torch.zeros(tables["d2t"], dtype=torch.int32))
        if MASK_EMBEDDING in own:
            self.mask_embedding = nn.Parameter(torch.zeros(g.hidden_size, dtype=dtype), requires_grad=False)


def load_drafter(
    directory: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    yarn_attention: str = "mscale",
) -> tuple[DraftConfig, Drafter]:
    """A published checkpoint folder; tensors as stored, or converted to `dtype`. `yarn_attention` as in
    `parse_draft_config`. Raises InputError."""
    config = load_draft_config(directory, yarn_attention=yarn_attention)
    values = load_draft_tensors(directory, config, dtype, device)
    return config, from_tensors(partial(Drafter, own=values), config, values)


class DraftWeights(NamedTuple):
    """What a step takes. `context_kv [L 2 K H, D]` is every layer's K and V projection, layer by layer, K before V;
    `context_bias [L 2 K H]` their biases, where attention has some. With `d2t`, row i of `lm_head` is token i + d2t[i].
    `mask_embedding [D]` stands for the embedding's row in a block's mask rows; its dtype may be its file's own."""

    fc: Tensor
    hidden_norm: Tensor
    context_kv: Tensor
    context_k_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    embed_tokens: Tensor
    lm_head: Tensor
    context_bias: Tensor | None = None
    d2t: Tensor | None = None
    mask_embedding: Tensor | None = None


def pack(
    values: dict[str, Tensor],
    config: DraftConfig,
    embed_tokens: Tensor | None = None,
    lm_head: Tensor | None = None,
) -> DraftWeights:
    """The canonical tree (checkpoint names) as the few arrays that a step takes. `embed_tokens` and `lm_head` are the
    target's, for a drafter that has none of its own."""
    embed_tokens = values.get("embed_tokens.weight", embed_tokens)
    lm_head = values.get("lm_head.weight", lm_head)
    if embed_tokens is None or lm_head is None:
        raise InputError("this drafter has not both an embedding and an LM head of its own; pass the target's")
    layers = range(config.geometry.num_layers)

    def context(kind):
        return torch.cat([values[f"layers.{i}.self_attn.{p}_proj.{kind}"] for i in layers for p in "kv"])

    return DraftWeights(
        fc=values["fc.weight"],
        hidden_norm=values["hidden_norm.weight"],
        context_kv=context("weight"),
        context_k_norm=torch.stack([values[f"layers.{i}.self_attn.k_norm.weight"] for i in layers]),
        layers=pack_layers(values, config.geometry),
        norm=values["norm.weight"],
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        context_bias=context("bias") if config.geometry.attention_bias else None,
        d2t=None if config.draft_vocab_size is None else values["d2t"],
        mask_embedding=values.get(MASK_EMBEDDING),
    )


def unpack(weights: DraftWeights, config: DraftConfig, own: Collection[str] = ()) -> dict[str, Tensor]:
    """The inverse of `pack`: the canonical tree, with the tables of tokens that are the drafter's own as in `Drafter`."""
    tables = {
        "embed_tokens.weight": weights.embed_tokens,
        "lm_head.weight": weights.lm_head,
        **({} if weights.d2t is None else {"d2t": weights.d2t}),
    }
    return {
        "fc.weight": weights.fc,
        "hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
        **unpack_layers(weights.layers, config.geometry),
        **{name: table for name, table in tables.items() if name in own or name in vocabulary_tensors(config)[0]},
        **({} if weights.mask_embedding is None else {MASK_EMBEDDING: weights.mask_embedding}),
    }


def pack_drafter(
    drafter: Drafter, config: DraftConfig, embed_tokens: Tensor | None = None, lm_head: Tensor | None = None
) -> DraftWeights:
    """`pack` of a module's parameters."""
    return pack(tensors(drafter), config, embed_tokens, lm_head)


def combine_hidden_states(weights: DraftWeights, features_CF: Float[Tensor, "C F"]) -> Float[Tensor, "C D"]:
    """The target's hidden states at all taps, side by side (F = E D_target), through fc; no norm."""
    return linear(features_CF, weights.fc)


def rope_tables(config: DraftConfig, positions: Int[Tensor, "..."], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Each layer's cos and sin; layers that rotate alike share them."""
    tables = {rope: rope_table(positions, rope, dtype) for rope in dict.fromkeys(layer.rope for layer in config.layers)}
    return [tables[layer.rope] for layer in config.layers]


def precompute_context_kv(
    weights: DraftWeights,
    config: DraftConfig,
    x_CD: Float[Tensor, "C D"],
    positions_C: Int[Tensor, "C"],
    tap: TapCall = no_taps,
) -> Float[Tensor, "L 2 C K H"]:
    """K and V of every layer from combined states: hidden_norm, one product, per-layer K norm, RoPE; V is raw."""
    g = config.geometry
    y = tap("context_norm", rms_norm(x_CD, weights.hidden_norm, g.rms_norm_eps))
    kv = linear(y, weights.context_kv, weights.context_bias).unflatten(
        -1, (g.num_layers, 2, g.num_kv_heads, g.head_dim)
    )
    k_LCKH, v_LCKH = kv.permute(2, 1, 0, 3, 4)
    k_norm, tables = zip(k_LCKH, weights.context_k_norm, strict=True), rope_tables(config, positions_C, x_CD.dtype)
    k_LCKH = torch.stack([rms_norm(k, weight, g.rms_norm_eps) for k, weight in k_norm])
    if len({layer.rope for layer in config.layers}) == 1:  # all layers in one rotation
        k_LCKH = apply_rope(k_LCKH, tables[0])
    else:
        k_LCKH = torch.stack([apply_rope(k, table) for k, table in zip(k_LCKH, tables, strict=True)])
    return torch.stack([tap("context_k", k_LCKH), tap("context_v", v_LCKH)], dim=1)


def query_forward(
    weights: DraftWeights,
    config: DraftConfig,
    pool: Pool,
    x_BTD: Float[Tensor, "B T D"],
    positions_BT: Int[Tensor, "B T"],
    attend: Attend,
    tap: TapCall = no_taps,
) -> tuple[Pool, Float[Tensor, "B T D"]]:
    """The block's rows through all layers and the final norm.

    `attend(pool, layer, q, k, v) -> (pool, o)` stores the block's K/V and then reads context and block.
    """
    tables = rope_tables(config, positions_BT, x_BTD.dtype)
    for layer, (layer_weights, table) in enumerate(zip(weights.layers, tables, strict=True)):

        def attend_layer(pool, q, k, v, layer=layer):
            return attend(pool, layer, q, k, v)

        def tap_layer(name, value, layer=layer):
            return tap(f"layers.{layer}.{name}", value)

        pool, x_BTD = decoder_layer(layer_weights, config.geometry, pool, x_BTD, table, attend_layer, tap_layer)
    return pool, rms_norm(x_BTD, weights.norm, config.geometry.rms_norm_eps)


def embed(weights: DraftWeights, config: DraftConfig, ids: Int[Tensor, "... T"]) -> Float[Tensor, "... T D"]:
    """The rows of blocks, the anchor's first: rows of the embedding, scaled and then rounded where the drafter scales them.

    A mask row of its own stands in every row but the anchor's, whatever its id: an anchor that is the mask token keeps the
    embedding's row.
    """
    x = weights.embed_tokens[ids]
    if weights.mask_embedding is not None:
        anchor = torch.arange(ids.shape[-1], device=x.device)[:, None] == 0
        x = torch.where(anchor, x, store(weights.mask_embedding, x.dtype))
    return x if config.embedding_scale == 1 else store(to_accum(x) * config.embedding_scale, x.dtype)


def compute_logits(
    weights: DraftWeights, config: DraftConfig, hidden: Float[Tensor, "... D"]
) -> Float[Tensor, "... V"]:
    """Logits of the vocabulary's tokens, in the accumulation dtype. Rows that pad the head past the vocabulary have none;
    tokens that a reduced head lacks have -inf."""
    V = config.geometry.vocab_size
    logits = accum_linear(hidden, weights.lm_head)
    if config.logit_scale != 1:
        logits = logits * config.logit_scale
    if weights.d2t is None:
        return logits[..., :V]
    assert V is not None
    tokens = torch.arange(len(weights.d2t), dtype=weights.d2t.dtype, device=weights.d2t.device) + weights.d2t
    full = logits.new_full((*logits.shape[:-1], V), -torch.inf)
    full[..., tokens] = logits
    return full
