"""Traces: the target's hidden states and tokens of real text in one file, on which drafters are judged without a target.

D documents end to end, T tokens of all, F feature width, K drafts.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jax_dflash.batch import TargetStep
from jax_dflash.config import DraftConfig, InputError
from jax_dflash.decoding import DecodeLoop, Target
from jax_dflash.sampling_params import SamplingParams

FORMAT = "jax-dflash trace 1"


@dataclass(frozen=True)
class Trace:
    """Documents of a target: a prompt of real text and, behind it, the target's own greedy continuation.

    `features` are hidden states at `hidden_state_indices`, side by side, in the dtype that they were computed in. The last
    token of each document has none: it was never run.
    """

    tokens: Int[np.ndarray, "T"]
    features: Float[np.ndarray, "T F"]
    lengths: Int[np.ndarray, "D"]
    prompt_lengths: Int[np.ndarray, "D"]
    hidden_state_indices: tuple[int, ...]
    target: str

    def documents(self) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """(tokens, features, prompt length) of each document."""
        ends = np.cumsum(self.lengths)
        rows = zip(ends - self.lengths, ends, self.prompt_lengths, strict=True)
        return [(self.tokens[a:b], self.features[a:b], int(n)) for a, b, n in rows]

    def save(self, path: str | Path) -> None:
        """One safetensors file, whole or not at all."""
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in ARRAYS}
        meta = {"hidden_state_indices": list(self.hidden_state_indices), "target": self.target}
        part = Path(path).with_name(Path(path).name + ".part")
        save_file(arrays, part, metadata={"format": FORMAT, "trace": json.dumps(meta)})
        part.replace(path)


ARRAYS = ("tokens", "features", "lengths", "prompt_lengths")


def load_trace(path: str | Path) -> Trace:
    """A saved trace. Raises InputError."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"{path}: not a trace; write one with `python -m jax_dflash record`")
            arrays = {name: file.get_tensor(name) for name in ARRAYS}
            meta = json.loads(metadata["trace"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not to be read as a trace ({error})") from None
    if not len(arrays["tokens"]) == len(arrays["features"]) == arrays["lengths"].sum():
        raise InputError(f"{path}: its lengths do not add up to its tokens and features")
    return Trace(**arrays, hidden_state_indices=tuple(meta["hidden_state_indices"]), target=meta["target"])


class Recorder:
    """Stands for a drafter in a loop that decodes plainly, and keeps the features that it is shown."""

    draft_logits = None

    def __init__(self, to_numpy: Callable[[Any], np.ndarray] = np.asarray):
        self.to_numpy = to_numpy
        self.rows: dict[int, dict[int, np.ndarray]] = {}

    def add_request(self, request_id, num_prompt_tokens: int = 0, cached_tokens: int = 0, params=None) -> None:
        self.rows.setdefault(request_id, {})

    def remove_request(self, request_id) -> None:
        """What was recorded stays."""

    def request_index(self, request_id) -> int:
        return -1

    def propose(self, step: TargetStep, features: Any, num_speculative_tokens: int | None = None) -> np.ndarray:
        """Keep every row by its position; no drafts."""
        assert step.start_position is not None, "the loop names it"
        rows, first = self.to_numpy(features), np.cumsum(step.num_context) - step.num_context
        columns = zip(step.request_ids, step.start_position, step.num_context, first, strict=True)
        for request_id, start, count, at in columns:
            for i in range(count):
                self.rows[request_id][int(start) + i] = rows[at + i]
        return np.zeros((len(step.request_ids), 0), np.int32)


def record(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    hidden_state_indices: tuple[int, ...],
    name: str,
    eos_token_ids: tuple[int, ...] = (),
    repeat: int | None = None,
    to_numpy: Callable[[Any], np.ndarray] = np.asarray,
    advance: Callable[[int], Any] = lambda finished: None,
    **sizes: Any,
) -> Trace:
    """Run prompts and their greedy continuations through a target. `sizes` are those of a `DecodeLoop`; `advance` is told
    how many documents are done."""
    recorder = Recorder(to_numpy)
    loop = DecodeLoop(
        target, recorder, **(sizes | {"num_speculative_tokens": 0}), eos_token_ids=eos_token_ids, repeat=repeat
    )
    for prompt in prompts:
        loop.add(prompt, SamplingParams(max_new_tokens=max_new_tokens))
    while not loop.done:
        loop.step()
        advance(len(loop.finished))
    documents = sorted(loop.finished, key=lambda g: g.request_id)
    tokens, features = [], []
    for document in documents:
        rows = recorder.rows[document.request_id]
        length = len(document.tokens)
        tokens += document.tokens
        features += [rows[i] for i in range(length - 1)] + [np.zeros_like(rows[0])]
    return Trace(
        tokens=np.array(tokens, np.int32),
        features=np.stack(features),
        lengths=np.array([len(d.tokens) for d in documents], np.int32),
        prompt_lengths=np.array([len(d.prompt) for d in documents], np.int32),
        hidden_state_indices=hidden_state_indices,
        target=name,
    )


@dataclass(frozen=True)
class Verdict:
    """How a drafter fares on a trace: `accepted[i]` drafts of the i-th anchor were the trace's own next tokens."""

    accepted: np.ndarray
    num_speculative_tokens: int

    @property
    def accepted_length(self) -> float:
        """Tokens per verify, the target's own included, if every position were an anchor."""
        return 1 + float(np.mean(self.accepted)) if len(self.accepted) else float("nan")

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of anchors at which the first i + 1 drafts were right."""
        if not len(self.accepted):
            return []
        return [float(np.mean(self.accepted > i)) for i in range(self.num_speculative_tokens)]


def judge(engine: Any, trace: Trace, *, stride: int = 1, advance: Callable[[int], Any] = lambda done: None) -> Verdict:
    """Draft at every `stride`-th position of the target's own text, the context before it given (teacher-forced), and count
    the drafts that the text goes on with. Greedy drafts; `engine` is a captured `DraftEngine` of either package. Raises
    InputError for the trace of another target's hidden states."""
    config: DraftConfig = engine.config.draft
    K = engine.config.num_speculative_tokens
    check_trace(trace, config)
    documents = trace.documents()
    accepted: list[int] = []
    for first in range(0, len(documents), engine.config.max_num_seqs):
        batch = documents[first : first + engine.config.max_num_seqs]
        live = {first + i: document for i, document in enumerate(batch)}
        at = dict.fromkeys(live, 0)
        for name, (tokens, _, _) in live.items():
            engine.add_request(name, len(tokens))
        while live:
            counts = {name: _next_rows(engine, at[name], document[2], stride) for name, document in live.items()}
            ended = [name for name, (tokens, _, _) in live.items() if at[name] + counts[name] + K >= len(tokens)]
            for name in ended:
                engine.remove_request(name)
                del live[name]
            if not live:
                break
            names = list(live)
            ends = {name: at[name] + counts[name] for name in names}
            rows = np.concatenate([live[name][1][at[name] : ends[name]] for name in names])
            count = np.array([counts[name] for name in names], np.int32)
            step = TargetStep(
                request_ids=names,
                num_context=count,
                num_rejected=0 * count,
                num_sampled=0 * count + 1,
                last_sampled=np.array([live[name][0][ends[name]] for name in names], np.int32),
                next_prefill=0 * count,
            )
            for name, drafts in zip(names, engine.propose(step, rows), strict=True):
                at[name] = ends[name]
                tokens, _, prompt = live[name]
                if at[name] >= prompt:
                    right = drafts == tokens[at[name] + 1 : at[name] + 1 + K]
                    accepted.append(int(np.cumprod(right).sum()))
        advance(min(first + len(batch), len(documents)))
    return Verdict(np.array(accepted, np.int64), K)


def _next_rows(engine: Any, at: int, prompt: int, stride: int) -> int:
    """Context rows before a document's next anchor: its prompt in chunks that fit beside the others, then strides."""
    if at >= prompt:
        return stride
    return min(prompt - at, engine.config.max_num_batched_tokens // engine.config.max_num_seqs)


def check_trace(trace: Trace, config: DraftConfig) -> None:
    """Whether a drafter reads such features. Raises InputError."""
    if trace.hidden_state_indices != config.hidden_state_indices or trace.features.shape[1] != config.feature_size:
        raise InputError(
            f"the trace of {trace.target} holds hidden states {list(trace.hidden_state_indices)}, "
            f"{trace.features.shape[1]} wide in all; the drafter reads {list(config.hidden_state_indices)}, "
            f"{config.feature_size} wide; record one of its own target"
        )
    if trace.features.dtype not in (np.float32, ml_dtypes.bfloat16):
        raise InputError(f"the trace's features are {trace.features.dtype}; expected float32 or bfloat16")
