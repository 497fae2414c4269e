"""The tensors of a checkpoint: canonical names and shapes, and the published spellings of them. Plain Python: both
frameworks read it.

A drafter's canonical names are z-lab's, torch layout [out, in], each projection apart; with biases, `embed_tokens.weight`,
`lm_head.weight`, `d2t` and `mask_embedding` where a checkpoint has them.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jax_dflash.config import DraftConfig, Geometry, TargetConfig
from jax_dflash.keys import InputError, show_name
from jax_dflash.mask_embedding import MASK_EMBEDDING, read_mask_embedding
from jax_dflash.stored import FLOAT_KINDS, INT_KINDS, Source, Stored, stored_tensors

Shapes = dict[str, tuple[int, ...]]

SPELLINGS = (
    ("model.", ""),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("midlayer.", "layers.0."),
)
IGNORED = re.compile(r"(t2d|verifier_[^.]+(\.weight)?)")  # the inverse of d2t, and copies of the target's
# Of targets: frequencies that old Llama files store, and the embedding's copy that a tied one may bring.
TARGET_IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight)")
FUSED = re.compile(r"(layers\.\d+\.self_attn\.)qkv_proj\.(weight|bias)")
# Tensors without which a drafter is another function, and a file that is the same.
GATES = {
    "g_proj": "a gate on attention",
    "aux_hidden_norms": "norms of the target's hidden states",
    "attention_sink_bias": "sinks in the softmax",
    "_conv.": "DFlash 2's convolutions",
    "candidate_selector": "DFlash 2's selector",
    "mask_hidden": "a mask row of its own",
    "mask_embedding": "a mask row of its own",
}


def _layer_tensors(geometry: Geometry, prefix: str) -> Shapes:
    D, F, H = geometry.hidden_size, geometry.intermediate_size, geometry.head_dim
    NH, KH = geometry.num_heads * H, geometry.num_kv_heads * H
    one_layer = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (NH, D),
        "self_attn.k_proj.weight": (KH, D),
        "self_attn.v_proj.weight": (KH, D),
        "self_attn.o_proj.weight": (D, NH),
        **({"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)} if geometry.qk_norm else {}),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    one_layer |= {f"self_attn.{p}_proj.bias": one_layer[f"self_attn.{p}_proj.weight"][:1] for p in geometry.biased}
    return {
        f"{prefix}layers.{layer}.{name}": shape
        for layer in range(geometry.num_layers)
        for name, shape in one_layer.items()
    }


def draft_tensors(config: DraftConfig) -> Shapes:
    """What every checkpoint of a drafter holds: 3 tensors and 11 per layer, 15 with biases."""
    D = config.geometry.hidden_size
    return {
        "fc.weight": (D, config.feature_size),
        "hidden_norm.weight": (D,),
        "norm.weight": (D,),
        **_layer_tensors(config.geometry, prefix=""),
    }


def vocabulary_tensors(config: DraftConfig) -> tuple[Shapes, Shapes]:
    """The tables of tokens that a drafter must bring, and those that it may: without them the target's serve.

    `d2t` holds offsets: draft id i is the target's token i + d2t[i].
    """
    D, V, reduced = config.geometry.hidden_size, config.geometry.vocab_size, config.draft_vocab_size
    embedding: Shapes = {} if V is None else {"embed_tokens.weight": (V, D)}
    if reduced is not None:
        return {"lm_head.weight": (reduced, D), "d2t": (reduced,)}, embedding
    return {}, embedding | ({} if V is None else {"lm_head.weight": (V, D)})


def target_tensors(config: TargetConfig) -> Shapes:
    """Every tensor of a target; a tied one has no LM head of its own."""
    D, V = config.geometry.hidden_size, config.vocab_size
    head = {} if config.tie_word_embeddings else {"lm_head.weight": (V, D)}
    return {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        **_layer_tensors(config.geometry, prefix="model."),
        **head,
    }


def target_tables(config: TargetConfig) -> Shapes:
    """The two of them that drafters share: the embedding and the LM head."""
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    return {name: shape for name, shape in target_tensors(config).items() if name in tables}


def canonical(name: str) -> str:
    """A published spelling of a drafter's tensor as its canonical name."""
    for spelling, plain in SPELLINGS:
        if name.startswith(spelling):
            name = plain + name.removeprefix(spelling)
    return name


