"""The simple target: a Qwen3 language model over the same paged pool, with its hidden states at the drafter's taps.

B requests, T rows of one request, D model width, E taps, V vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_dflash.attention import dense
from jax_dflash.attention.dense import padded_width
from jax_dflash.batch import PAD_SLOT
from jax_dflash.config import TargetConfig, load_target_config, plain_rope
from jax_dflash.drafter import Attend
from jax_dflash.inputs import slot_mapping
from jax_dflash.kv_cache import pool_shape, store_layer
from jax_dflash.layers import LayerWeights, Pool, decoder_layer, rms_norm, rope_table
from jax_dflash.modules import DecoderLayer, Weight, from_tensors, tensors
from jax_dflash.names import target_tensors
from jax_dflash.numerics import COMPILER_OPTIONS, accum_einsum
from jax_dflash.sampling import greedy
from jax_dflash.weights import load_tensors, pack_layers


class Decoder(nnx.Module):
    def __init__(self, config: TargetConfig, **kw):
        g = config.geometry
        self.embed_tokens = Weight(config.vocab_size, g.hidden_size, **kw)
        self.layers = nnx.List([DecoderLayer(g, **kw) for _ in range(g.num_layers)])
        self.norm = Weight(g.hidden_size, **kw)


class Target(nnx.Module):
    """The parameters of a Qwen3 language model under their checkpoint names."""

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
    table = rope_table(positions_BT, plain_rope(config.geometry), x.dtype)
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


class TargetRunner:
    """Runs a target over the next rows of several requests, greedily. Each row of its batch owns its pages for good.

    One program per row width in `widths`; a call takes the smallest width that fits its longest request.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: TargetWeights,
        *,
        taps: tuple[int, ...],
        max_num_seqs: int,
        max_model_len: int,
        widths: tuple[int, ...],
        page_size: int = 16,
    ):
        pages = padded_width(-(-max_model_len // page_size), page_size)
        self.max_num_seqs, self.widths = max_num_seqs, tuple(sorted(widths))
        self.weights = weights
        shape = pool_shape(config.geometry, 1 + max_num_seqs * pages, page_size)
        self.pool = jnp.zeros(shape, weights.norm.dtype)
        tables = 1 + np.arange(max_num_seqs * pages, dtype=np.int32).reshape(max_num_seqs, pages)

        def target_step(weights, pool, ids, positions, num_rows):
            B, T = ids.shape
            live = jnp.arange(T) < num_rows[:, None]
            slots = slot_mapping(positions.reshape(-1), jnp.repeat(tables, T, axis=0), page_size, max_model_len)
            slots = jnp.where(live.reshape(-1), slots, PAD_SLOT)
            seq_lens = jnp.where(num_rows > 0, positions[:, 0] + num_rows, 0)

            def attend(pool, layer, q, k, v):
                pool = store_layer(pool, layer, k.reshape(B * T, *k.shape[2:]), v.reshape(B * T, *v.shape[2:]), slots)
                return pool, dense.attention(pool, layer, q, jnp.asarray(tables), seq_lens, positions)

            pool, hidden, features = target_forward(weights, config, pool, embed(weights, ids), positions, attend, taps)
            return pool, greedy(compute_logits(weights, hidden)), features

        self._step = jax.jit(target_step, donate_argnums=1, compiler_options=COMPILER_OPTIONS)

    def run(self, rows: list[int], starts: list[int], tokens: list[list[int]]) -> tuple[list[np.ndarray], np.ndarray]:
        """Run `tokens[i]` at positions from `starts[i]` on for the request in batch row `rows[i]`.

        Returns the greedy next token after each of them, request by request, and their features `[M, F]` end to end.
        """
        width = next(w for w in self.widths if w >= max(map(len, tokens)))
        ids = np.zeros((self.max_num_seqs, width), np.int32)
        positions, num_rows = ids.copy(), np.zeros(self.max_num_seqs, np.int32)
        for row, start, new in zip(rows, starts, tokens, strict=True):
            ids[row, : len(new)] = new
            positions[row] = start + np.arange(width)
            num_rows[row] = len(new)
        self.pool, next_tokens, features = self._step(self.weights, self.pool, ids, positions, num_rows)
        next_tokens, features = np.asarray(next_tokens), np.asarray(features)
        lens = list(map(len, tokens))
        return (
            [next_tokens[row, :n] for row, n in zip(rows, lens, strict=True)],
            np.concatenate([features[row, :n] for row, n in zip(rows, lens, strict=True)]),
        )
