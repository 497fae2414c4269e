"""Small configurations and checkpoints in every published form: the published keys, other widths, seeded tensors."""

import copy
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jax_dflash import cli
from jax_dflash.config import DraftConfig, parse_draft_config
from jax_dflash.names import draft_tensors, vocabulary_tensors
from parity_tests.tiny import random_values

CONFIGS = {path.stem: json.loads(path.read_text()) for path in sorted((cli.ASSETS / "configs").glob("*.json"))}
REFUSED = "muse-glimmer-30b-dflash2-refuse"
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip


def merged(raw: dict, changes: dict) -> dict:
    """`raw` with changes; an object is merged key by key, `...` deletes a key."""
    raw = copy.deepcopy(raw)
    for key, value in changes.items():
        if value is ...:
            raw.pop(key, None)
        elif isinstance(value, dict) and isinstance(raw.get(key), dict):
            raw[key] = merged(raw[key], value)
        else:
            raw[key] = value
    return raw


def zlab(**changes) -> dict:
    """z-lab's form: block size at the top, mask and taps in dflash_config."""
    raw = SIZES | {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
        "rope_theta": 1e6, "rope_scaling": None, "block_size": 16, "dtype": "bfloat16", "num_target_layers": 20,
        "layer_types": ["full_attention"] * 3, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3]},
    }  # fmt: skip
    return merged(raw, changes)


def speculators(**changes) -> dict:
    """The speculators form; `nested` are changes of transformer_layer_config."""
    nested = changes.pop("nested", {})
    raw = {
        "architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 16, "draft_vocab_size": 12, "mask_token_id": 5, "target_hidden_size": None, "dtype": "bfloat16",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": SIZES | {
            "model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
    }  # fmt: skip
    return merged(merged(raw, changes), {"transformer_layer_config": nested})


def muse(**changes) -> dict:
    """Muse's form: everything at the top, no vocabulary."""
    raw = {key: value for key, value in SIZES.items() if key != "vocab_size"} | {
        "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant", "block_size": 16,
        "mask_token_id": 5, "target_layer_ids": [1, 3], "layer_types": ["sliding_attention"] * 3, "sliding_window": 7,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "dtype": "bfloat16",
    }  # fmt: skip
    return merged(raw, changes)


def shrunk(raw: dict) -> dict:
    """A published configuration with every key it has and a sixteenth (at least) of its widths."""
    raw = copy.deepcopy(raw)
    inner = raw.get("transformer_layer_config", raw)
    for key, divisor in (("hidden_size", 64), ("intermediate_size", 128), ("head_dim", 16)):
        inner[key] //= divisor
    if "vocab_size" in inner:
        inner["vocab_size"] = 64
    if raw.get("draft_vocab_size"):
        raw["draft_vocab_size"] = 24
    (raw if "mask_token_id" in raw else raw["dflash_config"])["mask_token_id"] = 63
    return raw


def tensors(raw: dict, seed: int = 0, own: bool = False) -> dict[str, np.ndarray]:
    """A checkpoint's tensors under canonical names, bfloat16; with tables of its own where it must have them, or `own`."""
    config = parse_draft_config(raw)
    required, optional = vocabulary_tensors(config)
    tables = required | (optional if own or required else {})
    d2t = tables.pop("d2t", None)
    values = random_values(draft_tensors(config) | tables, seed)
    values = {name: value.astype(ml_dtypes.bfloat16) for name, value in values.items()}
    if d2t is not None:
        values["d2t"] = offsets(config, seed)
    return values


def offsets(config: DraftConfig, seed: int = 0) -> np.ndarray:
    """A map of a reduced vocabulary."""
    rows = config.draft_vocab_size
    return np.sort(np.random.default_rng(seed).permutation(config.geometry.vocab_size)[:rows]) - np.arange(rows)


def write(folder: Path, raw: dict, values: dict[str, np.ndarray] | None) -> Path:
    """A checkpoint folder, or one with a config.json only."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if values is not None:
        values = {name: np.ascontiguousarray(value) for name, value in values.items()}
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