@dataclass
class Match:
    """How stored tensors fit a table: where each canonical tensor comes from, and what does not fit."""

    sources: dict[str, Source] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    unclaimed: list[Stored] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """One line for each kind of fault, the most telling first."""
        lines = list(self.faults)
        if self.unclaimed:
            first = self.unclaimed[0]
            why = next((why for part, why in GATES.items() if part in first.name), None)
            note = f"; {show_name(first.name)} is {why}: without it this would be another function" if why else ""
            lines.append(f"{first.file}: {len(self.unclaimed)} unclaimed tensor(s): {self.names(self.unclaimed)}{note}")
        if self.missing:
            where = next((source.stored.file for source in self.sources.values()), "checkpoint")
            lines.append(f"{where}: {len(self.missing)} missing tensor(s): {', '.join(self.missing[:8])}")
        return lines

    @staticmethod
    def names(stored: list[Stored]) -> str:
        return ", ".join(show_name(tensor.name) for tensor in stored[:8])

    def checked(self) -> dict[str, Source]:
        """The sources. Raises InputError with the first problem."""
        if self.problems:
            raise InputError(self.problems[0])
        return self.sources


def match(stored: Iterable[Stored], expected: Shapes, optional: Shapes | None = None) -> Match:
    """Find each tensor of the tables among the stored ones. With `optional`, even an empty one, a drafter's spellings are
    understood: prefixes, fused projections, and copies of the target's that are left alone; without, a target's."""
    result, table = Match(), expected | (optional or {})
    found: dict[str, Source] = {}
    for tensor in stored:
        name = tensor.name if optional is None or tensor.name in table else canonical(tensor.name)
        parts, fused = [name], FUSED.fullmatch(name)
        if optional is not None and fused is not None:
            parts = [f"{fused[1]}{p}_proj.{fused[2]}" for p in "qkv"]
        if any(part not in table for part in parts):
            if not (TARGET_IGNORED if optional is None else IGNORED).fullmatch(name):
                result.unclaimed.append(tensor)
            continue
        shape = (sum(table[part][0] for part in parts), *table[parts[0]][1:])
        if (fault := _fault(tensor, name, shape)) is not None:
            result.faults.append(fault)
        if (twin := next((found[part].stored for part in parts if part in found), None)) is not None:
            also = "" if twin.name == tensor.name else f" as {show_name(twin.name)}"
            told = f"{tensor.file}: tensor {show_name(tensor.name)} is duplicate"
            result.faults.append(f"{told}, it also stands in {twin.file}{also}")
        row = 0
        for part in parts:
            rows = (row, row + table[part][0]) if len(parts) > 1 else None
            found.setdefault(part, Source(tensor, rows))
            row += table[part][0]
    result.sources = {name: found[name] for name in table if name in found}
    result.missing = [name for name in expected if name not in found]
    return result


def _fault(tensor: Stored, name: str, shape: tuple[int, ...]) -> str | None:
    told = f"{tensor.file}: tensor {show_name(tensor.name)}"
    if name == "d2t":
        if tensor.kind not in INT_KINDS:
            return f"{told} is stored as {tensor.kind}, expected one of {tuple(INT_KINDS)}"
    elif tensor.kind not in FLOAT_KINDS:
        return (
            f"{told} is stored as {tensor.kind}, expected one of {tuple(FLOAT_KINDS)}; quantised ones are not supported"
        )
    if tensor.shape != shape:
        return f"{told} has shape {list(tensor.shape)}, expected {list(shape)}"
    return None


def match_draft(directory: str | Path, config: DraftConfig) -> Match:
    """`match` of a drafter's checkpoint folder, with the `mask_embedding` that ships beside its weights. Raises InputError
    for a folder that cannot be read."""
    required, optional = vocabulary_tensors(config)
    result = match(stored_tensors(directory), draft_tensors(config) | required, optional)
    try:
        if (row := read_mask_embedding(directory, config)) is not None:
            result.sources[MASK_EMBEDDING] = Source(row)
    except InputError as error:
        result.faults.append(str(error))
    return result


def checked_d2t(source: Source, vocab_size: int | None) -> np.ndarray:
    """Offsets of a reduced vocabulary as int32: the tokens i + d2t[i] are distinct and in the vocabulary. Raises
    InputError."""
    offsets = source.read().view(source.stored.dtype)
    ids = np.arange(len(offsets)) + offsets
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    if ids.min() < 0 or ids.max() >= limit or len(np.unique(ids)) < len(ids):
        raise InputError(
            f"{source.stored.file}: d2t holds offsets whose tokens i + d2t[i] are not distinct and below {limit}"
        )
    return offsets.astype(np.int32)


def write_config(directory: Path, raw: dict) -> None:
    """Write a config.json as published ones are written."""
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
