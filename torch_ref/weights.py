"""Checkpoints to and from disk, and the canonical tree to and from the few arrays that the forward takes."""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jax_dflash.config import Geometry, InputError
from jax_dflash.names import Shapes, check_tensors, checkpoint_files
from torch_ref.layers import LayerWeights

FLOAT_KINDS = ("BF16", "F16", "F32", "F64")


def load_tensors(
    directory: str | Path, expected: Shapes, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as stored or converted to `dtype`; faults are InputErrors naming file and tensor."""
    found, values = [], {}
    for file in checkpoint_files(directory):
        try:
            with safe_open(file, framework="pt") as handle:
                slices = {name: handle.get_slice(name) for name in handle.keys()}
                found += [(str(file), name, tuple(s.get_shape())) for name, s in slices.items()]
                for name in expected.keys() & slices.keys():
                    if (kind := slices[name].get_dtype()) not in FLOAT_KINDS:
                        raise InputError(f"{file}: tensor {name} is stored as {kind}, expected one of {FLOAT_KINDS}")
                    if tuple(slices[name].get_shape()) == expected[name]:
                        values[name] = handle.get_tensor(name).to(device, dtype)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file}: not a readable safetensors file ({error})") from None
    check_tensors(found, expected)
    return {name: values[name] for name in expected}


def save_tensors(directory: str | Path, values: dict[str, Tensor]) -> None:
    """Write `model.safetensors` whole or not at all: an interrupted save leaves what was there."""
    target = Path(directory) / "model.safetensors"
    partial = target.with_suffix(".partial")
    save_file({name: value.contiguous() for name, value in values.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, target)


def pack_layers(values: dict[str, Tensor], geometry: Geometry, prefix: str = "") -> tuple[LayerWeights, ...]:
    """Each layer as `LayerWeights`."""

    def pack(layer: int) -> LayerWeights:
        def get(name):
            return values[f"{prefix}layers.{layer}.{name}.weight"]

        norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        return LayerWeights(
            norms=torch.cat([get(name) for name in norms]),
            qkv=torch.cat([get(f"self_attn.{p}_proj") for p in "qkv"]),
            o_proj=get("self_attn.o_proj"),
            gate_up=torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")]),
            down=get("mlp.down_proj"),
        )

    return tuple(pack(layer) for layer in range(geometry.num_layers))


def unpack_layers(layers: tuple[LayerWeights, ...], geometry: Geometry, prefix: str = "") -> dict[str, Tensor]:
    """The inverse of `pack_layers`."""
    D, H, F = geometry.hidden_size, geometry.head_dim, geometry.intermediate_size
    NH, KH = geometry.num_heads * H, geometry.num_kv_heads * H
    values = {}
    for layer, w in enumerate(layers):
        names = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
        parts = [*w.norms.split([D, D, H, H])]
        names += [f"self_attn.{p}_proj" for p in "qkvo"] + ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        parts += [*w.qkv.split([NH, KH, KH]), w.o_proj, *w.gate_up.split([F, F]), w.down]
        values |= {f"{prefix}layers.{layer}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
    return values
