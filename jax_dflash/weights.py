"""Checkpoints to and from disk, and the canonical tree to and from the few arrays that programs take."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors.flax import save_file

from jax_dflash.config import DraftConfig, Geometry, TargetConfig
from jax_dflash.layers import LayerWeights
from jax_dflash.mask_embedding import MASK_EMBEDDING, MASK_FILES, check_mask_files
from jax_dflash.names import Shapes, checked_d2t, match, match_draft, target_tables
from jax_dflash.stored import Source, read_tensors, stored_tensors


def load_tensors(directory: str | Path, expected: Shapes, dtype: jnp.dtype | None = None) -> dict[str, Array]:
    """All tensors of a checkpoint, as stored or converted to `dtype`; faults are InputErrors naming file and tensor."""
    return _read(match(stored_tensors(directory), expected).checked(), dtype)


def load_draft_tensors(directory: str | Path, config: DraftConfig, dtype: jnp.dtype | None = None) -> dict[str, Array]:
    """A drafter's tensors under their canonical names, however the checkpoint spells them, with the tables of tokens that
    it brings (`d2t` as int32). Raises InputError."""
    sources = match_draft(directory, config).checked()
    d2t = sources.pop("d2t", None)
    values = _read(sources, dtype)
    if d2t is not None:
        values["d2t"] = jnp.asarray(checked_d2t(d2t, config.geometry.vocab_size))
    return values


def _read(sources: dict[str, Source], dtype: jnp.dtype | None) -> dict[str, Array]:
    """Each tensor waited for, so that no more than one is held twice. On a CPU `device_put` takes the bytes as they lie
    (`jnp.asarray` holds three copies of them for a while)."""

    def convert(raw: np.ndarray, kind: str, shape: tuple[int, ...]) -> Array:
        value = jax.device_put(raw.view(kind).reshape(shape))
        return (value if dtype is None else value.astype(dtype)).block_until_ready()

    return read_tensors(sources, convert)


def load_tables(directory: str | Path, config: TargetConfig, dtype: jnp.dtype | None = None) -> tuple[Array, Array]:
    """A target's embedding and LM head, which drafters share, and nothing else of it; a tied head is the embedding. Raises
    InputError."""
    expected = target_tables(config)
    stored = [tensor for tensor in stored_tensors(directory) if tensor.name in expected]
    values = _read(match(stored, expected).checked(), dtype)
    embed_tokens = values["model.embed_tokens.weight"]
    return embed_tokens, embed_tokens if config.tie_word_embeddings else values["lm_head.weight"]


def save_tensors(directory: str | Path, values: dict[str, Array]) -> None:
    """Write `model.safetensors`, and a mask row of its own beside it, each whole or not at all: an interrupted save leaves
    what was there. Raises InputError where a mask row lies that would be read with it and is not of these values."""
    values = dict(values)
    check_mask_files(directory, values)
    if (row := values.pop(MASK_EMBEDDING, None)) is not None:
        _save_file(Path(directory) / MASK_FILES[0], {"embedding": row})
    _save_file(Path(directory) / "model.safetensors", values)


def _save_file(target: Path, values: dict[str, Array]) -> None:
    partial = target.with_suffix(".partial")
    save_file(values, partial, metadata={"format": "pt"})
    os.replace(partial, target)


def _by_shard(parts: list[Array], shards: int) -> Array:
    """Rows of several matrices in one: shard 0's share of each part, then shard 1's, and so on."""
    split = [part.reshape(shards, -1, *part.shape[1:]) for part in parts]
    return jnp.concatenate(split, axis=1).reshape(-1, *parts[0].shape[1:])


def _from_shards(fused: Array, rows: list[int], shards: int) -> list[Array]:
    split = jnp.split(
        fused.reshape(shards, -1, *fused.shape[1:]), [sum(rows[:i]) // shards for i in range(1, len(rows))], axis=1
    )
    return [part.reshape(-1, *fused.shape[1:]) for part in split]


def _norms(geometry: Geometry) -> tuple[str, ...]:
    """The norms of a layer in the order of `LayerWeights.norms`."""
    qk_norms = ("self_attn.q_norm", "self_attn.k_norm") if geometry.qk_norm else ()
    return ("input_layernorm", "post_attention_layernorm", *qk_norms)


def pack_layers(
    values: dict[str, Array], geometry: Geometry, prefix: str = "", shards: int = 1
) -> tuple[LayerWeights, ...]:
    """Each layer as `LayerWeights`; with `shards` the fused columns stand shard by shard, so that an even split is right."""

    def pack(layer: int) -> LayerWeights:
        def get(name, kind="weight"):
            return values[f"{prefix}layers.{layer}.{name}.{kind}"]

        def fused(kind):
            return _by_shard([get(f"self_attn.{p}_proj", kind) for p in "qkv"], shards)

        return LayerWeights(
            norms=jnp.concatenate([get(name) for name in _norms(geometry)]),
            qkv=fused("weight").T,
            o_proj=get("self_attn.o_proj").T,
            gate_up=_by_shard([get("mlp.gate_proj"), get("mlp.up_proj")], shards).T,
            down=get("mlp.down_proj").T,
            qkv_bias=fused("bias") if "q" in geometry.biased else None,
            o_bias=get("self_attn.o_proj", "bias") if "o" in geometry.biased else None,
        )

    return tuple(pack(layer) for layer in range(geometry.num_layers))


def unpack_layers(
    layers: tuple[LayerWeights, ...], geometry: Geometry, prefix: str = "", shards: int = 1
) -> dict[str, Array]:
    """The inverse of `pack_layers`."""
    D, H, F = geometry.hidden_size, geometry.head_dim, geometry.intermediate_size
    NH, KH = geometry.num_heads * H, geometry.num_kv_heads * H
    values = {}
    for layer, w in enumerate(layers):
        names = [*_norms(geometry)]
        parts = jnp.split(w.norms, [D, 2 * D, 2 * D + H][: len(names) - 1])
        names += [f"self_attn.{p}_proj" for p in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        parts += [
            *_from_shards(w.qkv.T, [NH, KH, KH], shards),
            w.o_proj.T,
            *_from_shards(w.gate_up.T, [F, F], shards),
            w.down.T,
        ]
        values |= {f"{prefix}layers.{layer}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
        if w.qkv_bias is not None:
            # Where o has no bias, "qkv" ends before its None.
            biases = zip(geometry.biased, [*_from_shards(w.qkv_bias, [NH, KH, KH], shards), w.o_bias], strict=False)
            values |= {f"{prefix}layers.{layer}.self_attn.{p}_proj.bias": bias for p, bias in biases}
    return values
