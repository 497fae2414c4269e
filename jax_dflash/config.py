"""What a checkpoint's config.json says, normalised. Plain Python: both frameworks read it.

`checkpoint_forms.py` reads the parts that published forms spell differently.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from jax_dflash import checkpoint_forms as forms
from jax_dflash.checkpoint_forms import FormKeys, Layer, Rope
from jax_dflash.keys import InputError, Keys, read_json, show

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that a drafter and a target have alike (pre-norm layers: GQA, SwiGLU).

    `qk_norm`: an RMS norm over each head of q and k, as in Qwen3. `attention_bias`: biases of q, k, v and, unless
    `output_bias` is false, of o. `rope_theta` is a target's. A drafter's stands in each of its `layers`; here is the
    first one's.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int | None
    max_position_embeddings: int
    attention_bias: bool = False
    output_bias: bool = True
    qk_norm: bool = True

    @property
    def biased(self) -> str:
        """The attention projections that have a bias, as letters of "qkvo"."""
        return ("qkvo" if self.output_bias else "qkv") if self.attention_bias else ""


class PageGroup(NamedTuple):
    """Layers that keep the same keys, and so share pages: those of one window (None: all keys), by index."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A DFlash drafter, whichever form its file has (`format`: z-lab, speculators or muse).

    `hidden_state_indices` are what it reads of the target: i means the residual stream after i layers, 0 the embeddings
    (Hugging Face's `hidden_states[i]`). `geometry.vocab_size` is the file's, or None, until `check_pair` puts
    the target's there. `draft_vocab_size`: rows of its own LM head where they are fewer than the vocabulary, else None.
    Embedding rows are multiplied by `embedding_scale`, logits by `logit_scale`.
    """

    geometry: Geometry
    layers: tuple[Layer, ...]
    block_size: int
    mask_token_id: int
    hidden_state_indices: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int | None = None
    logit_scale: float = 1.0
    embedding_scale: float = 1.0
    dtype: str
    format: str = "z-lab"

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        """The target layers whose outputs are read, by z-lab's convention: -1 for the embeddings."""
        return tuple(i - 1 for i in self.hidden_state_indices)

    @property
    def feature_size(self) -> int:
        """Width of one row of target features: all taps side by side."""
        return len(self.hidden_state_indices) * self.target_hidden_size

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The layers by window, in order of first appearance. Nearly every drafter has one group."""
        windows = [layer.window for layer in self.layers]
        return tuple(
            PageGroup(window, tuple(i for i, other in enumerate(windows) if other == window))
            for window in dict.fromkeys(windows)
        )

    @property
    def layer_places(self) -> tuple[tuple[int, int], ...]:
        """(page group, index in it) of each layer."""
        places = {i: (g, at) for g, group in enumerate(self.page_groups) for at, i in enumerate(group.layers)}
        return tuple(places[i] for i in range(len(self.layers)))

    @property
    def max_speculative_tokens(self) -> int:
        """Drafts of one block; its first row is the anchor."""
        return self.block_size - 1


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """A target language model of the Qwen3, Qwen2 or Llama form.

    `eos_token_ids` are all that the file names; any of them ends a text. `scaled_rope` is its RoPE where that is not plain.
    """

    geometry: Geometry
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    dtype: str
    scaled_rope: Rope | None = None

    @property
    def vocab_size(self) -> int:
        """`geometry.vocab_size`, which every target has."""
        assert self.geometry.vocab_size is not None
        return self.geometry.vocab_size

    @property
    def rope(self) -> Rope:
        """The rotation of every layer."""
        return self.scaled_rope or plain_rope(self.geometry)

    @property
    def max_positions(self) -> int:
        """What it is made for: the file's `max_position_embeddings`, or as far as YaRN stretches the original ones."""
        positions, original = self.geometry.max_position_embeddings, self.rope.original_max_position_embeddings
        if self.rope.type != "yarn" or original is None:
            return positions
        return max(positions, int(self.rope.factor * original))


def plain_rope(geometry: Geometry) -> Rope:
    """Unscaled RoPE of all channels by `geometry.rope_theta`: most targets'."""
    return Rope(type="default", theta=geometry.rope_theta, rotary_dim=geometry.head_dim)


def plain_layers(geometry: Geometry) -> tuple[Layer, ...]:
    """Layers with full bidirectional attention and plain RoPE of `geometry.rope_theta`: Qwen3-era drafters."""
    return (Layer(window=None, causal=False, rope=plain_rope(geometry)),) * geometry.num_layers


def _checked_geometry(keys: Keys, geometry: Geometry) -> Geometry:
    g = geometry
    if g.num_layers > forms.MAX_LAYERS:
        raise keys.error(f"num_hidden_layers={g.num_layers}; expected at most {forms.MAX_LAYERS}")
    if g.num_heads % g.num_kv_heads:
        raise keys.error(f"num_attention_heads={g.num_heads} is not a multiple of num_key_value_heads={g.num_kv_heads}")
    if g.head_dim % 2:
        raise keys.error(f"head_dim={g.head_dim} is odd; RoPE rotates pairs of channels")
    return geometry


def _head_dim(keys: Keys, hidden_size: int, num_heads: int) -> int:
    """Where a file has no head_dim."""
    if keys.find("head_dim")[1] is None and hidden_size % num_heads:
        raise keys.error(
            f"key 'head_dim' is missing, and num_attention_heads={num_heads} does not divide hidden_size={hidden_size}"
        )
    return max(1, hidden_size // num_heads)


def _dtype(keys: Keys, *paths: str) -> str:
    name = keys.get(paths, str, "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise keys.error(f"key {keys.find(*paths)[0]!r} is {show(name)}; expected one of {', '.join(DTYPE_BYTES)}")
    return name


def _draft_geometry(keys: FormKeys, yarn_attention: str) -> tuple[Geometry, tuple[Layer, ...]]:
    hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    geometry = Geometry(
        hidden_size=hidden_size,
        num_layers=keys.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.size("num_key_value_heads", num_heads),
        head_dim=keys.size("head_dim", None if keys.form == "speculators" else _head_dim(keys, hidden_size, num_heads)),
        intermediate_size=keys.size("intermediate_size"),
        rms_norm_eps=keys.size("rms_norm_eps", kind=float),
        rope_theta=1.0,
        vocab_size=keys.size("vocab_size", None),
        max_position_embeddings=keys.size("max_position_embeddings"),
        attention_bias=keys.get(keys.places("attention_bias"), bool, False),
    )
    _checked_geometry(keys, geometry)
    layers = forms.layers(
        keys,
        num_layers=geometry.num_layers,
        head_dim=geometry.head_dim,
        max_positions=geometry.max_position_embeddings,
        yarn_attention=yarn_attention,
    )
    return replace(geometry, rope_theta=layers[0].rope.theta), layers


def _draft_config(keys: FormKeys, yarn_attention: str) -> DraftConfig:
    geometry, layers = _draft_geometry(keys, yarn_attention)
    vocab_size = geometry.vocab_size
    draft_vocab_size = keys.positive(keys.outer("draft_vocab_size"), None)
    if draft_vocab_size is not None and vocab_size is None:
        raise keys.error("key 'vocab_size' is missing; draft_vocab_size counts some of its tokens")
    if draft_vocab_size is not None and vocab_size is not None and draft_vocab_size > vocab_size:
        raise keys.error(f"key 'draft_vocab_size' is {draft_vocab_size}, more than vocab_size={vocab_size}")
    scales = ("embed_scale", "embedding_scale", "input_embedding_scale", "dflash_config.input_embedding_scale")
    return DraftConfig(
        geometry=geometry,
        layers=layers,
        block_size=forms.block_size(keys),
        mask_token_id=forms.mask_token_id(keys, vocab_size),
        hidden_state_indices=forms.hidden_state_indices(keys),
        target_hidden_size=keys.positive("target_hidden_size", geometry.hidden_size),
        draft_vocab_size=None if draft_vocab_size == vocab_size else draft_vocab_size,
        logit_scale=keys.positive(keys.outer("logit_scale"), 1.0, float),
        embedding_scale=keys.positive(scales, 1.0, float),
        dtype=_dtype(keys, *keys.outer("dtype"), *keys.outer("torch_dtype")),
        format=keys.form,
    )


def describe_draft_config(
    raw: dict, source: str = "config.json", *, yarn_attention: str = "mscale"
) -> tuple[DraftConfig | None, str | None]:
    """The record as far as the file gives one, and why the drafter cannot be opened, or None. Raises nothing."""
    config, reason = None, None
    try:
        keys = FormKeys(raw, source)
        if (refused := forms.refusal(keys)) is not None:
            reason = str(keys.error(refused))
        config = _draft_config(keys, yarn_attention)
    except InputError as error:
        reason = reason or str(error)
    return config, reason


def parse_draft_config(raw: dict, source: str = "config.json", *, yarn_attention: str = "mscale") -> DraftConfig:
    """A drafter's configuration in any published form; `source` names the file in errors. Raises InputError.

    `yarn_attention="ignore-mscale"` leaves YaRN's `mscale` and `mscale_all_dim` unread, as some servers do: a factor of
    1 + 0.1 ln(factor) where the pair says 1. It must be what the drafter was trained with.
    """
    config, reason = describe_draft_config(raw, source, yarn_attention=yarn_attention)
    if config is None or reason is not None:
        raise InputError(reason)
    return config


TARGET_FORMS = ("qwen3", "qwen2", "llama")
# key: the values that leave a target what is computed here, and why no other value may pass.
TARGET_REFUSED: dict[str, tuple[tuple, str]] = {
    "hidden_act": (("silu",), "only silu is supported"),
    "mlp_bias": ((False,), "biases in the MLP are not supported"),
    "partial_rotary_factor": ((1,), "RoPE of a part of the channels is not supported in targets"),
    "quantization_config": ((), "quantised weights are not supported"),
    "use_sliding_window": ((False,), "sliding windows are not supported in targets"),
    "num_experts": ((0,), "mixtures of experts are not supported"),
    "num_local_experts": ((0,), "mixtures of experts are not supported"),
}


def _check_target(keys: Keys) -> None:
    """Refuse a target that computes something else. Raises InputError naming the key."""
    _, kind = keys.find("model_type")
    if kind not in TARGET_FORMS:
        raise keys.error(f"key 'model_type' is {show(kind)}; targets can be one of {', '.join(TARGET_FORMS)}")
    for key, (allowed, why) in TARGET_REFUSED.items():
        if (value := keys.find(key)[1]) is not None and value not in allowed:
            raise keys.error(f"key {key!r} is {show(value)}: {why}")
    for kind in keys.get("layer_types", list, ()):
        if kind != "full_attention":
            raise keys.error(f"key 'layer_types' holds {show(kind)}; only full_attention is supported in targets")


def _target_geometry(keys: Keys) -> Geometry:
    """Sizes and parts of the layers, with the defaults of transformers. Qwen2 has biases on q, k and v whatever its file
    says, Qwen3 alone has QK norms."""
    hidden_size, num_heads = keys.positive("hidden_size"), keys.positive("num_attention_heads")
    form = keys.get("model_type", str)
    geometry = Geometry(
        hidden_size=hidden_size,
        num_layers=keys.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.positive("num_key_value_heads", num_heads),
        head_dim=keys.positive("head_dim", 128 if form == "qwen3" else _head_dim(keys, hidden_size, num_heads)),
        intermediate_size=keys.positive("intermediate_size"),
        rms_norm_eps=keys.get("rms_norm_eps", float),
        rope_theta=1.0,
        vocab_size=keys.positive("vocab_size"),
        max_position_embeddings=keys.positive("max_position_embeddings"),
        attention_bias=True if form == "qwen2" else keys.get("attention_bias", bool, False),
        output_bias=form != "qwen2",
        qk_norm=form == "qwen3",
    )
    return _checked_geometry(keys, geometry)


def _eos_token_ids(keys: Keys, vocab_size: int) -> tuple[int, ...]:
    _, value = keys.find("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
        raise keys.error(f"key 'eos_token_id' is {show(value)}; expected ids below vocab_size={vocab_size}")
    return tuple(dict.fromkeys(ids))


def parse_target_config(raw: dict, source: str = "config.json") -> TargetConfig:
    """A target's configuration in the published Qwen3, Qwen2 or Llama form; `source` names the file in errors. Raises
    InputError."""
    keys = FormKeys(raw, source, form="target")
    _check_target(keys)
    geometry = _target_geometry(keys)
    rope = forms.target_rope(keys, geometry.head_dim, geometry.max_position_embeddings)
    return TargetConfig(
        geometry=replace(geometry, rope_theta=rope.theta),
        tie_word_embeddings=keys.get("tie_word_embeddings", bool, False),
        eos_token_ids=_eos_token_ids(keys, keys.positive("vocab_size")),
        dtype=_dtype(keys, "dtype", "torch_dtype"),
        scaled_rope=None if rope.type == "default" else rope,
    )


def config_path(directory: str | Path) -> Path:
    """The config.json of a checkpoint folder. Raises InputError."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; pass a folder with config.json and model.safetensors")
    return directory / "config.json"


def load_draft_config(directory: str | Path, *, yarn_attention: str = "mscale") -> DraftConfig:
    """`parse_draft_config` of a checkpoint folder's config.json."""
    path = config_path(directory)
    return parse_draft_config(read_json(path), str(path), yarn_attention=yarn_attention)


def load_target_config(directory: str | Path) -> TargetConfig:
    """`parse_target_config` of a checkpoint folder's config.json."""
    path = config_path(directory)
    return parse_target_config(read_json(path), str(path))


def check_pair(draft: DraftConfig, target: TargetConfig, tensors: Collection[str] = ()) -> DraftConfig:
    """Refuse a drafter that was not made for this target: widths, layers, vocabulary. Raises InputError.

    Returns the drafter with the target's vocabulary, of which one with an embedding of its own keeps to that table's rows.
    `tensors` are the names that its checkpoint stores: one with both tables of its own need not have the target's width.
    """
    g = target.geometry
    if draft.target_hidden_size != g.hidden_size:
        raise InputError(
            f"the drafter reads target features of width {draft.target_hidden_size}, "
            f"the target's hidden_size is {g.hidden_size}; pass the pair that belongs together"
        )
    if max(draft.hidden_state_indices) > g.num_layers:
        raise InputError(
            f"the drafter reads hidden states {list(draft.hidden_state_indices)}, past the target's {g.num_layers} layers; "
            "pass the pair that belongs together"
        )
    own_tables = {"embed_tokens.weight", "lm_head.weight"} <= set(tensors)
    if draft.geometry.hidden_size != g.hidden_size and not own_tables:
        raise InputError(
            f"the drafter's hidden_size {draft.geometry.hidden_size} does not fit the target's embedding and LM head "
            f"of width {g.hidden_size}, which it shares"
        )
    if not 0 <= draft.mask_token_id < target.vocab_size:
        raise InputError(
            f"mask_token_id={draft.mask_token_id} is outside the target's vocabulary of {target.vocab_size}"
        )
    rows, vocab_size = draft.geometry.vocab_size, target.vocab_size
    if draft.draft_vocab_size is not None and rows is not None and rows > vocab_size:
        raise InputError(f"the drafter drafts some of {rows} tokens, the target's vocabulary has {vocab_size}")
    if rows is not None and "embed_tokens.weight" in tensors:
        vocab_size = min(rows, vocab_size)
    return replace(draft, geometry=replace(draft.geometry, vocab_size=vocab_size))
