"""convert: a drafter written again in z-lab's or the speculators form. What is written reads back as the same record and the
same bits, or nothing is written. Neither JAX nor PyTorch is loaded, but for a `mask_embedding.pt`."""

import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by name only after this
import numpy as np
from safetensors.numpy import save_file

from jax_dflash.checkpoint_forms import NESTED, Rope
from jax_dflash.config import DraftConfig, load_draft_config, parse_draft_config
from jax_dflash.keys import InputError, read_json
from jax_dflash.mask_embedding import MASK_EMBEDDING, MASK_FILES
from jax_dflash.names import match_draft, write_config
from jax_dflash.stored import read_tensors

FORMATS = ("z-lab", "speculators")
MSCALE = ("mscale", "mscale_all_dim")


def _rope(rope: Rope, head_dim: int, mscales: dict[str, float]) -> dict[str, Any]:
    """One RoPE object; `mscales` are what the record's attention factor came from."""
    raw: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.rotary_dim != head_dim:
        raw["partial_rotary_factor"] = rope.rotary_dim / head_dim
    if rope.type == "yarn":
        names = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
        raw |= {name: getattr(rope, name) for name in names}
        raw |= {"explicit": {"attention_factor": rope.attention_factor}, "mscale": mscales}.get(rope.attention_rule, {})
    return raw


def _mscales(raw: Any) -> dict[str, float]:
    """YaRN's mscale keys, wherever a configuration has its RoPE object."""
    if not isinstance(raw, dict):
        return {}
    if all(raw.get(name) is not None for name in MSCALE):
        return {name: raw[name] for name in MSCALE}
    return next((found for value in raw.values() if (found := _mscales(value))), {})


def _qwen3(config: DraftConfig, source: dict) -> dict[str, Any]:
    """The keys of the layers, all of them written out."""
    g = config.geometry
    sizes = {
        "model_type": "qwen3", "hidden_act": "silu", "hidden_size": g.hidden_size, "num_hidden_layers": g.num_layers,
        "num_attention_heads": g.num_heads, "num_key_value_heads": g.num_kv_heads, "head_dim": g.head_dim,
        "intermediate_size": g.intermediate_size, "rms_norm_eps": g.rms_norm_eps, "attention_bias": g.attention_bias,
        "max_position_embeddings": g.max_position_embeddings,
    }  # fmt: skip
    kinds = ["full_attention" if layer.window is None else "sliding_attention" for layer in config.layers]
    ropes = {kind: layer.rope for kind, layer in zip(kinds, config.layers, strict=True)}
    written = {kind: _rope(rope, g.head_dim, _mscales(source)) for kind, rope in ropes.items()}
    same = len(set(ropes.values())) == 1
    windows = {layer.window for layer in config.layers} - {None}
    if g.vocab_size is not None:
        sizes["vocab_size"] = g.vocab_size
    return sizes | {
        "layer_types": kinds,
        "sliding_window": next(iter(windows), None),
        "use_sliding_window": bool(windows),
        "rope_parameters": next(iter(written.values())) if same else written,
    }


def form_config(config: DraftConfig, form: str, source: dict) -> dict[str, Any]:
    """The config.json of a record in a form; `source` is the one it was read from. Raises InputError for a form that is
    none, or that cannot hold this drafter."""
    if form not in FORMATS:
        raise InputError(f"--format {form!r}: pass one of {', '.join(FORMATS)}")
    causal = {layer.causal for layer in config.layers}
    outer: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "block_size": config.block_size, "dtype": config.dtype,
        "target_hidden_size": config.target_hidden_size, "logit_scale": config.logit_scale,
        "embed_scale": config.embedding_scale,
    }  # fmt: skip
    if config.draft_vocab_size is not None:
        outer["draft_vocab_size"] = config.draft_vocab_size
    if len(causal) == 1:
        outer["is_causal"] = next(iter(causal))
    if source.get("num_target_layers") is not None:
        outer["num_target_layers"] = source["num_target_layers"]
    layers = _qwen3(config, source)
    if form == "z-lab":
        dflash = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
        raw = {**layers, **outer, "dflash_config": dflash}
    else:
        raw = {
            **outer, "speculators_model_type": "dflash", "mask_token_id": config.mask_token_id,
            "aux_hidden_state_layer_ids": list(config.hidden_state_indices), "sliding_window_non_causal": len(causal) == 1,
            "speculators_config": {"algorithm": "dflash", "default_proposal_method": "greedy"}, NESTED: layers,
        }  # fmt: skip
    _check_same(config, raw, form)
    return raw


def _check_same(config: DraftConfig, raw: dict, form: str) -> None:
    try:
        read = replace(parse_draft_config(raw), format=config.format)
    except InputError as error:
        raise InputError(f"the {form} form cannot hold this drafter ({error})") from None
    for field in fields(DraftConfig):
        ours, theirs = getattr(config, field.name), getattr(read, field.name)
        if ours != theirs:
            raise InputError(
                f"the {form} form cannot hold this drafter: its {field.name} would read as {theirs}, not {ours}"
            )


def convert(source: Path, target: Path, form: str) -> dict[str, Any]:
    """Write the drafter in folder `source` to the new folder `target`. Raises InputError; then there is no target."""
    if target.exists():
        raise InputError(f"{target}: there is something already; pass a new folder")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent}: no such directory; pass a new folder in one that exists")
    config = load_draft_config(source)
    raw = form_config(config, form, read_json(source / "config.json"))
    sources = match_draft(source, config).checked()
    values = read_tensors(sources, lambda data, kind, shape: data.view(np.dtype(kind)).reshape(shape))
    weights = {name: value for name, value in values.items() if name != MASK_EMBEDDING}
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        write_config(partial, raw)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        if MASK_EMBEDDING in values:
            named = {"format": "pt", "mask_token_id": str(config.mask_token_id)}
            save_file({"embedding": values[MASK_EMBEDDING]}, partial / MASK_FILES[0], metadata=named)
        match_draft(partial, load_draft_config(partial)).checked()
        os.replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {
        "job": "convert", "ok": True, "source": str(source), "target": str(target), "from": config.format, "format": form,
        "num_tensors": len(values), "num_bytes": sum(value.nbytes for value in values.values()),
    }  # fmt: skip
