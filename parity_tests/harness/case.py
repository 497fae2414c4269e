"""A case: everything that one comparison of a draft step needs, in one safetensors file.

Its floats are exact in bfloat16, so that every dtype computes the same function of the same numbers.
"""

import hashlib
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

SCHEMA = 1
PER_REQUEST = (
    "start_position", "num_context", "num_rejected", "num_sampled", "last_sampled", "next_prefill", "request_index",
    "first_context_position",
)  # fmt: skip
CONFIG = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES = ("num_reqs", "context_rows", "page_size", "max_model_len", "num_speculative_tokens")


class CaseError(ValueError):
    """A case file that cannot be used; the message is one line."""


@dataclass(frozen=True)
class Case:
    """One draft step.

    Args:
        config: the drafter's config.json in any published form; null symmetries and shrinking want z-lab's.
        tensors: float32 by checkpoint name, with the `embed_tokens.weight` and `lm_head.weight` that are used, its own or
            the target's; with `mask_embedding [D]` where mask rows have a vector of their own.
        columns: int32 `[n]` for each name of PER_REQUEST and `block_tables [n, W]`.
        hidden_states: `[I, M, Dt]` float32, the target's residual stream for the step's rows; index 0 is the embeddings.
        pool: `[L, 2, P, page, K, H]` float32 before the step, NaN where no request owns a row.
        num_reqs, context_rows: the bucket: requests and context rows with padding.
        yarn_attention: how YaRN's mscale keys are read, as in `parse_draft_config`.
        meta: what produced it and what it was judged to be.
    """

    name: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    columns: dict[str, np.ndarray]
    hidden_states: np.ndarray
    pool: np.ndarray
    num_reqs: int
    context_rows: int
    page_size: int
    max_model_len: int
    num_speculative_tokens: int
    yarn_attention: str = "mscale"
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def live_reqs(self) -> int:
        return len(self.columns["num_context"])

    @property
    def live_rows(self) -> int:
        return self.hidden_states.shape[1]

    @property
    def num_layers(self) -> int:
        return len(self.pool)


