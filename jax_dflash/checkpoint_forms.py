"""The published forms of a drafter's config.json, part by part: RoPE, layers, taps, and what no reader here may open.

Three forms, told apart by their keys: `z-lab` (flat, with a `dflash_config`), `speculators` (a `transformer_layer_config`
that holds only differences from transformers' Qwen3Config) and `muse` (model_type muse_glimmer_assistant, all flat).
Plain Python.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from jax_dflash.keys import REQUIRED, InputError, Keys, show

LAYER_KINDS = ("full_attention", "sliding_attention")
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel")
YARN_ATTENTION = ("mscale", "ignore-mscale")
MAX_LAYERS = 1000
NESTED = "transformer_layer_config"

# transformers' Qwen3Config, for keys that a speculators file leaves out.
QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
DEFAULT_THETA = 10000.0  # of transformers' Qwen3Config and LlamaConfig
QWEN3_WINDOW = 4096
QWEN3_MAX_WINDOW_LAYERS = 28

DFLASH2 = "DFlash 2 adds convolutions and a candidate selector, without which it is another function"
# key: the values that leave a drafter what is computed here, and why no other value may pass.
REFUSED: dict[str, tuple[tuple, str]] = {
    "conv_kernel_size": ((), DFLASH2),
    "conv_group_size": ((), DFLASH2),
    "selector_rank": ((), DFLASH2),
    "selector_top_k": ((), DFLASH2),
    "final_logit_softcapping": ((), "a cap on the logits is not supported"),
    "output_multiplier": ((1,), "a multiplier of the output is not supported"),
    "attention_sink_bias": ((False,), "sinks in the softmax are not supported"),
    "add_swa_attention_sink_bias": ((False,), "sinks in the softmax are not supported"),
    "sample_from_anchor": ((False,), "the anchor's row would draft too, which is another layout of a block"),
    "hidden_act": (("silu",), "only silu is supported"),
    "is_neox_style": ((True,), "only RoPE of the half-split layout is supported"),
    "use_aux_hidden_state": ((True,), "a drafter that reads no target layers is not DFlash"),
    "norm_before_fc": ((False,), "a norm before fc is not supported"),
    "norm_before_residual": ((False,), "another residual than Qwen3's is not supported"),
    "quantization_config": ((), "quantised weights are not supported"),
    "compression_config": ((), "quantised weights are not supported"),
}


@dataclass(frozen=True, kw_only=True)
class Rope:
    """One layer's rotation of its first `rotary_dim` channels, half-split; the others pass as they are.

    `default`: frequencies theta^(-2j / rotary_dim). `yarn` (Peng et al. 2023): those, divided by `factor` where they turn
    less than `beta_slow` times in `original_max_position_embeddings` positions, kept where more than `beta_fast` times, and
    a ramp between (its ends rounded to whole channels if `truncate`); cos and sin times `attention_factor`, for q and k
    alike. `attention_rule` says where that number comes from: explicit, mscale (the ratio m(mscale) / m(mscale_all_dim),
    m(s) = 0.1 s ln(factor) + 1), log (m(1)), or none. `llama3` (Llama 3.1's release): as YaRN, divided where a channel turns
    less than `low_freq_factor` times, kept from `high_freq_factor` times on, and a ramp in the number of turns between.
    """

    type: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    attention_factor: float = 1.0
    attention_rule: str = "none"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a layer's queries see, and how they are rotated.

    `window` w: key j is seen from position p iff j > p - w, and if not causal also j < p + w; None: every key.
    """

    window: int | None
    causal: bool
    rope: Rope


def checkpoint_form(keys: Keys) -> str:
    """z-lab, speculators or muse."""
    if any(keys.find(key)[1] is not None for key in (NESTED, "speculators_model_type", "speculators_config")):
        if keys.find(NESTED)[1] is None:
            raise keys.error(f"key {NESTED!r} is missing; it holds the drafter's sizes in the speculators form")
        return "speculators"
    return "muse" if keys.find("model_type")[1] == "muse_glimmer_assistant" else "z-lab"


class FormKeys(Keys):
    """A config.json: where its form keeps a key, and what the form takes for one that is absent. The form of a drafter is
    told by its keys; a target's is "target", all flat."""

    def __init__(self, raw: dict, source: str, form: str | None = None):
        super().__init__(raw, source)
        self.form = form or checkpoint_form(self)

    def places(self, key: str) -> tuple[str, ...]:
        """Where a key of the layers stands."""
        return (f"{NESTED}.{key}", key) if self.form == "speculators" else (key,)

    def outer(self, key: str) -> tuple[str, ...]:
        """Where a key stands that producers also put at the top, which then counts more than a nested one."""
        return self.places(key)[::-1]

    def size(self, key: str, default: Any = REQUIRED, kind: type = int) -> Any:
        """A number more than 0."""
        return self.positive(self.places(key), QWEN3_DEFAULTS[key] if self.form == "speculators" else default, kind)


def refusal(keys: Keys) -> str | None:
    """Why this drafter is not opened, whatever its other keys say, or None. Names the key."""
    _, names = keys.find("architectures")
    if isinstance(names, list) and "DFlash2DraftModel" in names:
        return f"key 'architectures' is {show(names)}: {DFLASH2}"
    if names not in (None, []) and not (isinstance(names, list) and any(name in ARCHITECTURES for name in names)):
        return f"key 'architectures' is {show(names)}; expected {ARCHITECTURES[0]}"
    for path in ("speculators_model_type", "speculators_config.algorithm"):
        if keys.find(path)[1] not in (None, "dflash"):
            return f"key {path!r} is {show(keys.find(path)[1])}, expected 'dflash'"
    path, kind = keys.find(f"{NESTED}.model_type") if NESTED in keys.raw else keys.find("model_type")
    if kind not in (None, "qwen3", "muse_glimmer_assistant"):
        return f"key {path!r} is {show(kind)}; only drafters with Qwen3 layers are supported"
    for key, (allowed, why) in REFUSED.items():
        for place in (f"dflash_config.{key}", key, f"{NESTED}.{key}"):
            _, value = keys.find(place)
            if value is not None and value not in allowed:
                return f"key {place!r} is {show(value)}: {why}"
    return None


def hidden_state_indices(keys: FormKeys) -> tuple[int, ...]:
    """The taps as indices into the target's hidden states, 0 being the embeddings.

    `target_layer_ids` (z-lab) name layers, whose output is hidden state id + 1; speculators'
    `aux_hidden_state_layer_ids` are such indices already. Places that disagree are an error, and so is none.
    """
    shifts = {"dflash_config.target_layer_ids": 1, "target_layer_ids": 1, "aux_hidden_state_layer_ids": 0}
    own = {"z-lab": "dflash_config.target_layer_ids", "speculators": "aux_hidden_state_layer_ids"}
    found: dict[str, tuple[int, ...]] = {}
    for path, shift in shifts.items():
        ids = keys.get(path, list, None)
        if ids is None:
            continue
        if not ids or any(type(i) is not int or not 0 <= i < 2**31 for i in ids) or len(set(ids)) < len(ids):
            raise keys.error(f"key {path!r} is {show(ids)}; expected distinct layer numbers from 0")
        found[path] = tuple(i + shift for i in ids)
        num_target_layers = keys.positive("num_target_layers", None)
        if num_target_layers is not None and max(found[path]) > num_target_layers:
            raise keys.error(f"key {path!r} is {show(ids)}, past the target's {num_target_layers} layers")
    if not found:
        name = own.get(keys.form, "target_layer_ids")
        raise keys.error(f"key {name!r} is missing; which layers a drafter reads is a matter of its training, add them")
    if len(set(found.values())) > 1:
        raise keys.error(f"keys {' and '.join(map(repr, found))} name different hidden states: {show(found)}")
    return next(iter(found.values()))


def block_size(keys: Keys) -> int:
    """Rows of a block, the anchor's included. Places that disagree are an error."""
    paths = ("block_size", "dflash_config.block_size", f"{NESTED}.block_size")
    value, (first, _) = keys.get(paths, int), keys.find(*paths)
    for path in paths:
        if (other := keys.get(path, int, value)) != value:
            raise keys.error(f"key {path!r} is {other}, key {first!r} is {value}; they must agree")
    if value < 2:
        raise keys.error(f"key {first!r} is {value}; a block is an anchor and at least one draft")
    return value


def mask_token_id(keys: Keys, vocab_size: int | None) -> int:
    """The id that stands for a token to draft; `dflash_config` counts more than the top level, as in vLLM."""
    value = keys.get(("dflash_config.mask_token_id", "mask_token_id"), int)
    if value < 0 or (vocab_size is not None and value >= vocab_size):
        raise keys.error(f"mask_token_id={value} is outside the vocabulary of {vocab_size or 'any target'}")
    return value


def layers(
    keys: FormKeys, *, num_layers: int, head_dim: int, max_positions: int, yarn_attention: str
) -> tuple[Layer, ...]:
    """Window, causality and RoPE of every layer."""
    if yarn_attention not in YARN_ATTENTION:
        raise InputError(f"yarn_attention={yarn_attention!r}; pass one of {', '.join(YARN_ATTENTION)}")
    listed = _listed_kinds(keys, num_layers)
    kinds = _kinds(keys, listed, num_layers)
    window = _window(keys) if "sliding_attention" in kinds else None
    causal = _causality(keys, listed, kinds)
    ropes = {kind: _rope(keys, kind, head_dim, max_positions, yarn_attention) for kind in dict.fromkeys(kinds)}
    return tuple(
        Layer(window=window if kind == "sliding_attention" else None, causal=c, rope=ropes[kind])
        for kind, c in zip(kinds, causal, strict=True)
    )


def _listed_kinds(keys: FormKeys, num_layers: int) -> list[str] | None:
    path, _ = keys.find(*keys.outer("layer_types"))
    kinds = keys.get(path, list, None)
    if kinds is None:
        return None
    if len(kinds) != num_layers:
        raise keys.error(f"key {path!r} lists {len(kinds)} layers, num_hidden_layers is {num_layers}")
    if unknown := [kind for kind in kinds if kind not in LAYER_KINDS]:
        raise keys.error(f"key {path!r} holds {show(unknown[0])}; expected one of {', '.join(LAYER_KINDS)}")
    return kinds


def _kinds(keys: FormKeys, listed: list[str] | None, num_layers: int) -> list[str]:
    """Each layer's kind: `use_swa` slides all of them unless some are listed as sliding. Without a list, Qwen3Config's
    rule: with `use_sliding_window`, those from `max_window_layers` on."""
    if keys.get("dflash_config.use_swa", bool, False) and "sliding_attention" not in (listed or ()):
        return ["sliding_attention"] * num_layers
    if listed is not None:
        return listed
    if not keys.get(keys.outer("use_sliding_window"), bool, False):
        return ["full_attention"] * num_layers
    first = keys.get(keys.outer("max_window_layers"), int, QWEN3_MAX_WINDOW_LAYERS)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


def _window(keys: FormKeys) -> int:
    places = keys.outer("sliding_window")
    nested = keys.raw.get(NESTED)
    absent = isinstance(nested, dict) and "sliding_window" not in nested and "sliding_window" not in keys.raw
    default = QWEN3_WINDOW if keys.form == "speculators" and absent else REQUIRED
    value = keys.positive("dflash_config.swa_window_size", None)
    return keys.positive(places, default) if value is None else value


def _causality(keys: FormKeys, listed: list[str] | None, kinds: list[str]) -> list[bool]:
    """An explicit value holds for all layers. Without one: sliding layers are causal by z-lab's rule, not by speculators'
    (unless `sliding_window_non_causal` is false), none in Muse's form, and none where layers slide by `use_swa` alone."""
    explicit = keys.get(("is_causal", "dflash_config.causal"), bool, None)
    if explicit is not None:
        return [explicit] * len(kinds)
    if keys.get(keys.outer("sliding_window_non_causal"), bool, keys.form != "z-lab"):
        return [False] * len(kinds)
    by_use_swa = keys.get("dflash_config.use_swa", bool, False)
    return [kind == "sliding_attention" for kind in listed or ([""] * len(kinds) if by_use_swa else kinds)]


def target_rope(keys: FormKeys, head_dim: int, max_positions: int) -> Rope:
    """The RoPE of a target: default, yarn or llama3. A Llama file from before `rope_theta` means LlamaConfig's 10000."""
    return _rope(keys, "full_attention", head_dim, max_positions, "mscale")


def _default_theta(keys: FormKeys) -> Any:
    old_llama = keys.form == "target" and keys.find("model_type")[1] == "llama"
    return DEFAULT_THETA if keys.form == "speculators" or old_llama else REQUIRED


def _rope(keys: FormKeys, kind: str, head_dim: int, max_positions: int, yarn_attention: str) -> Rope:
    """The RoPE of layers of a kind: `rope_parameters` or `rope_scaling`, flat or per layer type; theta in there, else the
    flat `rope_theta`. Without any: Qwen3's default in the speculators form, an error in the others."""
    parts = [
        _rope_part(keys, path, kind)
        for key in ("rope_parameters", "rope_scaling")
        for path in keys.places(key)
        if keys.find(path)[1] is not None
    ]

    def number(key: str, default: Any) -> float:
        flat = keys.places(key)
        path, value = keys.find(*(f"{part}.{key}" for part in parts), *flat)
        return keys.positive(flat if value is None else path, default, float)

    theta = number("rope_theta", _default_theta(keys))
    partial = number("partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * partial) if partial <= 1 else 0
    if rotary_dim < 2 or rotary_dim % 2:
        raise keys.error(
            f"partial_rotary_factor={partial} of head_dim={head_dim} is not a whole number of channel pairs"
        )
    plain = Rope(type="default", theta=theta, rotary_dim=rotary_dim)
    ropes = {path: _scaled(keys, path, plain, max_positions, yarn_attention) for path in parts}
    if len(set(ropes.values())) > 1:
        raise keys.error(f"keys {' and '.join(map(repr, ropes))} ask for different RoPE; leave one of them")
    return next(iter(ropes.values()), plain)


def _rope_part(keys: Keys, path: str, kind: str) -> str:
    """Where a RoPE object keeps what holds for layers of a kind."""
    value = keys.get(path, dict)
    if any(name in value for name in LAYER_KINDS):
        keys.get(f"{path}.{kind}", dict)
        return f"{path}.{kind}"
    return path


def _scaled(keys: FormKeys, path: str, plain: Rope, max_positions: int, yarn_attention: str) -> Rope:
    name, rope_type = keys.find(f"{path}.rope_type", f"{path}.type")
    if rope_type in (None, "default"):
        return plain
    if rope_type == "llama3" and keys.form == "target":
        return _llama3(keys, path, plain)
    if rope_type != "yarn":
        expected = "default, yarn or llama3" if keys.form == "target" else "default or yarn"
        raise keys.error(f"key {name!r} is {show(rope_type)}; expected {expected}")
    if plain.theta <= 1:
        raise keys.error(f"rope_theta={plain.theta} of key {path!r}; YaRN needs more than 1")
    factor = keys.positive(f"{path}.factor", kind=float)
    rule, attention_factor = _yarn_attention(keys, path, factor, yarn_attention)
    return replace(
        plain,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=keys.positive(f"{path}.original_max_position_embeddings", max_positions),
        attention_factor=attention_factor,
        attention_rule=rule,
        beta_fast=keys.positive(f"{path}.beta_fast", 32.0, float),
        beta_slow=keys.positive(f"{path}.beta_slow", 1.0, float),
        truncate=keys.get(f"{path}.truncate", bool, True),
    )


def _llama3(keys: Keys, path: str, plain: Rope) -> Rope:
    low, high = (keys.positive(f"{path}.{name}_freq_factor", kind=float) for name in ("low", "high"))
    if high <= low:
        raise keys.error(f"key {path + '.high_freq_factor'!r} is {high}; expected more than low_freq_factor={low}")
    return replace(
        plain,
        type="llama3",
        factor=keys.positive(f"{path}.factor", kind=float),
        original_max_position_embeddings=keys.positive(f"{path}.original_max_position_embeddings"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_attention(keys: Keys, path: str, factor: float, option: str) -> tuple[str, float]:
    """Where YaRN's factor of cos and sin comes from, and its value; as transformers and DeepSeek's code compute it."""
    explicit = keys.positive(f"{path}.attention_factor", None, float)
    if explicit is not None:
        return "explicit", explicit

    def m(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = (keys.positive(f"{path}.{name}", None, float) for name in ("mscale", "mscale_all_dim"))
    if mscale is not None and all_dim is not None and option == "mscale":
        return "mscale", m(mscale) / m(all_dim)
    return "log", m(1.0)
