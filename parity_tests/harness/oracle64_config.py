"""The published forms of a DFlash config.json as one Model for `oracle64`, from the specification alone.

Three forms: z-lab (flat, `dflash_config` nested), speculators (`transformer_layer_config` nested), Muse (all flat).
What this file does not know to be harmless or computed is refused by name. Cases in brackets are those of the cases file.
"""

import math
from typing import Any, NamedTuple

import numpy as np

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
REQUIRED = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads rms_norm_eps".split()
# What a key that a speculators file leaves out means: transformers' Qwen3Config. It has no window.
QWEN3_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
# Keys that may only say what is computed here.
ONLY = {
    "hidden_act": ("silu", None),
    "hidden_activation": ("silu", None),
    "mlp_bias": (False, None),
    "is_neox_style": (True, None),
    "rope_local_base_freq": (None,),
    "use_aux_hidden_state": (True, None),
    "eagle_config": (None,),
    "sample_from_anchor": (False, None),
    "attention_sink_bias": (False, None),
    "add_swa_attention_sink_bias": (False, None),
    "final_logit_softcapping": (None,),
    "output_multiplier": (None, 1.0),
    "quantization_config": (None,),
}
NESTED_KEYS = (
    "block_size mask_token_id target_layer_ids layer_ids causal use_swa swa_window_size sample_from_anchor "
    "attention_sink_bias input_embedding_scale"
).split()
TAPS = (  # spelling, whether inside dflash_config, what takes its ids to indices of hidden_states [C01, C03]
    ("eagle_aux_hidden_state_layer_ids", False, 0),
    ("target_layer_ids", True, 1),
    ("target_layer_ids", False, 1),
    ("layer_ids", True, 0),
    ("aux_hidden_state_layer_ids", False, 0),
)
YARN_ATTENTION = ("mscale", "ignore-mscale")
EMBEDDING_SCALES = "embed_scale embedding_scale input_embedding_scale".split()
ROPE_KEYS = {
    "default": {"rope_type", "rope_theta", "partial_rotary_factor"},
    "yarn": {"rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"},
}


class Rope(NamedTuple):
    """A rotary embedding; channels past 2 * len(inv_freq) pass through as they are."""

    inv_freq: np.ndarray  # [rotary_dim / 2] radians per position
    scale: float = 1.0  # multiplies cos and sin


class Layer(NamedTuple):
    """What a layer does that its weights do not say."""

    causal: bool
    window: int | None  # keys up to window - 1 positions away are seen
    rope: Rope


class Model(NamedTuple):
    """What the configuration decides beyond the shapes of the weights."""

    layers: list[Layer]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    mask_token_id: int
    taps: list[int]  # indices into hidden_states
    attention_bias: bool
    target_hidden_size: int | None  # None: as fc says
    vocab_size: int | None  # the target's; None: as embed_tokens says
    draft_vocab_size: int | None
    logit_scale: float
    embedding_scale: float


def present(table: dict[str, Any]) -> dict[str, Any]:
    """The keys that are not null: null means the default everywhere in these files."""
    return {key: value for key, value in table.items() if value is not None}


