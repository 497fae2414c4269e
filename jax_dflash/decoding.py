"""The loop around a target and a drafter: continuous batching, chunked prefill, acceptance, pages and stop conditions.

Plain Python and numpy: both frameworks run it, with any objects that have the call surface of `Target` and `Drafter`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from jax_dflash.batch import EngineConfig, TargetStep
from jax_dflash.buckets import BucketLadder, GraphMode
from jax_dflash.config import InputError
from jax_dflash.pages import NULL_PAGE, PageAllocator, PrefixCache
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.target_batch import TargetBatch, TargetOutput

# Rounds of the first call of a loop on the device; each later one has twice as many, up to its most: the first text comes
# soon, and what a call costs is shared by many rounds in the end.
FIRST_ROUNDS = 8


class Target(Protocol):
    """A target over paged K/V, whose pages the loop owns: `TargetRunner` of either package."""

    def run(self, batch: TargetBatch, draft_logits: Any = None) -> TargetOutput: ...


class Drafter(Protocol):
    """A drafter: `DraftEngine` of either package, with `external_pages=True`."""

    draft_logits: Any  # of the last drafts by request index, where they are sampled, else None

    def add_request(
        self, request_id, num_prompt_tokens: int = 0, cached_tokens: int = 0, params: SamplingParams | None = None
    ) -> None: ...

    def request_index(self, request_id) -> int: ...

    def remove_request(self, request_id) -> None: ...

    def propose(self, step: TargetStep, features, num_speculative_tokens: int | None = None) -> np.ndarray: ...


class Rounds(Protocol):
    """Several decoding rounds without the host: `device_loop.DeviceLoop`."""

    max_rounds: int

    def run(
        self,
        batch: "Sequence[Generation]",
        block_tables: np.ndarray,
        *,
        budgets: list[int],
        num_rounds: int,
        stop_at_finish: bool,
    ) -> "list[RoundsOf]": ...


class RoundsOf(NamedTuple):
    """One request's rounds: the tokens that each emitted, of how many drafts, and the drafts to verify next."""

    emitted: list[list[int]]
    num_verified: list[int]
    drafts: list[int]


@dataclass
class Generation:
    """One prompt and what followed it. `computed` tokens have been through the target, so all but the last one of a request
    that is decoding. `finish_reason` is None while it runs, then eos, length, context (the model's positions are used up),
    repeat, or refused with the reason in `error`."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    context_start: int = 0  # the drafter has the context of positions from here
    context_end: int = 0  # to here
    finish_reason: str | None = None
    error: str | None = None
    accepted: list[int] = field(default_factory=list)  # drafts accepted in each verify
    proposed: list[int] = field(default_factory=list)  # of so many
    seen: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def prefilling(self) -> bool:
        """Whether more than its last token still has to go through the target; true again after a preemption."""
        return len(self.tokens) - self.computed > 1 or not self.num_generated

    @property
    def accepted_length(self) -> float:
        """Tokens per verify, the target's own included; NaN before the first."""
        return 1 + sum(self.accepted) / len(self.accepted) if self.accepted else float("nan")


def accepted_length(generations: Sequence[Generation]) -> float:
    """tau pooled over the verifies of all generations: accepted drafts and the target's own token."""
    steps = sum(len(g.accepted) for g in generations)
    return 1 + sum(sum(g.accepted) for g in generations) / steps if steps else float("nan")


def acceptance_by_position(generations: Sequence[Generation]) -> list[float]:
    """For each draft position the share of the verifies that reached for it in which it was accepted."""
    accepted = np.array([a for g in generations for a in g.accepted], np.int64)
    proposed = np.array([p for g in generations for p in g.proposed], np.int64)
    return [float(np.mean(accepted[proposed > i] > i)) for i in range(proposed.max(initial=0))]


