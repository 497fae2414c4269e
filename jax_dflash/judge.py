"""The verb `judge`: how a drafter fares on a trace, by the text that its target wrote, without running the target.

A anchors of one document, n requests of a step, K drafts.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError, check_pair
from jax_dflash.traces import Document, Trace, check_features, check_target, load_trace

CHUNK = 64  # rows of one prompt in a step


@dataclass(frozen=True)
class Verdict:
    """What was counted: `accepted[d][i]` drafts at the i-th anchor of document d were the trace's own next tokens."""

    accepted: list[list[int]]
    num_speculative_tokens: int
    stride: int

    @property
    def num_anchors(self) -> int:
        return sum(map(len, self.accepted))

    @property
    def accepted_length(self) -> float:
        """Tokens per verify, the target's own included, if every anchor were visited once."""
        return 1 + sum(map(sum, self.accepted)) / self.num_anchors

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of anchors at which the first i + 1 drafts were right."""
        counts = np.concatenate(self.accepted)
        return [float(np.mean(counts > i)) for i in range(self.num_speculative_tokens)]

    @property
    def verifies(self) -> list[list[int]] | None:
        """Drafts accepted at the anchors that a greedy loop visits: after each verify, the target's own token. The same
        context gives the same drafts, so this is what the loop does on this text. None unless every position was an
        anchor."""
        return [_visited(counts) for counts in self.accepted] if self.stride == 1 else None

    @property
    def tau(self) -> float | None:
        """The loop's accepted length over `verifies`, pooled."""
        if self.verifies is None:
            return None
        visited = [count for counts in self.verifies for count in counts]
        return 1 + sum(visited) / len(visited)


def _visited(counts: list[int]) -> list[int]:
    visited, at = [], 0
    while at < len(counts):
        visited.append(counts[at])
        at += counts[at] + 1
    return visited


@dataclass
class Reader:
    """One document on its way through the drafter: the `stored` first tokens are its context."""

    number: int
    document: Document
    stored: int = 0
    accepted: list[int] = field(default_factory=list)

    def next_anchor(self, stride: int, chunk: int) -> int:
        """Where the next step's block begins: in the prompt after a chunk, then at each anchor, the first generated token
        being the first."""
        left = self.document.prompt_length - self.stored
        return self.stored + (min(left, chunk) if left > 0 else stride)

    def take(self, anchor: int, drafts: np.ndarray) -> None:
        """Count the drafts behind an anchor, those of the prompt apart."""
        self.stored = anchor
        if anchor >= self.document.prompt_length:
            right = drafts == self.document.tokens[anchor + 1 : anchor + 1 + len(drafts)]
            self.accepted.append(int(np.cumprod(right).sum()))


def num_anchors(document: Document, num_speculative_tokens: int, stride: int) -> int:
    """Every `stride`-th generated token that as many more follow as are drafted."""
    return len(range(document.prompt_length, len(document.tokens) - num_speculative_tokens, stride))


def judge(
    engine: Any, trace: Trace, *, stride: int = 1, advance: Callable[[int], Any] = lambda anchors: None
) -> Verdict:
    """Draft at every `stride`-th token of the target's own text, the context before it given (teacher-forced), and count
    the drafts with which the text goes on.

    `engine` is a captured `DraftEngine` of either package that keeps its own pages. Documents too short for an anchor are
    left out. `advance` is told how many anchors are done. Raises InputError.
    """
    K, n = engine.config.num_speculative_tokens, engine.config.max_num_seqs
    check_features(trace, engine.config.draft)
    chunk = engine.config.max_num_batched_tokens // n
    if not 1 <= stride <= chunk:
        raise InputError(f"stride={stride}; pass 1 to {chunk}, the rows of a request in a step")
    waiting = deque(Reader(i, d) for i, d in enumerate(trace.documents) if num_anchors(d, K, stride))
    if not waiting:
        raise InputError(
            f"no token of the trace's continuations is followed by {K} more; record with a larger --max-new-tokens or judge "
            "fewer drafts"
        )
    readers, live, done = list(waiting), [], 0
    while waiting or live:
        while waiting and len(live) < n:
            live.append(waiting.popleft())
            engine.add_request(live[-1].number, live[-1].document.prompt_length)
        anchors = [reader.next_anchor(stride, chunk) for reader in live]
        drafts = engine.propose(*_step(live, anchors))
        for reader, anchor, row in zip(list(live), anchors, drafts, strict=True):
            reader.take(anchor, row)
            if len(reader.accepted) == num_anchors(reader.document, K, stride):
                engine.remove_request(reader.number)
                live.remove(reader)
                done += len(reader.accepted)
        advance(done + sum(len(reader.accepted) for reader in live))
    return Verdict([reader.accepted for reader in readers], K, stride)


