"""The verb `record`: the target's hidden states and tokens of real text, and of its own greedy continuation, as a trace.

T tokens of one document, F feature width, R rows of a step.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.progress import Progress

from jax_dflash import excerpts
from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError, check_pair, load_draft_config, load_target_config
from jax_dflash.decoding import DecodeLoop, DecoderSizes, Generation
from jax_dflash.generate import encode
from jax_dflash.names import match_draft
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.traces import Document, Trace, TracedTarget

PROMPT_LENGTHS = (24, 200, 57, 330, 101, 16, 260, 150)  # tokens of the shipped prompts, in turn
CHUNK, PAGE_SIZE = 64, 16
REPEAT = 32  # a text whose last 32 tokens occurred before has begun to loop, and easy loops would flatter a drafter


@dataclass(frozen=True, kw_only=True)
class RecordJob:
    """What the command line asked for. `name` is the target's, for people; `checkpoint` is the drafter that says which
    hidden states; without `prompts`, `num_prompts` of the shipped ones."""

    out: Path
    name: str
    target: Path
    checkpoint: Path
    prompts: list[str] | None
    num_prompts: int
    max_new_tokens: int
    max_num_seqs: int
    max_model_len: int
    device: str
    dtype: str


class Recorder:
    """What a `DecodeLoop` calls with its features: keeps the rows of every request by their positions. Rows that ran again,
    after a preemption or a rejection, stand for those before."""

    def __init__(self):
        self._pieces: dict[Any, list[tuple[int, np.ndarray]]] = defaultdict(list)

    def __call__(self, step: TargetStep, features: Float[Any, "R F"]) -> None:
        assert step.start_position is not None, "the loop names it"
        rows, at = np.asarray(features), 0
        for request_id, start, count in zip(step.request_ids, step.start_position, step.num_context, strict=True):
            self._pieces[request_id].append((int(start), rows[at : at + count].copy()))
            at += count

    def documents(self, generations: Sequence[Generation]) -> list[Document]:
        """Finished generations with the rows that were seen. Raises InputError for one that the loop refused."""
        if refused := [g for g in generations if g.finish_reason == "refused"]:
            raise InputError(str(refused[0].error))
        return [Document(np.array(g.tokens, np.int32), self._rows(g), len(g.prompt)) for g in generations]

    def _rows(self, generation: Generation) -> Float[np.ndarray, "T-1 F"]:
        pieces, size = self._pieces.pop(generation.request_id), len(generation.tokens) - 1
        rows, seen = np.zeros((size, pieces[0][1].shape[1]), pieces[0][1].dtype), np.zeros(size, bool)
        for start, piece in pieces:
            end = start + len(piece)
            rows[start:end], seen[start:end] = piece[: max(0, size - start)], True
        assert seen.all(), "a token whose features the loop did not show"
        return rows


def record(job: RecordJob, *, progress: bool = True) -> dict[str, Any]:
    """Write the trace; the JSON document of the command line. Raises InputError."""
    from jax_dflash.numerics import as_dtype
    from jax_dflash.target import load_target, pack_target
    from jax_dflash.target_runner import TargetRunner

    draft, config = load_draft_config(job.checkpoint), load_target_config(job.target)
    check_pair(draft, config, match_draft(job.checkpoint, draft).sources)
    for name in ("num_prompts", "max_num_seqs"):
        if getattr(job, name) < 1:
            raise InputError(f"{name}={getattr(job, name)}; pass at least 1")
    params = SamplingParams(max_new_tokens=job.max_new_tokens)
    if job.prompts is None:
        prompts = excerpts.prompts(job.target, job.num_prompts, PROMPT_LENGTHS)
    else:
        prompts = encode(job.target, job.prompts, job.max_model_len)
    n = min(job.max_num_seqs, len(prompts))
    sizes: dict[str, Any] = {
        "num_speculative_tokens": 0, "max_num_seqs": n, "max_model_len": job.max_model_len, "page_size": PAGE_SIZE,
        "num_pages": DecoderSizes.num_pages(n, job.max_model_len, PAGE_SIZE),
    }  # fmt: skip

    _, target = load_target(job.target, as_dtype(job.dtype))
    runner = TargetRunner(
        config,
        pack_target(target, config),
        taps=draft.hidden_state_indices,
        widths=(1, CHUNK),
        max_num_batched_tokens=n * CHUNK,
        # One bucket: recording is no measurement, and a target program compiles for seconds.
        ladder=BucketLadder([n], max_num_seqs=n, query_lens=1),
        **sizes,
    )
    recorder = Recorder()
    loop = DecodeLoop(
        runner, None, chunk=CHUNK, prompts_per_step=n, eos_token_ids=config.eos_token_ids, repeat=REPEAT,
        on_features=recorder, **sizes,
    )  # fmt: skip
    for prompt in prompts:
        loop.add(prompt, params)
    runner.capture(progress=progress)
    with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
        task = bar.add_task("Recording documents", total=len(prompts))
        while not loop.done:
            loop.step()
            bar.update(task, completed=len(loop.finished))
    generations = loop.run()
    trace = Trace(recorder.documents(generations), draft.hidden_state_indices, TracedTarget.of(job.target, job.name))
    trace.save(job.out)
    return {
        "job": "record", "ok": True, "out": str(job.out), "target": trace.target.name, "digest": trace.target.digest,
        "hidden_state_indices": list(trace.hidden_state_indices), "device": job.device, "dtype": trace.dtype,
        "documents": len(trace.documents), "tokens": sum(len(g.tokens) for g in generations),
        "generated": sum(len(g.generated) for g in generations), "bytes": job.out.stat().st_size,
        "finish_reasons": [g.finish_reason for g in generations],
    }  # fmt: skip
