"""What a drafter's checkpoint is: its record, its size, its floors, and what does not fit. Neither JAX nor PyTorch is
loaded, but for a `mask_embedding.pt`.

Works on a folder or on a bare config.json. A drafter that is refused is described as far as its file allows.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from jax_dflash import roofline
from jax_dflash.buckets import BucketLadder, GraphMode
from jax_dflash.checkpoint_forms import Rope
from jax_dflash.config import (
    DraftConfig,
    check_pair,
    config_path,
    describe_draft_config,
    load_target_config,
)
from jax_dflash.keys import InputError, read_json
from jax_dflash.mask_embedding import MASK_EMBEDDING
from jax_dflash.names import Match, canonical, match_draft
from jax_dflash.stored import FLOAT_KINDS

ROPE_KEYS = ("type", "theta", "factor", "original_max_position_embeddings", "attention_factor", "rotary_dim")

OWN_TABLES = ("embed_tokens.weight", "lm_head.weight", "d2t", MASK_EMBEDDING)


@dataclass(frozen=True, kw_only=True)
class InspectJob:
    """What to inspect, and for which machine and traffic the floors hold: bytes/s, flops/s, live tokens of a request."""

    path: Path
    target: Path | None = None
    yarn_attention: str = "mscale"
    num_speculative_tokens: int | None = None
    max_num_seqs: int = 32
    length: int = 1024
    bandwidth: float = 4.8e12
    peak: float = 790e12


def inspect(job: InspectJob) -> dict[str, Any]:
    """The document of a checkpoint; `refused` holds why it cannot be opened. Raises InputError for a path or an argument
    that cannot be used."""
    for name in ("max_num_seqs", "length", "bandwidth", "peak"):
        if getattr(job, name) < (0 if name == "length" else 1):
            raise InputError(f"--{name.replace('_', '-')} {getattr(job, name)}; pass more")
    folder = job.path if job.path.is_dir() else None
    path = job.path if job.path.is_file() else config_path(job.path)
    config, refused = describe_draft_config(read_json(path), str(path), yarn_attention=job.yarn_attention)
    result: dict[str, Any] = {"path": str(job.path)} | record(config)
    weights, names = None, set()
    if config is not None and folder is not None and has_weights(folder):
        try:
            found = match_draft(folder, config)
            names, weights = set(found.sources), weights_report(found)
            refused = refused or next(iter(weights["problems"]), None)
        except InputError as error:
            refused = refused or str(error)
    if config is not None and job.target is not None:
        try:
            config = check_pair(config, load_target_config(job.target), names)
        except InputError as error:
            refused = refused or str(error)
    return result | floors(config, job) | {"weights": weights, "refused": refused}


def has_weights(folder: Path) -> bool:
    """Whether a folder holds more of a checkpoint than its config.json."""
    return any(
        path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json") for path in folder.iterdir()
    )


def record(config: DraftConfig | None) -> dict[str, Any]:
    """The record as JSON; every key is there, null where a file gave none."""
    keys = (
        "format hidden_state_indices mask_token_id block_size num_speculative_tokens num_layers hidden_size "
        "target_hidden_size num_heads num_kv_heads head_dim intermediate_size rms_norm_eps rope ropes layers attention_bias "
        "max_position_embeddings vocab_size draft_vocab_size logit_scale embedding_scale dtype num_parameters num_bytes"
    )
    values: dict[str, Any] = dict.fromkeys(keys.split())
    if config is None:
        return values
    g = config.geometry
    for key in values:
        owner = config if hasattr(config, key) else g
        values[key] = getattr(owner, key, None)
    ropes = list(dict.fromkeys(layer.rope for layer in config.layers))
    return values | {
        "hidden_state_indices": list(config.hidden_state_indices),
        "num_speculative_tokens": config.max_speculative_tokens,
        "rope": _rope(config.layers[0].rope),
        "ropes": [_rope(rope) | _more_rope(rope, config) for rope in ropes],
        "layers": [{"window": layer.window, "causal": layer.causal} for layer in config.layers],
        "num_parameters": roofline.num_parameters(config),
        "num_bytes": roofline.num_bytes(config),
    }


def _rope(rope: Rope) -> dict[str, Any]:
    return {key: getattr(rope, key) for key in ROPE_KEYS}


def _more_rope(rope: Rope, config: DraftConfig) -> dict[str, Any]:
    return {
        "attention_rule": rope.attention_rule,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "layers": [i for i, layer in enumerate(config.layers) if layer.rope == rope],
    }


def weights_report(found: Match) -> dict[str, Any]:
    """What stands in the files: bytes, tables of its own, and everything that does not fit. Reads float values once."""
    stored = {id(source.stored): source.stored for source in found.sources.values()}.values()
    readable = [tensor for tensor in stored if tensor.kind in FLOAT_KINDS] if not found.faults else []
    infinite = [canonical(tensor.name) for tensor in readable if not tensor.all_finite()]
    problems = list(found.problems)
    if infinite:
        shown = ", ".join(infinite[:8])
        problems.append(f"{len(infinite)} tensor(s) hold values that are not finite: {shown}")
    return {
        "num_tensors": len(stored) + len(found.unclaimed),
        "num_bytes": sum(tensor.num_bytes for tensor in stored),
        "own_tables": [name for name in OWN_TABLES if name in found.sources],
        "missing": found.missing,
        "unclaimed": [tensor.name for tensor in found.unclaimed],
        "not_finite": infinite,
        "problems": problems,
    }


def floors(config: DraftConfig | None, job: InspectJob) -> dict[str, Any]:
    """Bytes, flops and least seconds of one draft step in each bucket of the default ladder."""
    if config is None:
        return {"pool_bytes_per_token": None, "buckets": [], "floor_of": None}
    K = job.num_speculative_tokens or config.max_speculative_tokens
    if not 1 <= K <= config.max_speculative_tokens:
        raise InputError(
            f"--num-speculative-tokens {K}: this drafter's blocks of {config.block_size} hold an anchor and "
            f"1 to {config.max_speculative_tokens} drafts"
        )
    ladder = BucketLadder.without_holes(max_num_seqs=job.max_num_seqs, query_len=K + 1)
    buckets = []
    for descriptor in reversed(ladder.capture_order(GraphMode.FULL)):
        operations = roofline.draft_step(
            config, num_reqs=descriptor.padded_reqs, num_speculative_tokens=K, length=job.length
        )
        num_bytes, flops = roofline.total(operations)
        buckets.append(
            {
                "num_reqs": descriptor.padded_reqs,
                "num_tokens": descriptor.num_tokens,
                "num_bytes": num_bytes,
                "flops": flops,
                "floor_seconds": roofline.floor_seconds(operations, job.bandwidth, job.peak),
            }
        )
    machine = {"bandwidth": job.bandwidth, "peak": job.peak, "num_speculative_tokens": K, "length": job.length}
    return {
        "pool_bytes_per_token": roofline.pool_bytes_per_token(config),
        "buckets": buckets,
        "floor_of": machine | {"lm_head_rows": roofline.head_rows(config)},
    }


def report(result: dict[str, Any]) -> Group:
    """The document for a person; 80 columns are enough."""
    parts: list[Any] = []
    if result["format"] is not None:
        parts += [*_facts(result), *_layers(result), *_buckets(result), *_weights(result)]
    if result["refused"]:
        parts.append(Text(f"REFUSED: {result['refused']}"))
    return Group(*parts)


def _grid(headings: tuple[str, ...] = (), **options: Any) -> Table:
    view = Table(box=box.SIMPLE if headings else None, show_header=bool(headings), padding=(0, 1, 0, 0))
    for heading in headings:
        view.add_column(heading, **options)
    return view


def _facts(result: dict[str, Any]) -> list[Any]:
    view = _grid()
    states = ", ".join(map(str, result["hidden_state_indices"]))
    vocabulary = "the target's" if result["vocab_size"] is None else f"{result['vocab_size']:,}"
    if result["draft_vocab_size"]:
        vocabulary += f", drafts from {result['draft_vocab_size']:,} of them (d2t)"
    heads = f"{result['num_heads']} query and {result['num_kv_heads']} KV heads of {result['head_dim']}"
    bias = ", with biases" if result["attention_bias"] else ""
    rows = {
        "checkpoint": result["path"],
        "reads": f"hidden states {states} of the target, width {result['target_hidden_size']:,}",
        "block": f"{result['block_size']} rows: the anchor and {result['num_speculative_tokens']} drafts",
        "mask token": str(result["mask_token_id"]),
        "layers": f"{result['num_layers']}, width {result['hidden_size']:,}, MLP {result['intermediate_size']:,}",
        "attention": f"{heads}{bias}",
        "RoPE": "; ".join(_rope_words(rope, result) for rope in result["ropes"]),
        "positions": f"{result['max_position_embeddings']:,}",
        "vocabulary": vocabulary,
        "parameters": f"{result['num_parameters']:,} ({result['dtype']}, {_size(result['num_bytes'])}) "
        "without tables of tokens",
        "pool": f"{result['pool_bytes_per_token']:,} bytes a token",
    }
    for key in ("logit_scale", "embedding_scale"):
        if result[key] != 1:
            rows[key.replace("_", " ")] = str(result[key])
    for name, value in rows.items():
        view.add_row(name, Text(value))
    return [Text(f"DFlash drafter, {result['format']} form", style="bold"), view]


def _rope_words(rope: dict[str, Any], result: dict[str, Any]) -> str:
    words = f"theta {rope['theta']:,g}"
    if rope["type"] == "yarn":
        words = f"YaRN {rope['factor']:g} x {rope['original_max_position_embeddings']}, {words}, "
        words += f"attention factor {rope['attention_factor']:.6g} ({rope['attention_rule']})"
    if rope["rotary_dim"] != result["head_dim"]:
        words += f", {rope['rotary_dim']} of {result['head_dim']} channels"
    if len(result["ropes"]) > 1:
        words += f" in layers {', '.join(map(str, rope['layers']))}"
    return words


def _layers(result: dict[str, Any]) -> list[Any]:
    view = _grid(("layer", "sees", "direction"))
    for i, layer in enumerate(result["layers"]):
        sees = "all keys" if layer["window"] is None else f"window {layer['window']}"
        view.add_row(str(i), sees, "causal" if layer["causal"] else "both ways")
    return [view]


def _buckets(result: dict[str, Any]) -> list[Any]:
    of = result["floor_of"]
    view = _grid(("requests", "rows", "read and written", "Gflop", "floor ms"), justify="right")
    for row in result["buckets"]:
        cells = (_size(row["num_bytes"]), f"{row['flops'] / 1e9:,.3f}", f"{row['floor_seconds'] * 1e3:.4f}")
        view.add_row(str(row["num_reqs"]), str(row["num_tokens"]), *cells)
    head = "without the LM head, whose vocabulary is the target's" if of["lm_head_rows"] is None else "with the LM head"
    return [
        Text(f"Floor of a draft step, K={of['num_speculative_tokens']}, {of['length']} tokens of context a request,"),
        Text(f"at {of['bandwidth'] / 1e12:g} TB/s and {of['peak'] / 1e12:g} Tflop/s, {head}"),
        view,
    ]


def _weights(result: dict[str, Any]) -> list[Text]:
    weights = result["weights"]
    if weights is None:
        return [Text("No weights here, only the configuration.")]
    own = f", with its own {', '.join(weights['own_tables'])}" if weights["own_tables"] else ""
    lines = [f"{weights['num_tensors']} tensors of {_size(weights['num_bytes'])}{own}."]
    return [Text(line) for line in lines + [f"FAULT: {problem}" for problem in weights["problems"]]]


def _size(num_bytes: int) -> str:
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= unit), (1e3, "kB"))
    return f"{num_bytes / unit:.3g} {name}"