class DecoderSizes(NamedTuple):
    """The arguments that a runner and a loop take so that they fit an engine."""

    runner: dict[str, Any]
    loop: dict[str, Any]

    @staticmethod
    def num_pages(max_num_seqs: int, max_model_len: int, page_size: int) -> int:
        """Pages with which every request can grow to max_model_len, the null page among them."""
        return 1 + max_num_seqs * -(-max_model_len // page_size)

    @classmethod
    def of(cls, config: EngineConfig, ladder: BucketLadder, chunk: int) -> "DecoderSizes":
        """`chunk`: prompt rows of one request in a step. Raises InputError."""
        rows = config.max_num_batched_tokens
        if not 1 <= chunk <= rows:
            raise InputError(f"chunk={chunk}; pass 1 to max_num_batched_tokens={rows}")
        fitting = [d.padded_reqs for d in ladder.capture_order(GraphMode.FULL) if d.padded_reqs * chunk <= rows]
        if not fitting:
            raise InputError(
                f"chunk={chunk}: so many rows of each request fit max_num_batched_tokens={rows} in no bucket; "
                "pass a smaller chunk or a larger max_num_batched_tokens"
            )
        names = "num_speculative_tokens", "max_num_seqs", "max_model_len", "page_size"
        same = {name: getattr(config, name) for name in names} | {"num_pages": min(config.num_pages)}
        return cls(
            runner=same | {"max_num_batched_tokens": rows, "widths": (1, config.query_len, chunk)},
            loop=same | {"chunk": chunk, "prompts_per_step": max(fitting)},
        )


class DecodeLoop:
    """Decodes prompts with a target, and with a drafter if there is one.

    A step is a target batch of one kind: prompts, in chunks, or verifies; where both wait they take turns. A request gets
    pages as it grows. Without free pages the youngest request gives its own back and runs again later, from the tokens it
    has; a prompt that no empty pool could hold is refused, and the others go on.

    Args:
        target, drafter: what runs; without a drafter one token a step is decoded.
        rounds: runs verifies and drafts in its place, several in a row.
        num_speculative_tokens: K, drafts verified per request and step.
        prefix_cache: pages of earlier prompts; its allocator is the loop's. A page that the drafter lacks is a hit too: then
            no draft sees what is before the first token that runs.
        num_pages, page_size: of the pool that target and drafter index with the same pages; page 0 is the null page.
        chunk: prompt rows of one request in a step.
        prompts_per_step: prompts whose chunks run in one step.
        eos_token_ids: tokens that end a generation.
        schedule_k: drafts to ask for, given the number of live requests; default K always.
        repeat: end a generation whose last so many tokens have occurred before.
        joins_per_step: requests admitted in one step at most.
        on_tokens: called with (generation, new tokens, how many of them were drafts) as they are accepted.
        on_features: called with each step of the target and its features, also the last of a request.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        *,
        num_speculative_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_pages: int,
        rounds: Rounds | None = None,
        prefix_cache: PrefixCache | None = None,
        page_size: int = 16,
        chunk: int = 256,
        prompts_per_step: int = 1,
        eos_token_ids: tuple[int, ...] = (),
        schedule_k: Callable[[int], int] | None = None,
        repeat: int | None = None,
        joins_per_step: int | None = None,
        on_tokens: Callable[[Generation, list[int], int], Any] | None = None,
        on_features: Callable[[TargetStep, Any], Any] | None = None,
    ):
        self.target, self.drafter, self.rounds = target, drafter, rounds
        self.num_speculative_tokens = num_speculative_tokens if drafter is not None else 0
        self.max_num_seqs, self.max_model_len, self.page_size = max_num_seqs, max_model_len, page_size
        self.chunk, self.prompts_per_step = chunk, prompts_per_step
        self.eos_token_ids, self.schedule_k, self.repeat = eos_token_ids, schedule_k, repeat
        self.joins_per_step, self.on_tokens = joins_per_step or max_num_seqs, on_tokens
        self.on_features = on_features
        self.prefix_cache = prefix_cache
        self.allocator = PageAllocator(num_pages) if prefix_cache is None else prefix_cache.allocator
        self.waiting: deque[Generation] = deque()
        self.live: list[Generation] = []
        self.finished: list[Generation] = []
        self.num_steps = 0
        self._decoded_last = True
        self._next_rounds = FIRST_ROUNDS

    def add(self, prompt: Sequence[int], params: SamplingParams) -> Generation:
        """Queue a prompt. Raises InputError for one that is empty or leaves no position to generate at."""
        if not prompt:
            raise InputError("the prompt is empty; pass at least one token")
        if len(prompt) >= self.max_model_len:
            raise InputError(
                f"a prompt of {len(prompt)} tokens leaves no room in max_model_len={self.max_model_len}; shorten it or pass "
                "a larger max_model_len"
            )
        number = len(self.waiting) + len(self.live) + len(self.finished)
        generation = Generation(number, list(map(int, prompt)), params, list(map(int, prompt)))
        self.waiting.append(generation)
        return generation

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        generations: list[Generation] | None = None,
    ) -> list[Generation]:
        """Continue each prompt; the generations in the order of the prompts. The list passed in is filled at the start, so
        that who interrupts has the texts so far."""
        generations = [] if generations is None else generations
        generations += [self.add(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        try:
            return self.run()
        finally:
            self.close()

    def run(self) -> list[Generation]:
        """Decode everything that was added; the generations in the order in which they were added."""
        while not self.done:
            self.step()
        return sorted(self.finished, key=lambda g: g.request_id)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.live

    def step(self) -> None:
        """Admit, run the target once, accept, draft, retire."""
        self._admit()
        batch, decode = self._choose()
        if batch and decode and self.rounds is not None:
            self._run_rounds(self.rounds, batch)
        elif batch:
            self._run_target(batch, decode)
        for generation in batch:
            if generation.finish_reason is not None:
                self._retire(generation)

    def close(self) -> None:
        """Give up what is not finished, as after an interrupt; the texts so far stay in the generations."""
        for generation in list(self.live):
            self._retire(generation)

    def _run_target(self, batch: list[Generation], decode: bool) -> None:
        rows = [self._next_rows(g) for g in batch]
        output = self.target.run(
            TargetBatch(
                tokens=rows,
                start=np.array([g.computed for g in batch], np.int32),
                num_drafts=np.array([len(new) - 1 if decode else 0 for new in rows], np.int32),
                block_tables=self.block_tables(batch),
                params=[g.params for g in batch],
                history=[g.tokens for g in batch],
                request_index=[self._request_index(g) for g in batch],
            ),
            None if self.drafter is None else self.drafter.draft_logits,
        )
        self.num_steps += 1
        step = self._accept(batch, rows, decode, output)
        if self.on_features is not None:
            self.on_features(step, output.features)
        if self.drafter is not None:
            self._draft(batch, step, output.features)

    def _run_rounds(self, rounds: Rounds, batch: list[Generation]) -> None:
        """Decode until a request ends, if another waits, or needs pages, or the rounds are used up."""
        budgets = [self._budget(g) for g in batch]
        num_rounds = min(self._next_rounds, rounds.max_rounds)
        self._next_rounds *= 2
        for generation, budget in zip(batch, budgets, strict=True):
            Q = self.num_speculative_tokens + 1
            most = min(num_rounds * Q, budget) + 2 * Q
            wanted = self.pages_for(generation.computed + most) - len(generation.pages)
            generation.pages += self.allocator.allocate(max(0, min(wanted, self.allocator.num_free)))
        found = rounds.run(
            batch,
            self.block_tables(batch),
            budgets=budgets,
            num_rounds=num_rounds,
            stop_at_finish=bool(self.waiting),
        )
        for generation, own in zip(batch, found, strict=True):
            for emitted, num_drafts in zip(own.emitted, own.num_verified, strict=True):
                if generation.finish_reason is None:
                    self.take(generation, emitted, num_drafts)
            generation.drafts, generation.context_end = own.drafts, generation.computed
        self.num_steps += max(len(own.emitted) for own in found)

    def _budget(self, generation: Generation) -> int:
        """Tokens that a generation may still emit."""
        left = generation.params.max_new_tokens - generation.num_generated
        return min(left, self.max_model_len - len(generation.tokens))

    # Admission and pages

    def pages_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.max_model_len) // self.page_size)

    def _end(self, generation: Generation, num_rows: int) -> int:
        """Positions that a step of so many rows needs pages for: the rows, and the block that is drafted after them."""
        return generation.computed + num_rows + self.num_speculative_tokens + 1

    def _admit(self) -> None:
        for _ in range(self.joins_per_step):
            if not self.waiting or len(self.live) == self.max_num_seqs:
                return
            generation = self.waiting[0]
            needed = self.pages_for(self._end(generation, min(len(generation.tokens), self.chunk)))
            whole = self.pages_for(len(generation.tokens) + self.num_speculative_tokens + 1)
            if whole > self.allocator.num_pages - 1:
                self.waiting.popleft()
                generation.finish_reason = "refused"
                generation.error = (
                    f"request {generation.request_id}: {len(generation.tokens)} tokens and a block need {whole} pages of "
                    f"{self.page_size}, the pool has {self.allocator.num_pages - 1}; pass a larger num_pages"
                )
                self.finished.append(generation)
                continue
            if needed > self.allocator.num_free + (self.prefix_cache.num_idle if self.prefix_cache else 0):
                return
            self.waiting.popleft()
            self.live.append(generation)
            self._begin(generation)

    def _begin(self, generation: Generation) -> None:
        """Start from what a prefix cache has. The target's pages decide; the drafter's may be missing (C48)."""
        hit = self.prefix_cache.hold(generation.tokens) if self.prefix_cache else []
        generation.pages = [page.id for page in hit]
        generation.computed = len(hit) * self.page_size
        drafted = all(page.drafted for page in hit)
        generation.context_start = 0 if drafted else generation.computed
        generation.context_end = generation.computed
        if self.drafter is not None:
            self.drafter.add_request(
                generation.request_id, len(generation.tokens), generation.context_start, generation.params
            )

    def _choose(self) -> tuple[list[Generation], bool]:
        """The requests of this step, each with the pages that it needs, and whether they decode."""
        prefilling = [g for g in self.live if g.prefilling]
        decoding = [g for g in self.live if not g.prefilling]
        decode = bool(decoding) and (not prefilling or not self._decoded_last)
        self._decoded_last = decode
        chosen = decoding if decode else prefilling[: self.prompts_per_step]
        batch: list[Generation] = []
        for generation in chosen:
            if generation in self.live and self._reserve(generation, batch):
                batch.append(generation)
        return batch, decode

    def _reserve(self, generation: Generation, batch: list[Generation]) -> bool:
        """Give a request its pages, taking them from the youngest live ones where none are free."""
        needed = self.pages_for(self._end(generation, len(self._next_rows(generation)))) - len(generation.pages)
        if self.prefix_cache is not None:
            self.prefix_cache.reclaim(needed - self.allocator.num_free)
        while needed > self.allocator.num_free:
            victim = next(g for g in reversed(self.live) if g not in batch)
            self._preempt(victim)
            if victim is generation:
                return False
        generation.pages += self.allocator.allocate(max(0, needed))
        return True

    def _preempt(self, generation: Generation) -> None:
        self._release(generation)
        generation.computed, generation.drafts = 0, []
        self.waiting.appendleft(generation)

    def _release(self, generation: Generation) -> None:
        self.live.remove(generation)
        if self.prefix_cache is None:
            self.allocator.free(generation.pages)
        else:
            context = range(generation.context_start, generation.context_end)
            self.prefix_cache.release(generation.tokens, generation.computed, generation.pages, context)
        generation.pages = []
        if self.drafter is not None:
            self.drafter.remove_request(generation.request_id)

    def _retire(self, generation: Generation) -> None:
        self._release(generation)
        self.finished.append(generation)

    def block_tables(self, batch: Sequence[Generation]) -> np.ndarray:
        """The pages of each request `[n, W]`, null pages after them."""
        tables = np.full((len(batch), max(len(g.pages) for g in batch)), NULL_PAGE, np.int32)
        for row, generation in enumerate(batch):
            tables[row, : len(generation.pages)] = generation.pages
        return tables

    # One step

    def _next_rows(self, generation: Generation) -> list[int]:
        if generation.prefilling:
            return generation.tokens[generation.computed : generation.computed + self.chunk]
        last = self.max_model_len - 1 - generation.computed  # the target has no row past its last position
        return [generation.tokens[-1], *generation.drafts[:last]]

    def _accept(self, batch: list[Generation], rows: list[list[int]], decode: bool, output: TargetOutput) -> TargetStep:
        """Take what the target made of each request's rows; the step as the drafter sees it."""
        columns = np.zeros((len(batch), 6), np.int32)
        for i, (generation, new) in enumerate(zip(batch, rows, strict=True)):
            start, end = generation.computed, generation.computed + len(new)
            if end < len(generation.tokens):  # an unfinished prompt
                generation.computed = end
                columns[i] = start, len(new), 0, 0, 0, generation.tokens[end]
                continue
            emitted = output.tokens[i, : output.num_sampled[i]].tolist()
            num_rejected = len(new) - len(emitted) if decode else 0
            columns[i] = start, len(new), num_rejected, len(emitted), emitted[-1], 0
            self.take(generation, emitted, len(new) - 1 if decode else 0)
        names = ("start_position", "num_context", "num_rejected", "num_sampled", "last_sampled", "next_prefill")
        fields = dict(zip(names, columns.T, strict=True))
        fields["first_context_position"] = np.array([g.context_start for g in batch], np.int32)
        return TargetStep(request_ids=[g.request_id for g in batch], block_tables=self.block_tables(batch), **fields)

    def _request_index(self, generation: Generation) -> int:
        return -1 if self.drafter is None else self.drafter.request_index(generation.request_id)

    def take(self, generation: Generation, emitted: list[int], num_drafts: int) -> None:
        """Append what a verify of `num_drafts` drafts emitted (the accepted ones, then the target's own token), and see
        whether the generation has come to its end; tokens past it are dropped."""
        generation.computed = len(generation.tokens) + len(emitted) - 1
        if num_drafts:
            generation.accepted.append(len(emitted) - 1)
            generation.proposed.append(num_drafts)
        kept: list[int] = []
        for token in emitted:
            kept.append(token)
            generation.tokens.append(token)
            generation.finish_reason = self._finish_reason(generation)
            if generation.finish_reason is not None:
                break
        if self.on_tokens is not None:
            self.on_tokens(generation, kept, min(len(kept), len(emitted) - 1))

    def _finish_reason(self, generation: Generation) -> str | None:
        params = generation.params
        if generation.tokens[-1] in self.eos_token_ids and not params.ignore_eos:
            return "eos"
        if generation.num_generated >= params.max_new_tokens:
            return "length"
        if len(generation.tokens) >= self.max_model_len:
            return "context"
        if self.repeat is not None and generation.num_generated >= self.repeat:
            gram = tuple(generation.tokens[-self.repeat :])
            if gram in generation.seen:
                return "repeat"
            generation.seen.add(gram)
        return None

    def _draft(self, batch: list[Generation], step: TargetStep, features) -> None:
        """Store the step's context, and draft for the requests that go on decoding."""
        assert self.drafter is not None
        wanting = [g for g in batch if not g.prefilling and g.finish_reason is None]
        if all(g.finish_reason is not None for g in batch):
            return
        K = self.num_speculative_tokens if self.schedule_k is None else self.schedule_k(len(self.live))
        drafts = self.drafter.propose(step, features, num_speculative_tokens=K if wanting else 0)
        for generation, row in zip(batch, drafts, strict=True):
            generation.context_end = generation.computed
            generation.drafts = row.tolist() if generation in wanting else []