def exact(x) -> np.ndarray:
    """Rounded to bfloat16, held as float32."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def _compact(x: np.ndarray) -> np.ndarray:
    """bfloat16 if that loses nothing, as in every case that nobody made from a float32 checkpoint or a float64 run."""
    if x.dtype.kind in "iu":
        return x
    small = x.astype(ml_dtypes.bfloat16)
    return small if np.array_equal(small.astype(x.dtype), x, equal_nan=True) else x


def _wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "fiu" else x.astype(np.float32)


def save(case: Case, path: str | Path) -> Path:
    """Write a case whole or not at all."""
    arrays = {f"tensors/{name}": value for name, value in case.tensors.items()}
    arrays |= {"hidden_states": case.hidden_states, "pool": case.pool}
    arrays = {name: np.ascontiguousarray(_compact(value)) for name, value in arrays.items()}
    arrays |= {f"columns/{name}": np.ascontiguousarray(value, np.int32) for name, value in case.columns.items()}
    sizes = {name: getattr(case, name) for name in SIZES}
    document = {"schema": SCHEMA, "name": case.name, "config": case.config, "sizes": sizes, "meta": case.meta}
    if case.yarn_attention != "mscale":  # what a case without the key means
        document["yarn_attention"] = case.yarn_attention
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.touch()  # with the user's own mode: save_file's is 0600
        mode = partial.stat().st_mode
        save_file(arrays, partial, metadata={"case": json.dumps(document)})
        partial.chmod(mode)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load(path: str | Path) -> Case:
    """Read a case. Raises CaseError naming the file."""
    if not Path(path).is_file():
        raise CaseError(f"{path}: no such case file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CaseError(f"{path}: not a readable safetensors file ({error})") from None
    try:
        document = json.loads(metadata["case"])
        if document["schema"] != SCHEMA:
            raise CaseError(f"{path}: schema {document['schema']} of a case; this harness reads {SCHEMA}")
        parts: dict[str, dict] = {"tensors": {}, "columns": {}}
        for name, value in arrays.items():
            kind, _, rest = name.partition("/")
            if rest:
                parts[kind][rest] = value if kind == "columns" else _wide(value)
        case = Case(
            document["name"], document["config"], parts["tensors"], parts["columns"],
            _wide(arrays["hidden_states"]), _wide(arrays["pool"]),
            **{name: int(document["sizes"][name]) for name in SIZES},
            yarn_attention=document.get("yarn_attention", "mscale"), meta=document["meta"],
        )  # fmt: skip
        none = np.zeros(case.live_reqs, np.int32)
        case.columns.setdefault("first_context_position", none)  # of files from before it was there
        missing = {*PER_REQUEST, "block_tables"} - case.columns.keys()
        if "transformer_layer_config" not in case.config:  # where the speculators form has its sizes
            missing |= {*CONFIG} - case.config.keys()
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise CaseError(
            f"{path}: not a parity case, or one of another version ({type(error).__name__}: {error})"
        ) from None
    if missing:
        raise CaseError(f"{path}: a case without {', '.join(sorted(missing))}")
    return case


def digest(case: Case) -> str:
    """Eight hex digits that name a case's content."""
    said = [case.config, {name: getattr(case, name) for name in SIZES}]
    said += [case.yarn_attention] if case.yarn_attention != "mscale" else []
    sha = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, value in sorted({**case.tensors, **case.columns, "h": case.hidden_states, "p": case.pool}.items()):
        sha.update(name.encode() + np.ascontiguousarray(value).tobytes())
    return sha.hexdigest()[:8]


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a result depends on besides the case."""

    def installed(name):
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    root = Path(__file__).parents[2]
    git = subprocess.run(["git", "-C", root, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "git": git.stdout.strip() or None,
        "versions": {name: installed(name) for name in ("jax", "flax", "torch", "numpy")},
        "device": device,
        "machine": platform.machine(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
    }


@dataclass(frozen=True)
class Request:
    """One request of a made-up step: `start` rows are in the pool, `rows` come from the target, the last ones rejected.
    A `sampled` of 0 is a prompt that is not finished. Of the rows in the pool the first `cached` were never stored."""

    start: int
    rows: int
    rejected: int = 0
    sampled: int = 1
    cached: int = 0


def build(
    name: str,
    requests: list[Request],
    *,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 6,
    num_kv_heads: int = 3,
    head_dim: int = 10,
    intermediate_size: int = 96,
    vocab_size: int = 131,
    block_size: int = 5,
    target_layer_ids: tuple[int, ...] = (0, 2, 3),
    target_layers: int = 5,
    target_hidden_size: int | None = None,
    rope_theta: float = 1e4,
    page_size: int = 4,
    max_model_len: int = 64,
    num_reqs: int | None = None,
    extra_rows: int = 5,
    num_speculative_tokens: int | None = None,
) -> Case:
    """A case of random weights at a scale that keeps activations near 1, on shuffled pages; norms differ everywhere."""
    rng = np.random.default_rng(seed)
    D, H, Dt = hidden_size, head_dim, target_hidden_size or hidden_size
    K = block_size - 1 if num_speculative_tokens is None else num_speculative_tokens

    def matrix(rows, columns):
        return exact(rng.standard_normal((rows, columns)) / np.sqrt(columns))

    def norm(size):
        return exact(rng.uniform(0.5, 1.5, size))

    tensors = {
        "fc.weight": matrix(D, len(target_layer_ids) * Dt),
        "hidden_norm.weight": norm(D),
        "norm.weight": norm(D),
    }
    for layer in range(num_layers):
        p = f"layers.{layer}."
        tensors |= {p + "input_layernorm.weight": norm(D), p + "post_attention_layernorm.weight": norm(D)}
        for part, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            tensors[f"{p}self_attn.{part}_proj.weight"] = matrix(heads * H, D)
        tensors |= {f"{p}self_attn.o_proj.weight": matrix(D, num_heads * H)}
        tensors |= {f"{p}self_attn.q_norm.weight": norm(H) * 2, f"{p}self_attn.k_norm.weight": norm(H)}
        tensors |= {f"{p}mlp.{part}_proj.weight": matrix(intermediate_size, D) for part in ("gate", "up")}
        tensors[f"{p}mlp.down_proj.weight"] = matrix(D, intermediate_size)
    tensors["embed_tokens.weight"] = exact(rng.standard_normal((vocab_size, D)))
    tensors["lm_head.weight"] = matrix(vocab_size, D)

    n, N = len(requests), num_reqs or len(requests) + 1
    ends = [r.start + r.rows - r.rejected for r in requests]
    pages_of = [-(-min(end + K + 1, max_model_len) // page_size) for end in ends]
    num_pages = 1 + sum(pages_of) + 2
    free = list(rng.permutation(np.arange(1, num_pages - 1)))  # nobody owns the last page: what wraps lands there
    tables = np.zeros((n, -(-max_model_len // page_size)), np.int32)
    pool = np.full((num_layers, 2, num_pages, page_size, num_kv_heads, H), np.nan, np.float32)
    for row, request in enumerate(requests):
        tables[row, : pages_of[row]] = [free.pop() for _ in range(pages_of[row])]
        for position in range(request.cached, request.start):
            stored = exact(rng.standard_normal((num_layers, 2, num_kv_heads, H)))
            pool[:, :, tables[row, position // page_size], position % page_size] = stored
    pool[:, :, [0, -1]] = (
        7  # what nobody may write, the null page and the one where a slot of -1 wraps to, shows NaN too
    )
    columns = {
        "start_position": [r.start for r in requests],
        "num_context": [r.rows for r in requests],
        "num_rejected": [r.rejected for r in requests],
        "num_sampled": [r.sampled for r in requests],
        "last_sampled": rng.integers(1, vocab_size - 1, n),
        "next_prefill": rng.integers(1, vocab_size - 1, n),
        "request_index": rng.permutation(N + 3)[:n],
        "first_context_position": [r.cached for r in requests],
    }
    rows = sum(r.rows for r in requests)
    return Case(
        name=name,
        config={
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": D, "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": H,
            "intermediate_size": intermediate_size, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": rope_theta,
            "rope_scaling": None, "attention_bias": False, "vocab_size": vocab_size, "block_size": block_size,
            "max_position_embeddings": max(max_model_len, 64), "num_target_layers": target_layers,
            "target_hidden_size": Dt, "layer_types": ["full_attention"] * num_layers,
            "dflash_config": {"mask_token_id": vocab_size - 1, "target_layer_ids": list(target_layer_ids)},
        },
        tensors=tensors,
        columns={name: np.asarray(value, np.int32) for name, value in columns.items()} | {"block_tables": tables},
        hidden_states=exact(rng.standard_normal((target_layers + 1, rows, Dt))),
        pool=pool,
        num_reqs=N,
        context_rows=rows + extra_rows,
        page_size=page_size,
        max_model_len=max_model_len,
        num_speculative_tokens=K,
        meta={"seed": seed},
    )  # fmt: skip


def mixed(seed: int = 0, **sizes) -> Case:
    """The standard case: a decode with rejected rows, a whole prompt, an unfinished one, and a request at the length
    limit, in a bucket with a padded request and padded rows."""
    requests = [Request(21, 5, 2, 3), Request(0, 9), Request(8, 6, sampled=0), Request(56, 5, 0, 1)]
    return build("mixed", requests, seed=seed, **sizes)


def with_meta(case: Case, **meta) -> Case:
    """The case with more said of it."""
    return replace(case, meta={**case.meta, **meta})