def flatten(config) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Config of any form as (flat keys, those of dflash_config, whether it is a speculators file)."""
    flat, nested = present(config), present(config.get("dflash_config") or {})
    speculators = "transformer_layer_config" in flat or "speculators_model_type" in flat
    if speculators:
        inner = present(flat.get("transformer_layer_config") or {})
        for table, key, value in ((flat, "speculators_model_type", "dflash"), (inner, "model_type", "qwen3")):
            if table.get(key, value) != value:
                raise ValueError(f"{key}={table[key]!r} is not supported, expected {value!r}")
        flat = QWEN3_DEFAULTS | inner | flat  # some producers put layer keys at the top, beside a nested null
    elif "sliding_window_non_causal" in flat:
        raise ValueError("sliding_window_non_causal is a key of speculators files only")
    return flat, nested, speculators


def check_supported(flat, nested):
    """ValueError names a key that is missing or asks for what is not computed here."""
    for key in REQUIRED:
        if key not in flat:
            raise ValueError(f"config has no {key}")
    for at, table in (("", flat), ("dflash_config.", nested)):
        for key, values in ONLY.items():
            if table.get(key, values[0]) not in values:
                raise ValueError(f"{at}{key}={table[key]!r} is not supported, expected {values[0]!r}")
    if unknown := sorted(set(nested) - set(NESTED_KEYS)):
        raise ValueError(f"dflash_config.{unknown[0]}={nested[unknown[0]]!r} is not supported")


def read_taps(flat, nested) -> list[int]:
    """Indices into hidden_states; spellings that disagree are refused, and no list is ever guessed [C04]."""
    found = {}
    for key, inside, shift in TAPS:
        ids = (nested if inside else flat).get(key)
        if not ids:
            continue
        if len(set(ids)) < len(ids) or min(ids) < 0:
            raise ValueError(f"{key}={ids} must be distinct and not negative")
        found[f"dflash_config.{key}" if inside else key] = [i + shift for i in ids]
    if not found:
        raise ValueError("config has no dflash_config.target_layer_ids")
    if any(taps != next(iter(found.values())) for taps in found.values()):
        raise ValueError(f"taps disagree, as indices of hidden_states: {found}")
    return next(iter(found.values()))


def read_windows(flat, nested, num_layers) -> list[int | None]:
    """The window of each layer, None where it sees everything."""
    types = flat.get("layer_types")
    if types is not None and (len(types) != num_layers or not set(types) <= set(LAYER_TYPES)):
        raise ValueError(f"layer_types={types} is not one of {', '.join(LAYER_TYPES)} for each of {num_layers} layers")
    if nested.get("use_swa") and SLIDING not in (types or ()):
        types = [SLIDING] * num_layers
    if types is None and flat.get("use_sliding_window"):
        raise ValueError("use_sliding_window without layer_types does not say which layers slide")
    types = types or [FULL] * num_layers
    if SLIDING not in types:
        return [None] * num_layers
    window = nested.get("swa_window_size", flat.get("sliding_window"))
    if window is None or window < 1:
        raise ValueError(f"sliding layers need a sliding_window of at least 1, got {window}")
    if flat.get("use_sliding_window") is False and not nested.get("use_swa"):
        raise ValueError(f"use_sliding_window=False contradicts layer_types={types}")
    return [window if kind == SLIDING else None for kind in types]


def read_causality(flat, nested, speculators, num_layers) -> list[bool]:
    """Whether each layer is causal [C33]. The legacy rule goes by layer_types: layers that only use_swa slides are not."""
    legacy = [kind == SLIDING for kind in flat.get("layer_types") or [FULL] * num_layers]
    explicit = flat.get("is_causal", nested.get("causal"))
    if speculators:
        rule = legacy if flat.get("sliding_window_non_causal") is False else [False] * num_layers
        if explicit is not None and rule != [explicit] * num_layers:
            raise ValueError(f"is_causal={explicit} contradicts sliding_window_non_causal, which gives {rule}")
        return rule
    if explicit is None and flat.get("model_type") == "muse_glimmer_assistant":
        explicit = False
    return legacy if explicit is None else [explicit] * num_layers


def rope_section(flat, key, layer_type) -> dict[str, Any]:
    """rope_parameters or rope_scaling; where it is split by layer type, that type's part [C25]."""
    section = present(flat.get(key) or {})
    if set(section) & set(LAYER_TYPES):
        if layer_type not in section or set(section) - set(LAYER_TYPES):
            raise ValueError(f"{key} has {sorted(section)}: {layer_type} is missing or others stand beside it")
        section = present(section[layer_type])
    if "type" in section:  # the older spelling
        section.setdefault("rope_type", section["type"])
        del section["type"]
    return section


def read_rope(flat, layer_type, head_dim, yarn_attention) -> Rope:
    """The rotary embedding of one layer type: rope_parameters before rope_scaling before the flat rope_theta [C24]."""
    scaling, parameters = (rope_section(flat, key, layer_type) for key in ("rope_scaling", "rope_parameters"))
    for key in (set(scaling) & set(parameters)) - {"rope_theta"}:
        if scaling[key] != parameters[key]:
            raise ValueError(
                f"rope_scaling and rope_parameters disagree about {key}: {scaling[key]}, {parameters[key]}"
            )
    rope = scaling | parameters
    theta = rope.get("rope_theta", flat.get("rope_theta"))
    if theta is None:
        raise ValueError("config has no rope_theta, neither flat nor in rope_parameters or rope_scaling")
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KEYS:
        raise ValueError(f"rope_type={kind!r} is not supported, expected one of {', '.join(ROPE_KEYS)}")
    if unknown := sorted(set(rope) - ROPE_KEYS[kind]):
        raise ValueError(f"{unknown[0]}={rope[unknown[0]]!r} is not supported for rope_type={kind!r}")
    factor = rope.get("partial_rotary_factor", flat.get("partial_rotary_factor", 1.0))
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(f"partial_rotary_factor={factor} of head_dim={head_dim} is not an even number of channels")
    if kind == "yarn":
        return Rope(yarn_inv_freq(rope, theta, rotary_dim), yarn_scale(rope, yarn_attention))
    return Rope(inv_freq(theta, rotary_dim))


