"""The DFlash drafter: target features to context K/V, and one pass over [anchor, mask x K] per request.

B requests, T query rows of one request, C context rows of a batch, E target feature layers, D model width, L draft
layers, K KV heads, H head dim, V vocabulary.
"""

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_dflash.config import DraftConfig, InputError, load_draft_config
from jax_dflash.layers import LayerWeights, Pool, apply_rope, decoder_layer, rms_norm, rope_table
from jax_dflash.mask_embedding import MASK_EMBEDDING
from jax_dflash.modules import DecoderLayer, Weight, from_tensors, tensors
from jax_dflash.names import vocabulary_tensors
from jax_dflash.numerics import accum_einsum, linear, store, to_accum
from jax_dflash.taps import TapCall, no_taps
from jax_dflash.weights import load_draft_tensors, pack_layers, unpack_layers

Attend = Callable[[Pool, int, Array, Array, Array], tuple[Pool, Array]]


class Drafter(nnx.Module):
    """The parameters of a drafter under their checkpoint names. Tables of tokens are its own where it must have them (a
    reduced LM head and its map `d2t`) and where `own` names them (`embed_tokens.weight`, `lm_head.weight`, and
    `mask_embedding`, a mask row of its own)."""

    def __init__(self, config: DraftConfig, *, own: Collection[str] = (), rngs: nnx.Rngs, dtype: jnp.dtype):
        g, kw = config.geometry, {"rngs": rngs, "dtype": dtype}
        self.fc = Weight(g.hidden_size, config.feature_size, **kw)
        self.hidden_norm = Weight(g.hidden_size, **kw)
        self.layers = nnx.List([DecoderLayer(g, **kw) for _ in range(g.num_layers)])
        self.norm = Weight(g.hidden_size, **kw)
        required, optional = vocabulary_tensors(config)
        tables = required | {name: shape for name, shape in optional.items() if name in own}
        for name in ("embed_tokens", "lm_head"):
            if (shape := tables.get(f"{name}.weight")) is not None:
                setattr(self, name, Weight(*shape, **kw))
        if "d2t" in tables:
            self.d2t = nnx.Variable(jnp.zeros(tables["d2t"], jnp.int32))
        if MASK_EMBEDDING in own:
            self.mask_embedding = nnx.Param(jnp.zeros(g.hidden_size, dtype))


def load_drafter(
    directory: str | Path, dtype: jnp.dtype | None = None, *, yarn_attention: str = "mscale"
) -> tuple[DraftConfig, Drafter]:
    """A published checkpoint folder; tensors as stored, or converted to `dtype`. `yarn_attention` as in
    `parse_draft_config`. Raises InputError."""
    config = load_draft_config(directory, yarn_attention=yarn_attention)
    values = load_draft_tensors(directory, config, dtype)
    return config, from_tensors(partial(Drafter, own=values), config, values)


class DraftWeights(NamedTuple):
    """What a program takes. `context_kv [D, L 2 K H]` is every layer's K and V projection, layer by layer, K before V;
    `context_bias [L 2 K H]` their biases, where attention has some. With `d2t`, row i of `lm_head` is token i + d2t[i].
    `mask_embedding [D]` stands for the embedding's row in a block's mask rows; its dtype may be its file's own."""

    fc: Array
    hidden_norm: Array
    context_kv: Array
    context_k_norm: Array
    layers: tuple[LayerWeights, ...]
    norm: Array
    embed_tokens: Array
    lm_head: Array
    context_bias: Array | None = None
    d2t: Array | None = None
    mask_embedding: Array | None = None


def pack(
    values: dict[str, Array],
    config: DraftConfig,
    embed_tokens: Array | None = None,
    lm_head: Array | None = None,
    shards: int = 1,
) -> DraftWeights:
    """The canonical tree (checkpoint names) as the few arrays that programs take. `embed_tokens` and `lm_head` are the
    target's, for a drafter that has none of its own."""
    embed_tokens = values.get("embed_tokens.weight", embed_tokens)
    lm_head = values.get("lm_head.weight", lm_head)
    if embed_tokens is None or lm_head is None:
        raise InputError("this drafter has not both an embedding and an LM head of its own; pass the target's")
    layers = range(config.geometry.num_layers)

    def context(kind):
        return jnp.concatenate([values[f"layers.{i}.self_attn.{p}_proj.{kind}"] for i in layers for p in "kv"])

    return DraftWeights(
        fc=values["fc.weight"].T,
        hidden_norm=values["hidden_norm.weight"],
        context_kv=context("weight").T,
        context_k_norm=jnp.stack([values[f"layers.{i}.self_attn.k_norm.weight"] for i in layers]),
        layers=pack_layers(values, config.geometry, shards=shards),
        norm=values["norm.weight"],
        embed_tokens=embed_tokens,
        lm_head=lm_head,
        context_bias=context("bias") if config.geometry.attention_bias else None,
        d2t=None if config.draft_vocab_size is None else values["d2t"],
        mask_embedding=values.get(MASK_EMBEDDING),
    )


def unpack(weights: DraftWeights, config: DraftConfig, own: Collection[str] = (), shards: int = 1) -> dict[str, Array]:
    """The inverse of `pack`: the canonical tree, with the tables of tokens that are the drafter's own as in `Drafter`."""
    tables = {
        "embed_tokens.weight": weights.embed_tokens,
        "lm_head.weight": weights.lm_head,
        **({} if weights.d2t is None else {"d2t": weights.d2t}),
    }
    return {
        "fc.weight": weights.fc.T,
        "hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
        **unpack_layers(weights.layers, config.geometry, shards=shards),
        **{name: table for name, table in tables.items() if name in own or name in vocabulary_tensors(config)[0]},
        **({} if weights.mask_embedding is None else {MASK_EMBEDDING: weights.mask_embedding}),
    }


