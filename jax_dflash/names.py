"""The tensors of a checkpoint: names and shapes in the published form. Plain Python: both frameworks read it."""

import json
from collections.abc import Iterable
from pathlib import Path

from jax_dflash.config import DraftConfig, Geometry, InputError, TargetConfig, read_json

Shapes = dict[str, tuple[int, ...]]


def _layer_tensors(geometry: Geometry, prefix: str) -> Shapes:
    D, F, H = geometry.hidden_size, geometry.intermediate_size, geometry.head_dim
    NH, KH = geometry.num_heads * H, geometry.num_kv_heads * H
    one_layer = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (NH, D),
        "self_attn.k_proj.weight": (KH, D),
        "self_attn.v_proj.weight": (KH, D),
        "self_attn.o_proj.weight": (D, NH),
        "self_attn.q_norm.weight": (H,),
        "self_attn.k_norm.weight": (H,),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    return {
        f"{prefix}layers.{layer}.{name}": shape
        for layer in range(geometry.num_layers)
        for name, shape in one_layer.items()
    }


def draft_tensors(config: DraftConfig) -> Shapes:
    """Every tensor of a z-lab drafter, torch layout [out, in]: 11 per layer and 3."""
    D = config.geometry.hidden_size
    return {
        "fc.weight": (D, config.feature_size),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
        **_layer_tensors(config.geometry, prefix=""),
    }


def target_tensors(config: TargetConfig) -> Shapes:
    """Every tensor of a Qwen3 target; a tied one has no LM head of its own."""
    D, V = config.geometry.hidden_size, config.geometry.vocab_size
    head = {} if config.tie_word_embeddings else {"lm_head.weight": (V, D)}
    return {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        **_layer_tensors(config.geometry, prefix="model."),
        **head,
    }


def checkpoint_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by its index or the one `model.safetensors`. Raises InputError."""
    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index}: no weight_map; expected tensor names and their files")
        names = sorted(set(weight_map.values()))
        if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise InputError(f"{index}: weight_map names {bad[0]!r}; expected files of the same folder")
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise InputError(f"{file}: no such file; a checkpoint is config.json and model.safetensors")
    return files


def check_tensors(found: Iterable[tuple[str, str, tuple[int, ...]]], expected: Shapes) -> None:
    """Compare (file, name, shape) of every stored tensor with the table; each fault is an InputError naming it."""
    seen: dict[str, str] = {}
    unclaimed = []
    for file, name, shape in found:
        if name in seen:
            raise InputError(f"{file}: tensor {name} is duplicate, it also stands in {seen[name]}")
        seen[name] = file
        if name not in expected:
            unclaimed.append(name)
        elif tuple(shape) != expected[name]:
            raise InputError(f"{file}: tensor {name} has shape {list(shape)}, expected {list(expected[name])}")
    if unclaimed:
        raise InputError(f"{seen[unclaimed[0]]}: {len(unclaimed)} unclaimed tensor(s): {', '.join(unclaimed[:8])}")
    if missing := [name for name in expected if name not in seen]:
        where = next(iter(seen.values()), "checkpoint")
        raise InputError(f"{where}: {len(missing)} missing tensor(s): {', '.join(missing[:8])}")


def write_config(directory: Path, raw: dict) -> None:
    """Write a config.json as published ones are written."""
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