def inv_freq(theta, rotary_dim):
    """theta^(-2j / rotary_dim) of pair j."""
    half = rotary_dim // 2
    return theta ** (-np.arange(half) / half)


def yarn_inv_freq(rope, theta, rotary_dim):
    """Fast pairs as they are, slow ones divided by factor, a ramp over the pair's index between [YaRN, arXiv:2309.00071].

    The ramp's ends are the pairs that turn beta_fast and beta_slow times over the original context, rounded outwards
    unless `truncate` is false.
    """
    for key in ("factor", "original_max_position_embeddings"):
        if key not in rope:
            raise ValueError(f"rope_type='yarn' has no {key}")
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    if factor < 1:
        raise ValueError(f"factor={factor} of rope_type='yarn' must be at least 1")
    low, high = (
        rotary_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))
        for rotations in (rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0))
    )
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low > high:
        raise ValueError(f"original_max_position_embeddings={original} leaves rope_type='yarn' a ramp {low}..{high}")
    plain = inv_freq(theta, rotary_dim)
    ramp = np.clip((np.arange(rotary_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp


def yarn_scale(rope, yarn_attention="mscale") -> float:
    """What multiplies cos and sin, so that scores grow by its square [C22]; servers differ about the mscale keys."""
    if "attention_factor" in rope:
        return rope["attention_factor"]
    log = math.log(rope["factor"])
    if yarn_attention == "ignore-mscale" or ("mscale" not in rope and "mscale_all_dim" not in rope):
        return 0.1 * log + 1
    above, below = rope.get("mscale", 0), rope.get("mscale_all_dim", 0)
    if above <= 0 or below <= 0:
        raise ValueError(f"mscale={above} and mscale_all_dim={below} must both be given and positive")
    return (0.1 * above * log + 1) / (0.1 * below * log + 1)


def read_embedding_scale(flat, nested) -> float:
    """What multiplies embedding rows; keys that disagree are refused."""
    found = {key: flat[key] for key in EMBEDDING_SCALES if key in flat}
    if "input_embedding_scale" in nested:
        found["dflash_config.input_embedding_scale"] = nested["input_embedding_scale"]
    if len(set(found.values())) > 1:
        raise ValueError(f"embedding scales disagree: {found}")
    return next(iter(found.values()), 1.0)


def read_config(config, yarn_attention="mscale") -> Model:
    """A config.json of any published form as a Model; ValueError names the key at fault.

    With yarn_attention="ignore-mscale" YaRN's mscale and mscale_all_dim count as absent.
    """
    if yarn_attention not in YARN_ATTENTION:
        raise ValueError(f"yarn_attention={yarn_attention!r}, expected one of {', '.join(YARN_ATTENTION)}")
    flat, nested, speculators = flatten(config)
    check_supported(flat, nested)
    mask_token_id = nested.get("mask_token_id", flat.get("mask_token_id"))  # nested wins [C09]
    if mask_token_id is None:
        raise ValueError("config has no dflash_config.mask_token_id")
    attention_bias = flat.get("attention_bias", False)
    if attention_bias not in (True, False):
        raise ValueError(f"attention_bias={attention_bias!r} is not supported, expected true or false")
    heads, kv_heads = flat["num_attention_heads"], flat["num_key_value_heads"]
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads={kv_heads} does not divide num_attention_heads={heads}")
    head_dim = flat.get("head_dim", flat["hidden_size"] // heads)
    windows = read_windows(flat, nested, flat["num_hidden_layers"])
    causality = read_causality(flat, nested, speculators, flat["num_hidden_layers"])
    types = [FULL if window is None else SLIDING for window in windows]
    ropes = {kind: read_rope(flat, kind, head_dim, yarn_attention) for kind in set(types)}
    return Model(
        layers=[Layer(*of, ropes[kind]) for *of, kind in zip(causality, windows, types, strict=True)],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=flat["rms_norm_eps"],
        mask_token_id=mask_token_id,
        taps=read_taps(flat, nested),
        attention_bias=attention_bias,
        target_hidden_size=flat.get("target_hidden_size"),
        vocab_size=flat.get("vocab_size"),
        draft_vocab_size=flat.get("draft_vocab_size"),
        logit_scale=flat.get("logit_scale", 1.0),
        embedding_scale=read_embedding_scale(flat, nested),
    )