def _step(live: list[Reader], anchors: list[int]) -> tuple[TargetStep, np.ndarray]:
    """The step that brings each document's context up to its anchor, and the features of its rows."""
    zeros = np.zeros(len(live), np.int32)
    step = TargetStep(
        request_ids=[reader.number for reader in live],
        num_context=np.array(anchors, np.int32) - np.array([reader.stored for reader in live], np.int32),
        num_rejected=zeros,
        num_sampled=zeros + 1,
        last_sampled=np.array([r.document.tokens[a] for r, a in zip(live, anchors, strict=True)], np.int32),
        next_prefill=zeros,
    )
    rows = [r.document.features[r.stored : a] for r, a in zip(live, anchors, strict=True)]
    return step, np.concatenate(rows)


@dataclass(frozen=True, kw_only=True)
class JudgeJob:
    """What the command line asked for. `target` is needed by a drafter that shares its embedding or LM head."""

    trace: Path
    checkpoint: Path
    target: Path | None
    pair: str
    stride: int
    framework: str
    device: str
    num_speculative_tokens: int | None
    max_num_seqs: int


def load_engine(job: JudgeJob, trace: Trace) -> Any:
    """The drafter in the trace's dtype, with no more of its target than the two tables. Raises InputError."""
    package, place, mode = "jax_dflash", (), {}
    if job.framework == "torch":
        package, place = "torch_ref", ({"cpu": "cpu", "gpu": "cuda"}[job.device],)
        mode = {"mode": {"cpu": "eager", "gpu": "cuda_graph"}[job.device]}
    rooms = ("drafter", "engine", "modules", "numerics", "weights")
    drafter, engine, modules, numerics, weights = (import_module(f"{package}.{room}") for room in rooms)
    dtype = numerics.as_dtype(trace.dtype)
    config, module = drafter.load_drafter(job.checkpoint, dtype, *place)
    own = modules.tensors(module)
    check_features(trace, config)
    config = check_pair(config, trace.target.config, own)
    shared = (None, None)
    if not {"embed_tokens.weight", "lm_head.weight"} <= set(own):
        if job.target is None:
            raise InputError("this drafter shares its target's embedding or LM head; pass --target DIR")
        shared = weights.load_tables(job.target, trace.target.config, dtype, *place)
    n = min(job.max_num_seqs, len(trace.documents))
    K = config.max_speculative_tokens if job.num_speculative_tokens is None else job.num_speculative_tokens
    return engine.DraftEngine(
        config,
        drafter.pack_drafter(module, config, *shared),
        max_num_seqs=n,
        max_model_len=max(K + 2, *(len(document.tokens) for document in trace.documents)),
        num_speculative_tokens=K,
        max_num_batched_tokens=n * max(K + 1, CHUNK),
        ladder=BucketLadder([n * (K + 1)], max_num_seqs=n, query_lens=K + 1),  # one: nothing is timed here
        **mode,
    )


def run(job: JudgeJob, *, progress: bool = True) -> dict[str, Any]:
    """Judge; the JSON document of the command line. Raises InputError."""
    for name in ("stride", "max_num_seqs"):
        if getattr(job, name) < 1:
            raise InputError(f"{name}={getattr(job, name)}; pass at least 1")
    trace = load_trace(job.trace)
    if job.target is not None:
        check_target(trace, job.target)
    engine = load_engine(job, trace)
    engine.capture(progress=progress)
    K = engine.config.num_speculative_tokens
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress, transient=True) as bar:
        total = sum(num_anchors(document, K, job.stride) for document in trace.documents)
        task = bar.add_task("Judging anchors", total=total)
        verdict = judge(engine, trace, stride=job.stride, advance=lambda anchors: bar.update(task, completed=anchors))
    return {
        "job": "judge", "ok": True, "pair": job.pair, "target": trace.target.name, "digest": trace.target.digest,
        "framework": job.framework, "device": job.device, "dtype": trace.dtype, "num_speculative_tokens": K,
        "stride": job.stride, "accepted_length": round(verdict.accepted_length, 4),
        "tau": None if verdict.tau is None else round(verdict.tau, 4),
        "acceptance_by_position": [round(share, 4) for share in verdict.acceptance_by_position],
        "anchors": verdict.num_anchors, "documents": len(verdict.accepted),
    }  # fmt: skip


def summary(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    by_position = " ".join(f"{share:.2f}" for share in result["acceptance_by_position"])
    lines = [
        f"accepted length {result['accepted_length']:.2f} tokens per verify over {result['anchors']} anchors of "
        f"{result['documents']} documents, K={result['num_speculative_tokens']} ({result['framework']}, {result['dtype']})",
        f"accepted by position: {by_position}",
    ]
    if result["tau"] is not None:
        lines.append(f"a greedy loop over this text accepts {result['tau']:.2f} tokens per verify")
    return lines