def pack_drafter(
    drafter: Drafter, config: DraftConfig, embed_tokens: Array | None = None, lm_head: Array | None = None
) -> DraftWeights:
    """`pack` of a module's parameters."""
    return pack(tensors(drafter), config, embed_tokens, lm_head)


def combine_hidden_states(weights: DraftWeights, features_CF: Float[Array, "C F"]) -> Float[Array, "C D"]:
    """The target's hidden states at all taps, side by side (F = E D_target), through fc; no norm."""
    with jax.named_scope("combine"):
        return linear(features_CF, weights.fc)


def rope_tables(config: DraftConfig, positions: Int[Array, "..."], dtype: jnp.dtype) -> list[tuple[Array, Array]]:
    """Each layer's cos and sin; layers that rotate alike share them."""
    tables = {rope: rope_table(positions, rope, dtype) for rope in dict.fromkeys(layer.rope for layer in config.layers)}
    return [tables[layer.rope] for layer in config.layers]


def precompute_context_kv(
    weights: DraftWeights,
    config: DraftConfig,
    x_CD: Float[Array, "C D"],
    positions_C: Int[Array, "C"],
    tap: TapCall = no_taps,
) -> Float[Array, "L 2 C K H"]:
    """K and V of every layer from combined states: hidden_norm, one product, per-layer K norm, RoPE; V is raw."""
    g = config.geometry
    with jax.named_scope("context_kv"):
        y = tap("context_norm", rms_norm(x_CD, weights.hidden_norm, g.rms_norm_eps))
        kv = linear(y, weights.context_kv, weights.context_bias).reshape(
            -1, g.num_layers, 2, g.num_kv_heads, g.head_dim
        )
        k_LCKH, v_LCKH = jnp.moveaxis(kv, 0, 2).swapaxes(0, 1)
        k_norm = jax.vmap(lambda k, weight: rms_norm(k, weight, g.rms_norm_eps))
        k_LCKH, tables = k_norm(k_LCKH, weights.context_k_norm), rope_tables(config, positions_C, x_CD.dtype)
        if len({layer.rope for layer in config.layers}) == 1:  # all layers in one rotation
            k_LCKH = apply_rope(k_LCKH, tables[0])
        else:
            k_LCKH = jnp.stack([apply_rope(k, table) for k, table in zip(k_LCKH, tables, strict=True)])
        return jnp.stack([tap("context_k", k_LCKH), tap("context_v", v_LCKH)], axis=1)


def query_forward(
    weights: DraftWeights,
    config: DraftConfig,
    pool: Pool,
    x_BTD: Float[Array, "B T D"],
    positions_BT: Int[Array, "B T"],
    attend: Attend,
    tap: TapCall = no_taps,
) -> tuple[Pool, Float[Array, "B T D"]]:
    """The block's rows through all layers and the final norm.

    `attend(pool, layer, q, k, v) -> (pool, o)` stores the block's K/V and then reads context and block; it is all that
    differs between pages, kernels and the training mask.
    """
    tables = rope_tables(config, positions_BT, x_BTD.dtype)
    for layer, (layer_weights, table) in enumerate(zip(weights.layers, tables, strict=True)):
        with jax.named_scope(f"layers.{layer}"):

            def attend_layer(pool, q, k, v, layer=layer):
                return attend(pool, layer, q, k, v)

            def tap_layer(name, value, layer=layer):
                return tap(f"layers.{layer}.{name}", value)

            pool, x_BTD = decoder_layer(layer_weights, config.geometry, pool, x_BTD, table, attend_layer, tap_layer)
    return pool, rms_norm(x_BTD, weights.norm, config.geometry.rms_norm_eps)


def embed(weights: DraftWeights, config: DraftConfig, ids: Int[Array, "... T"]) -> Float[Array, "... T D"]:
    """The rows of blocks, the anchor's first: rows of the embedding, scaled and then rounded where the drafter scales them.

    A mask row of its own stands in every row but the anchor's, whatever its id: an anchor that is the mask token keeps the
    embedding's row.
    """
    x = weights.embed_tokens[ids]
    if weights.mask_embedding is not None:
        anchor = jnp.arange(ids.shape[-1])[:, None] == 0
        x = jnp.where(anchor, x, store(weights.mask_embedding, x.dtype))
    return x if config.embedding_scale == 1 else store(to_accum(x) * config.embedding_scale, x.dtype)


def compute_logits(weights: DraftWeights, config: DraftConfig, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
    """Logits of the vocabulary's tokens, in the accumulation dtype. Rows that pad the head past the vocabulary have none;
    tokens that a reduced head lacks have -inf."""
    V = config.geometry.vocab_size
    with jax.named_scope("lm_head"):
        logits = accum_einsum("...d,vd->...v", hidden, weights.lm_head)
        if config.logit_scale != 1:
            logits = logits * config.logit_scale
        if weights.d2t is None:
            return logits[..., :V]
        assert V is not None
        tokens = jnp.arange(weights.d2t.shape[0], dtype=weights.d2t.dtype) + weights.d2t
        return jnp.full((*logits.shape[:-1], V), -jnp.inf, logits.dtype).at[..., tokens].set(logits)
