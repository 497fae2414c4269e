"""Checkpoints to and from disk, and the canonical tree to and from the few arrays that the forward takes."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from jax_dflash.config import DraftConfig, Geometry, TargetConfig
from jax_dflash.mask_embedding import MASK_EMBEDDING, MASK_FILES, check_mask_files
from jax_dflash.names import Shapes, checked_d2t, match, match_draft, target_tables
from jax_dflash.stored import Source, read_tensors, stored_tensors
from torch_ref.layers import LayerWeights


def load_tensors(
    directory: str | Path, expected: Shapes, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as stored or converted to `dtype`; faults are InputErrors naming file and tensor."""
    return _read(match(stored_tensors(directory), expected).checked(), dtype, device)


def load_draft_tensors(
    directory: str | Path, config: DraftConfig, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A drafter's tensors under their canonical names, however the checkpoint spells them, with the tables of tokens that
    it brings (`d2t` as int32). Raises InputError."""
    sources = match_draft(directory, config).checked()
    d2t = sources.pop("d2t", None)
    values = _read(sources, dtype, device)
    if d2t is not None:
        values["d2t"] = torch.from_numpy(checked_d2t(d2t, config.geometry.vocab_size)).to(device)
    return values


def _read(sources: dict[str, Source], dtype: torch.dtype | None, device: torch.device | str) -> dict[str, Tensor]:
    """The file's bytes as tensors: numpy need not know their dtype."""
    return read_tensors(
        sources,
        lambda raw, kind, shape: torch.from_numpy(raw).view(getattr(torch, kind)).reshape(shape).to(device, dtype),
    )


def load_tables(
    directory: str | Path, config: TargetConfig, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """A target's embedding and LM head, which drafters share, and nothing else of it; a tied head is the embedding. Raises
    InputError."""
    expected = target_tables(config)
    stored = [tensor for tensor in stored_tensors(directory) if tensor.name in expected]
    values = _read(match(stored, expected).checked(), dtype, device)
    embed_tokens = values["model.embed_tokens.weight"]
    return embed_tokens, embed_tokens if config.tie_word_embeddings else values["lm_head.weight"]


def save_tensors(directory: str | Path, values: dict[str, Tensor]) -> None:
    """Write `model.safetensors`, and a mask row of its own beside it, each whole or not at all: an interrupted save leaves
    what was there. Raises InputError where a mask row lies that would be read with it and is not of these values."""
    values = dict(values)
    check_mask_files(directory, values)
    if (row := values.pop(MASK_EMBEDDING, None)) is not None:
        _save_file(Path(directory) / MASK_FILES[0], {"embedding": row})
    _save_file(Path(directory) / "model.safetensors", values)


def _save_file(target: Path, values: dict[str, Tensor]) -> None:
    partial = target.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in values.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, target)


def _norms(geometry: Geometry) -> tuple[str, ...]:
    """The norms of a layer in the order of `LayerWeights.norms`."""
    qk_norms = ("self_attn.q_norm", "self_attn.k_norm") if geometry.qk_norm else ()
    return ("input_layernorm", "post_attention_layernorm", *qk_norms)


def pack_layers(values: dict[str, Tensor], geometry: Geometry, prefix: str = "") -> tuple[LayerWeights, ...]:
    """Each layer as `LayerWeights`."""

    def pack(layer: int) -> LayerWeights:
        def get(name, kind="weight"):
            return values[f"{prefix}layers.{layer}.{name}.{kind}"]

        def fused(kind):
            return torch.cat([get(f"self_attn.{p}_proj", kind) for p in "qkv"])

        return LayerWeights(
            norms=torch.cat([get(name) for name in _norms(geometry)]),
            qkv=fused("weight"),
            o_proj=get("self_attn.o_proj"),
            gate_up=torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            down=get("mlp.down_proj"),
            qkv_bias=fused("bias") if "q" in geometry.biased else None,
            o_bias=get("self_attn.o_proj", "bias") if "o" in geometry.biased else None,
        )

    return tuple(pack(layer) for layer in range(geometry.num_layers))


def unpack_layers(layers: tuple[LayerWeights, ...], geometry: Geometry, prefix: str = "") -> dict[str, Tensor]:
    """The inverse of `pack_layers`."""
    D, H, F = geometry.hidden_size, geometry.head_dim, geometry.intermediate_size
    NH, KH = geometry.num_heads * H, geometry.num_kv_heads * H
    values = {}
    for layer, w in enumerate(layers):
        names = [*_norms(geometry)]
        parts = [*w.norms.split([D, D, H, H][: len(names)])]
        names += [f"self_attn.{p}_proj" for p in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        parts += [*w.qkv.split([NH, KH, KH]), w.o_proj, *w.gate_up.split([F, F]), w.down]
        values |= {f"{prefix}layers.{layer}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
        if w.qkv_bias is not None:
            # Where o has no bias, "qkv" ends before its None.
            biases = zip(geometry.biased, [*w.qkv_bias.split([NH, KH, KH]), w.o_bias], strict=False)
            values |= {f"{prefix}layers.{layer}.self_attn.{p}_proj.bias": bias for p, bias in biases}
    return values
