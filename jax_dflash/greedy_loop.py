"""Greedy speculative decoding around a target: what each target step did, and the text it produced.

The loop proposes nothing itself: its caller passes each step to one drafter or several and gives drafts back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_dflash.batch import TargetStep
from jax_dflash.target import TargetRunner

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
    checked drafts to the target's own tokens at those rows and the bonus row."""

    joined: list[Answer]
    left: list[Answer]
    step: TargetStep | None
    features: np.ndarray
    verified: dict[int, np.ndarray]


class GreedyLoop:
    """Continuous batching over prompts; a long prompt is prefilled in chunks while the others decode."""

    def __init__(
        self, runner: TargetRunner, prompts: list[list[int]], *, max_new_tokens: int, chunk: int, eos: int | None
    ):
        self.runner, self.max_new_tokens, self.chunk, self.eos = runner, max_new_tokens, chunk, eos
        self.waiting = list(enumerate(prompts))[::-1]
        self.live: list[Answer] = []
        self.finished: list[Answer] = []
        self._free_rows = list(range(runner.max_num_seqs))[::-1]

    @property
    def done(self) -> bool:
        return not self.waiting and not self.live

    def advance(self) -> LoopStep:
        """Admit a few requests, run the target once over all live ones, and retire those that are finished."""
        joined = []
        for _ in range(1 + self.runner.max_num_seqs // 16):
            if self.waiting and self._free_rows:
                request_id, prompt = self.waiting.pop()
                joined.append(Answer(request_id, prompt, self._free_rows.pop(), list(prompt)))
        self.live += joined
        news = [self._next_rows(answer) for answer in self.live]
        next_tokens, features = self.runner.run([a.row for a in self.live], [a.computed for a in self.live], news)

        offsets = np.cumsum([0, *map(len, news)])
        verified, columns, kept, left = {}, [], [], []
        for i, (answer, new, own) in enumerate(zip(self.live, news, next_tokens, strict=True)):
            if answer.drafts:
                verified[answer.request_id] = own
            columns.append(self._take(answer, new, own))
            if self._finished(answer):
                left.append(answer)
            else:
                kept.append(i)
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

    def _take(self, answer: Answer, new: list[int], own: np.ndarray) -> tuple[int, int, int, int, int]:
        """Accept drafts while they are the target's own tokens; the columns of the request in its TargetStep."""
        answer.computed += len(new)
        if answer.computed < len(answer.prompt):
            return len(new), 0, 0, 0, answer.prompt[answer.computed]
        accepted = 0
        while accepted < len(answer.drafts) and answer.drafts[accepted] == own[accepted]:
            accepted += 1
        num_rejected = len(answer.drafts) - accepted
        answer.computed -= num_rejected
        answer.steps += bool(answer.drafts)
        emitted = [*answer.drafts[:accepted], int(own[len(new) - 1 - num_rejected])]
        if self.eos in emitted:
            emitted = emitted[: emitted.index(self.eos) + 1]
        answer.extend(emitted)
        return len(new), num_rejected, len(emitted), emitted[-1], 0

    def _finished(self, answer: Answer) -> bool:
        full = len(answer.generated) >= self.max_new_tokens
        return full or answer.looped or answer.tokens[-1] == self.eos

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
