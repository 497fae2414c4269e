"""Greedy speculative decoding around a target: what each target step did, and the text it produced.

The loop proposes nothing itself: its caller passes each step to one drafter or several and gives drafts back.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_dflash.batch import TargetStep
from jax_dflash.target_batch import TargetBatch
from jax_dflash.target_runner import TargetRunner

REPEAT = 32  # an answer that repeats 32 tokens in a row has begun to loop, and easy loops would flatter the drafter


@dataclass
class Answer:
    """One request: its prompt and what followed. `computed` tokens have gone through the target."""

    request_id: int
    prompt: list[int]
    row: int
    tokens: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    steps: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)
    looped: bool = False

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def accepted_length(self) -> float:
        """Tokens per target step, the bonus token counted; the prompt's own token came with the prefill."""
        return (len(self.generated) - 1) / self.steps

    def extend(self, new: Sequence[int]) -> None:
        """Append emitted tokens, and see whether the text has begun to repeat itself."""
        for token in new:
            self.tokens.append(int(token))
            gram = tuple(self.generated[-REPEAT:])
            if len(gram) == REPEAT:
                self.looped |= gram in self.seen
                self.seen.add(gram)


@dataclass(frozen=True)
class LoopStep:
    """Requests that joined and left, and the target step that the remaining ones made. `verified` maps a request that
    checked drafts to the target's own tokens as far as it emitted them, 0 behind."""

    joined: list[Answer]
    left: list[Answer]
    step: TargetStep | None
    features: np.ndarray
    verified: dict[int, np.ndarray]


def num_pages(max_num_seqs: int, max_model_len: int, page_size: int = 16) -> int:
    """Pages with which every row of a batch has max_model_len to itself, and the null page."""
    return 1 + max_num_seqs * -(-max_model_len // page_size)


class GreedyLoop:
    """Continuous batching over prompts; a long prompt is prefilled in chunks while the others decode. Each row of the batch
    owns its pages for good: the runner has `num_pages` of them. Tokens of `eos` end an answer."""

    def __init__(
        self, runner: TargetRunner, prompts: list[list[int]], *, max_new_tokens: int, chunk: int, eos: Collection[int]
    ):
        self.runner, self.max_new_tokens, self.chunk, self.eos = runner, max_new_tokens, chunk, eos
        self.waiting = list(enumerate(prompts))[::-1]
        self.live: list[Answer] = []
        self.finished: list[Answer] = []
        num_rows, width = runner.limits.max_num_seqs, runner.limits.table_width
        self._free_rows = list(range(num_rows))[::-1]
        self._tables = 1 + np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.live

    def advance(self) -> LoopStep:
        """Admit a few requests, run the target once over all live ones, and retire those that are finished."""
        joined = []
        for _ in range(1 + self.runner.limits.max_num_seqs // 16):
            if self.waiting and self._free_rows:
                request_id, prompt = self.waiting.pop()
                joined.append(Answer(request_id, prompt, self._free_rows.pop(), list(prompt)))
        self.live += joined
        news = [self._next_rows(answer) for answer in self.live]
        output = self.runner.run(
            TargetBatch(
                tokens=news,
                start=[a.computed for a in self.live],
                num_drafts=[len(a.drafts) for a in self.live],
                block_tables=self._tables[[a.row for a in self.live]],
            )
        )

        offsets = np.cumsum([0, *map(len, news)])
        verified, columns, kept, left = {}, [], [], []
        for i, (answer, new) in enumerate(zip(self.live, news, strict=True)):
            if answer.drafts:
                verified[answer.request_id] = output.tokens[i]
            columns.append(self._take(answer, new, output.tokens[i, : output.num_sampled[i]].tolist()))
            if self._finished(answer):
                left.append(answer)
            else:
                kept.append(i)
        features = np.asarray(output.features)
        features = np.concatenate([features[offsets[i] : offsets[i + 1]] for i in kept] or [features[:0]])
        step = self._step([self.live[i] for i in kept], [columns[i] for i in kept]) if kept else None
        self.live = [self.live[i] for i in kept]
        self.finished += left
        self._free_rows += [answer.row for answer in left]
        return LoopStep(joined, left, step, features, verified)

    def _next_rows(self, answer: Answer) -> list[int]:
        if answer.computed < len(answer.prompt):
            return answer.prompt[answer.computed : answer.computed + self.chunk]
        return [answer.tokens[-1], *answer.drafts]

    def _take(self, answer: Answer, new: list[int], emitted: list[int]) -> tuple[int, int, int, int, int]:
        """Append the accepted drafts and the target's own token; the columns of the request in its TargetStep."""
        answer.computed += len(new)
        if answer.computed < len(answer.prompt):
            return len(new), 0, 0, 0, answer.prompt[answer.computed]
        num_rejected = len(answer.drafts) + 1 - len(emitted)
        answer.computed -= num_rejected
        answer.steps += bool(answer.drafts)
        end = next((i for i, token in enumerate(emitted) if token in self.eos), len(emitted))
        emitted = emitted[: end + 1]
        answer.extend(emitted)
        return len(new), num_rejected, len(emitted), emitted[-1], 0

    def _finished(self, answer: Answer) -> bool:
        full = len(answer.generated) >= self.max_new_tokens
        return full or answer.looped or answer.tokens[-1] in self.eos

    def _step(self, answers: list[Answer], columns: list[tuple]) -> TargetStep:
        names = ("num_context", "num_rejected", "num_sampled", "last_sampled", "next_prefill")
        fields = {
            name: np.array(values, np.int32) for name, values in zip(names, zip(*columns, strict=True), strict=True)
        }
        return TargetStep(request_ids=[a.request_id for a in answers], **fields)

    def set_drafts(self, step: TargetStep, drafts: np.ndarray) -> None:
        """Drafts `[n, K]` to verify next; a request whose prompt is not finished has no use for its own."""
        by_id = {answer.request_id: answer for answer in self.live}
        for request_id, row in zip(step.request_ids, drafts, strict=True):
            answer = by_id[request_id]
            answer.drafts = row.tolist() if answer.computed >= len(answer.prompt) else []
