"""What a checkpoint's config.json says, normalised. Plain Python: both frameworks read it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Something the user passed cannot be used; the message is one line that says what to do.

    The command line prints the message alone and exits with 2.
    """


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that a drafter and a target have alike (Qwen3 layers: QK norm, GQA, SwiGLU)."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A DFlash drafter.

    `target_layer_ids` name target layers by z-lab's convention: id i means the residual stream after layer i,
    which is Hugging Face's `hidden_states[i + 1]` (entry 0 is the embeddings).
    """

    geometry: Geometry
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    dtype: str

    @property
    def hidden_state_indices(self) -> tuple[int, ...]:
        """Indices into the target's hidden states, 0 being the embeddings."""
        return tuple(i + 1 for i in self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """Width of one row of target features: all taps side by side."""
        return len(self.target_layer_ids) * self.target_hidden_size

    @property
    def max_speculative_tokens(self) -> int:
        """Drafts of one block; its first row is the anchor."""
        return self.block_size - 1


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A target language model of the Qwen3 form."""

    geometry: Geometry
    tie_word_embeddings: bool
    eos_token_id: int | None
    dtype: str


class _Keys:
    """A config.json read key by key; every complaint names the file and the key."""

    def __init__(self, raw: dict, source: str):
        self.raw, self.source = raw, source

    def error(self, what: str) -> InputError:
        return InputError(f"{self.source}: {what}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a dotted key; null means the default; no default makes the key obligatory."""
        value = self.raw
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            if default is None:
                raise self.error(f"key {key!r} is missing; add it to the configuration")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"key {key!r} is {value!r}, expected {kind.__name__}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value < 1:
            raise self.error(f"key {key!r} is {value}, expected at least 1")
        return value

    def refuse(self, key: str, allowed: tuple, why: str):
        value = self.raw.get(key)
        if value not in allowed:
            raise self.error(f"key {key!r} is {value!r}: {why}")


def _geometry(keys: _Keys) -> Geometry:
    hidden_size, num_heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    num_kv_heads = keys.positive("num_key_value_heads", num_heads)
    head_dim = keys.positive("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
    if head_dim % 2:
        raise keys.error(f"head_dim={head_dim} is odd; RoPE rotates pairs of channels")
    keys.refuse("hidden_act", (None, "silu"), "only silu is supported")
    keys.refuse("attention_bias", (None, False), "attention biases are not supported")
    keys.refuse("rope_scaling", (None,), "only plain RoPE is supported")
    keys.refuse("quantization_config", (None,), "quantised weights are not supported")
    keys.refuse("use_sliding_window", (None, False), "sliding windows are not supported")
    for kind in keys.raw.get("layer_types") or ():
        if kind != "full_attention":
            raise keys.error(f"key 'layer_types' holds {kind!r}; only full_attention is supported")
    rope = keys.raw.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise keys.error(f"key 'rope_parameters.rope_type' is {rope['rope_type']!r}; only plain RoPE is supported")
    return Geometry(
        hidden_size=hidden_size,
        num_layers=keys.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.positive("intermediate_size"),
        rms_norm_eps=keys.get("rms_norm_eps", float),
        rope_theta=keys.get("rope_parameters.rope_theta" if "rope_theta" in rope else "rope_theta", float),
        vocab_size=keys.positive("vocab_size"),
        max_position_embeddings=keys.positive("max_position_embeddings"),
    )


def parse_draft_config(raw: dict, source: str = "config.json") -> DraftConfig:
    """A drafter's configuration in z-lab's form; `source` names the file in errors. Raises InputError."""
    keys = _Keys(raw, source)
    if "DFlashDraftModel" not in (raw.get("architectures") or ["DFlashDraftModel"]):
        raise keys.error(f"key 'architectures' is {raw['architectures']}; expected DFlashDraftModel")
    geometry = _geometry(keys)
    block_size = keys.get("block_size", int)
    if block_size < 2:
        raise keys.error(f"key 'block_size' is {block_size}; a block is an anchor and at least one draft")
    mask_token_id = keys.get("dflash_config.mask_token_id", int)
    if not 0 <= mask_token_id < geometry.vocab_size:
        raise keys.error(f"mask_token_id={mask_token_id} is outside the vocabulary of {geometry.vocab_size}")
    ids = keys.get("dflash_config.target_layer_ids", list)
    num_target_layers = raw.get("num_target_layers")
    if not ids or any(type(i) is not int or i < 0 for i in ids) or len(set(ids)) < len(ids):
        raise keys.error(f"target_layer_ids={ids}; expected distinct layer numbers from 0")
    if num_target_layers is not None and max(ids) >= num_target_layers:
        raise keys.error(f"target_layer_ids={ids} names a layer past the target's {num_target_layers}")
    for key in ("attention_sink_bias", "sample_from_anchor", "causal"):
        if raw["dflash_config"].get(key):
            raise keys.error(f"key 'dflash_config.{key}' is set, which is not supported")
    keys.refuse("is_causal", (None, False), "causal drafters are not supported")
    return DraftConfig(
        geometry=geometry,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(ids),
        target_hidden_size=keys.positive("target_hidden_size", geometry.hidden_size),
        dtype=keys.get("dtype", str, "bfloat16"),
    )


def parse_target_config(raw: dict, source: str = "config.json") -> TargetConfig:
    """A target's configuration in the published Qwen3 form; `source` names the file in errors. Raises InputError."""
    keys = _Keys(raw, source)
    if raw.get("model_type") != "qwen3":
        raise keys.error(f"key 'model_type' is {raw.get('model_type')!r}; only qwen3 targets are supported")
    return TargetConfig(
        geometry=_geometry(keys),
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
        eos_token_id=raw.get("eos_token_id"),
        dtype=keys.get("dtype", str, "bfloat16"),
    )


def read_json(path: Path) -> dict:
    """A JSON object from a file. Raises InputError naming the file."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def _read_config(directory: Path) -> tuple[dict, str]:
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; pass a folder with config.json and model.safetensors")
    path = directory / "config.json"
    return read_json(path), str(path)


def load_draft_config(directory: str | Path) -> DraftConfig:
    """`parse_draft_config` of a checkpoint folder's config.json."""
    return parse_draft_config(*_read_config(Path(directory)))


def load_target_config(directory: str | Path) -> TargetConfig:
    """`parse_target_config` of a checkpoint folder's config.json."""
    return parse_target_config(*_read_config(Path(directory)))


def check_pair(draft: DraftConfig, target: TargetConfig) -> None:
    """Refuse a drafter that was not made for this target: widths, layers, vocabulary. Raises InputError."""
    if draft.target_hidden_size != target.geometry.hidden_size:
        raise InputError(
            f"the drafter reads target features of width {draft.target_hidden_size}, "
            f"the target's hidden_size is {target.geometry.hidden_size}; pass the pair that belongs together"
        )
    if max(draft.target_layer_ids) >= target.geometry.num_layers:
        raise InputError(
            f"target_layer_ids={list(draft.target_layer_ids)} names a layer past the target's "
            f"{target.geometry.num_layers}; pass the pair that belongs together"
        )
    if draft.geometry.hidden_size != target.geometry.hidden_size:
        raise InputError(
            f"the drafter's hidden_size {draft.geometry.hidden_size} does not fit the target's embedding and LM head "
            f"of width {target.geometry.hidden_size}, which it shares"
        )
    if not 0 <= draft.mask_token_id < target.geometry.vocab_size:
        raise InputError(
            f"mask_token_id={draft.mask_token_id} is outside the target's vocabulary of {target.geometry.vocab_size}"
        )
