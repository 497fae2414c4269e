"""Traces: a target's hidden states and tokens of real text in one file, on which drafters are judged without the target.

T tokens of one document, F feature width. Plain Python and numpy.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  numpy knows bfloat16 by it
import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_dflash.config import (
    DraftConfig,
    InputError,
    TargetConfig,
    config_path,
    parse_target_config,
    read_json,
)
from jax_dflash.stored import Source, Stored, read_header, stored_tensors

FORMAT = "jax-dflash trace 1"
COLUMNS = {"lengths": ("I32",), "prompt_lengths": ("I32",), "tokens": ("I32",), "features": ("F32", "BF16")}
PIECES, PIECE = 16, 4096


def target_digest(directory: str | Path) -> str:
    """What names a target: SHA-256 of its configuration and of every tensor's name, dtype, shape and 16 pieces of 4 KiB,
    evenly spread. It reads 64 KiB of a tensor at most, however large that is, and does not depend on how they are split
    into files; a change that spares all pieces goes unseen. Raises InputError."""
    digest = hashlib.sha256(json.dumps(read_json(config_path(directory)), sort_keys=True).encode())
    for tensor in sorted(stored_tensors(directory), key=lambda tensor: tensor.name):
        digest.update(json.dumps([tensor.name, tensor.kind, tensor.shape]).encode())
        last = max(0, tensor.num_bytes - PIECE)
        with tensor.open() as handle:
            for start in sorted({last * i // (PIECES - 1) for i in range(PIECES)}):
                handle.seek(tensor.start + start)
                digest.update(handle.read(min(PIECE, tensor.num_bytes - start)))
    return digest.hexdigest()


@dataclass(frozen=True)
class TracedTarget:
    """The target of a trace: a name for people, `target_digest`, and its config.json, so that a drafter's fit is known
    without its folder."""

    name: str
    digest: str
    raw_config: dict

    @classmethod
    def of(cls, directory: str | Path, name: str) -> "TracedTarget":
        """A published folder. Raises InputError."""
        return cls(name, target_digest(directory), read_json(config_path(directory)))

    @property
    def config(self) -> TargetConfig:
        """Raises InputError."""
        return parse_target_config(self.raw_config, f"the trace's target {self.name}")


@dataclass(frozen=True)
class Document:
    """A prompt of real text and, behind its `prompt_length` tokens, the target's own greedy continuation.

    Row i of `features` holds token i's hidden states side by side, in the dtype that they were computed in. The last token
    never went through the target, so there is a row less than tokens.
    """

    tokens: Int[np.ndarray, "T"]
    features: Float[np.ndarray, "T-1 F"]
    prompt_length: int


@dataclass(frozen=True)
class Trace:
    """Documents of one target, at least one, with its hidden states at `hidden_state_indices`."""

    documents: list[Document]
    hidden_state_indices: tuple[int, ...]
    target: TracedTarget

    @property
    def dtype(self) -> str:
        """The features' dtype by name: float32 or bfloat16."""
        return self.documents[0].features.dtype.name

    def save(self, path: str | Path) -> None:
        """One safetensors file, whole or not at all: an interrupted save leaves what was there. Raises InputError."""
        path = Path(path)
        arrays = {
            "lengths": np.array([len(document.tokens) for document in self.documents], np.int32),
            "prompt_lengths": np.array([document.prompt_length for document in self.documents], np.int32),
            "tokens": np.concatenate([document.tokens for document in self.documents]),
            "features": np.concatenate([document.features for document in self.documents]),
        }
        metadata = {
            "format": FORMAT,
            "hidden_state_indices": json.dumps(self.hidden_state_indices),
            "target": self.target.name,
            "target_digest": self.target.digest,
            "target_config": json.dumps(self.target.raw_config),
        }
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            save_file(arrays, partial, metadata=metadata)
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{path}: not written ({error}); make room or pass another path") from None
        finally:
            partial.unlink(missing_ok=True)


def load_trace(path: str | Path) -> Trace:
    """A saved trace. Raises InputError for a file that is none, or one that contradicts itself."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file; write a trace with `python -m jax_dflash record --out FILE`")
    stored = {tensor.name: tensor for tensor in read_header(path)}
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path}: not a trace; write one with `python -m jax_dflash record --out FILE`")
    try:
        raw_config, indices = json.loads(metadata["target_config"]), json.loads(metadata["hidden_state_indices"])
        target = TracedTarget(metadata["target"], metadata["target_digest"], dict(raw_config))
        hidden_state_indices = tuple(map(int, indices))
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: its metadata is not a trace's ({type(error).__name__}: {error})") from None
    config = target.config
    for name, kinds in COLUMNS.items():
        if name not in stored or stored[name].kind not in kinds or len(stored[name].shape) != 1 + (name == "features"):
            raise InputError(f"{path}: no tensor {name} of a trace's form in it; record it again")
    lengths, prompt_lengths, tokens = (_read(stored[name]) for name in ("lengths", "prompt_lengths", "tokens"))
    features = stored["features"]
    wrong = {
        "a document without a continuation, or a prompt": len(lengths) == 0
        or lengths.shape != prompt_lengths.shape
        or (prompt_lengths < 1).any()
        or (prompt_lengths >= lengths).any(),
        "lengths that do not add up to its tokens and features": lengths.sum() != len(tokens)
        or (lengths - 1).sum() != features.shape[0],
        "hidden states that its target has not": not hidden_state_indices
        or not all(0 <= i <= config.geometry.num_layers for i in hidden_state_indices)
        or features.shape[1] != len(hidden_state_indices) * config.geometry.hidden_size,
        "tokens outside the target's vocabulary": (tokens < 0).any() or (tokens >= config.vocab_size).any(),
        "features that are infinite or NaN": not features.all_finite(),
    }
    if told := [what for what, holds in wrong.items() if holds]:
        raise InputError(f"{path}: the trace has {told[0]}; record it again")
    documents, end = [], 0
    for number, (length, prompt_length) in enumerate(zip(lengths.tolist(), prompt_lengths.tolist(), strict=True)):
        start, end = end, end + length
        rows = _read(features, (start - number, end - number - 1))
        documents.append(Document(tokens[start:end], rows, prompt_length))
    return Trace(documents, hidden_state_indices, target)


def _read(stored: Stored, rows: tuple[int, int] | None = None) -> np.ndarray:
    source = Source(stored, rows)
    return source.read().view(np.dtype(stored.dtype)).reshape(source.shape)


def check_features(trace: Trace, draft: DraftConfig) -> None:
    """Refuse a drafter that does not read the trace's hidden states. Raises InputError."""
    width = trace.target.config.geometry.hidden_size
    if (draft.hidden_state_indices, draft.target_hidden_size) != (trace.hidden_state_indices, width):
        raise InputError(
            f"the trace holds hidden states {list(trace.hidden_state_indices)} of {trace.target.name}, {width} wide, the "
            f"drafter reads {list(draft.hidden_state_indices)}, {draft.target_hidden_size} wide; record a trace of its own "
            "target with --checkpoint of this drafter"
        )


def check_target(trace: Trace, directory: str | Path) -> None:
    """Refuse a target other than the trace's. Raises InputError."""
    if (digest := target_digest(directory)) != trace.target.digest:
        raise InputError(
            f"{directory}: not the target of this trace, {trace.target.name}: its digest is {digest[:12]}, the trace's "
            f"{trace.target.digest[:12]}; pass that target or record this one"
        )
