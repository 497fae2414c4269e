"""The host's side of a draft step: live requests and their pages, and the checks before anything runs. Plain Python and
numpy."""

import math
from dataclasses import dataclass

import numpy as np

from jax_dflash.batch import EngineConfig, TargetStep
from jax_dflash.config import InputError
from jax_dflash.pages import NULL_PAGE, HeldPages, PageAllocator
from jax_dflash.sampling_params import SamplingParams, float_bits


@dataclass
class Request:
    """A live request: its row in per-request state, pages of each group, and its context, which is stored from
    `first_context_position` to `context_len`."""

    index: int
    pages: list[HeldPages]
    context_len: int = 0
    first_context_position: int = 0
    params: SamplingParams | None = None  # greedy without


def _as_int32(name: str, value) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" and array.size:
        raise InputError(f"{name} is {array.dtype}, expected integers")
    return array.astype(np.int32)


class RequestTable:
    """Live requests, their pages, and the checks before a step: a step that is refused has changed nothing.

    Every page group has an allocator. A windowed group holds the pages that the step's block sees: those before them, which
    no later block sees either, are given back, and the null page stands for them in the block table.
    """

    def __init__(self, config: EngineConfig, *, external_pages: bool):
        self.config, self.external_pages = config, external_pages
        self.allocators = [PageAllocator(num_pages) for num_pages in config.num_pages]
        self.requests: dict = {}
        self._free_indices = list(range(config.max_num_seqs - 1, -1, -1))

    def add(
        self, request_id, num_prompt_tokens: int = 0, cached_tokens: int = 0, params: SamplingParams | None = None
    ) -> None:
        """Admit a request; it takes pages as its context grows, which begins at position `cached_tokens`."""
        if request_id in self.requests:
            raise InputError(f"request {request_id!r} is already live; remove it first or pass another id")
        if not self._free_indices:
            raise InputError(
                f"{len(self.requests) + 1} requests exceed max_num_seqs={self.config.max_num_seqs}; "
                "pass a larger max_num_seqs"
            )
        if num_prompt_tokens > self.config.max_model_len:
            raise InputError(
                f"request {request_id!r}: a prompt of {num_prompt_tokens} tokens exceeds "
                f"max_model_len={self.config.max_model_len}; shorten it or pass a larger max_model_len"
            )
        if not 0 <= cached_tokens < (num_prompt_tokens or self.config.max_model_len):
            raise InputError(
                f"request {request_id!r}: cached_tokens={cached_tokens}; expected 0 or more and fewer than its prompt's "
                f"{num_prompt_tokens or self.config.max_model_len} tokens, the last of which the target must run"
            )
        pages = [HeldPages(stored_from=cached_tokens) for _ in self.allocators]
        self.requests[request_id] = Request(self._free_indices.pop(), pages, cached_tokens, cached_tokens, params)

    def remove(self, request_id) -> None:
        """Forget a request and free its pages."""
        request = self._get(request_id)
        del self.requests[request_id]
        for allocator, held in zip(self.allocators, request.pages, strict=True):
            allocator.free(held.ids)
        self._free_indices.append(request.index)

    def _get(self, request_id) -> Request:
        if request_id not in self.requests:
            raise InputError(f"request {request_id!r} is not live; add_request() it first")
        return self.requests[request_id]

    def reserve(self, step: TargetStep) -> dict[str, np.ndarray]:
        """Check a step and reserve its pages: the columns that `IntsLayout.pack` takes.

        Pages cover the accepted context that the block sees and its `query_len` rows. Raises InputError before
        anything has changed.
        """
        requests = [self._get(request_id) for request_id in step.request_ids]
        start = [r.context_len for r in requests] if step.start_position is None else step.start_position
        first = [r.first_context_position for r in requests]
        columns = {
            "start_position": start,
            "num_context": step.num_context,
            "num_rejected": step.num_rejected,
            "num_sampled": step.num_sampled,
            "last_sampled": step.last_sampled,
            "next_prefill": step.next_prefill,
            "first_context_position": first if step.first_context_position is None else step.first_context_position,
        }
        columns = {name: _as_int32(name, value) for name, value in columns.items()}
        if step.first_context_position is None and columns["start_position"].shape == (len(requests),):
            # Rows that run after all begin the context anew.
            columns["first_context_position"] = np.minimum(columns["first_context_position"], columns["start_position"])
        self._check(step, requests, columns)
        end = columns["start_position"] + columns["num_context"] - columns["num_rejected"]
        if self.external_pages:
            tables = self._check_tables(step, columns["first_context_position"], end)
        else:
            tables = self._reserve_pages(step, requests, columns, end)
        for request, first, context_len in zip(requests, columns["first_context_position"], end, strict=True):
            request.context_len, request.first_context_position = int(context_len), int(first)
        sampled = [(0.0, 0) if r.params is None else (r.params.temperature, r.params.seed) for r in requests]
        temperature, seed = zip(*sampled, strict=True)
        return columns | {
            "request_index": np.array([r.index for r in requests], np.int32),
            "temperature_bits": float_bits(temperature),
            "seed": np.array(seed, np.int32),
            "block_tables": tables,
        }

    def _check(self, step: TargetStep, requests: list[Request], columns: dict[str, np.ndarray]) -> None:
        n = len(requests)
        if n == 0:
            raise InputError("the step holds no request; skip propose() instead")
        if len(set(map(id, requests))) < n:
            raise InputError(f"request_ids {list(step.request_ids)} name a request twice")
        for name, value in columns.items():
            if value.shape != (n,):
                raise InputError(f"{name} has shape {list(value.shape)}, expected [{n}], one entry a request")
        anchors = np.where(columns["num_sampled"] > 0, columns["last_sampled"], columns["next_prefill"])
        names = ("start_position", "num_context", "num_rejected", "first_context_position")
        rows = zip(
            step.request_ids, requests, *(columns[name].tolist() for name in names), anchors.tolist(), strict=True
        )
        trusted = self.external_pages and step.first_context_position is not None
        vocab_size = self.config.vocab_size
        for request_id, request, start, num_context, num_rejected, first, anchor in rows:
            end, context_len = start + num_context - num_rejected, request.context_len
            if num_rejected < 0 or num_rejected >= num_context:
                raise InputError(
                    f"request {request_id!r}: {num_rejected} of {num_context} context rows rejected; at least one row "
                    "must count"
                )
            if start < 0 or end > self.config.max_model_len:
                raise InputError(
                    f"request {request_id!r}: context positions {start} to {end - 1} exceed "
                    f"max_model_len={self.config.max_model_len}; pass a larger max_model_len or end the request"
                )
            if not 0 <= first <= start:
                raise InputError(
                    f"request {request_id!r}: first_context_position={first}; expected 0 to its start_position={start}"
                )
            if start > context_len and first < start and not trusted:
                raise InputError(
                    f"request {request_id!r}: start_position={start} leaves a gap after its {context_len} stored tokens; "
                    f"pass the target's rows without gaps, or first_context_position={start} to do without what is before"
                )
            if not 0 <= anchor < vocab_size:
                raise InputError(
                    f"request {request_id!r}: anchor token {anchor} is outside the vocabulary of {vocab_size}"
                )

    def _check_tables(self, step: TargetStep, first_context: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The caller's block tables `[G, n, W]`, cut to the width of ours. Pages that no row of the block sees may be
        null."""
        tables = _as_int32(
            "block_tables", np.zeros((0, 0), np.int32) if step.block_tables is None else step.block_tables
        )
        G, n, page_size = len(self.allocators), len(end), self.config.page_size
        if tables.shape[:-1] not in ((n,), (G, n)):
            raise InputError(
                f"block_tables has shape {list(tables.shape)}, expected [{n}, pages of a request] or "
                f"[{G} page groups, {n}, pages of a request]"
            )
        tables = np.broadcast_to(tables, (G, *tables.shape[-2:]))
        first_keys, stop_keys = self.config.first_keys(first_context, end), self.config.stop_keys(end)
        for g, num_pages in enumerate(self.config.num_pages):
            if np.min(tables[g], initial=0) < 0 or np.max(tables[g], initial=0) >= num_pages:
                raise InputError(f"block_tables holds page ids outside 0 to {num_pages - 1}")
            for row, (first, stop) in enumerate(zip(first_keys[g].tolist(), stop_keys.tolist(), strict=True)):
                columns = range(first // page_size, self.num_pages_for(stop))
                pages = tables[g, row, columns.start : columns.stop]
                if len(pages) < len(columns) or (pages == NULL_PAGE).any():
                    missing = next((i for i, page in enumerate(pages) if page == NULL_PAGE), len(pages))
                    position = max((columns.start + missing) * page_size, first)
                    raise InputError(
                        f"request {step.request_ids[row]!r}: its block table has no page for position {position}; its block "
                        f"sees positions {first} to {stop - 1}; reserve {self.config.query_len} rows of lookahead"
                    )
        return tables[:, :, : self.num_pages_for(self.config.max_model_len)]

    def num_pages_for(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.config.page_size)

    def _reserve_pages(
        self, step: TargetStep, requests: list[Request], columns: dict[str, np.ndarray], end: np.ndarray
    ) -> np.ndarray:
        """Give every request the pages of what its block sees and take back the others, or do nothing: the block tables
        `[G, n, W]`, null where a request holds no page."""
        page_size, starts = self.config.page_size, columns["start_position"].tolist()
        first_keys = self.config.first_keys(columns["first_context_position"], end)
        stops = [self.num_pages_for(key) for key in self.config.stop_keys(end).tolist()]
        plans = []
        for g, allocator in enumerate(self.allocators):
            spans = []
            for request, first_key, stop, start, name in zip(
                requests, first_keys[g].tolist(), stops, starts, step.request_ids, strict=True
            ):
                held = request.pages[g]
                if first_key < min(start, held.stored_from):
                    raise InputError(
                        f"request {name!r}: its block sees keys from position {first_key} on, those before "
                        f"{held.stored_from} are gone; pass start_position={first_key} or less and the rows from there on"
                    )
                spans.append((held, first_key // page_size, stop))
            changed = [span for span in spans if not span[0].holds(*span[1:])]
            given_back = [held.outside(first, stop) for held, first, stop in changed]
            num_old = sum(map(len, given_back))
            needed = num_old + sum(stop - first - len(held.ids) for held, first, stop in changed)
            if needed > (free := allocator.num_free + num_old):
                raise InputError(
                    f"the step needs {needed} more pages of {page_size} tokens, {free} are free; remove a request or pass "
                    "a larger num_pages"
                )
            plans.append((spans, changed, given_back))
        tables = np.zeros((len(plans), len(requests), max(stops)), np.int32)
        for g, (spans, changed, given_back) in enumerate(plans):
            for (held, first, stop), pages in zip(changed, given_back, strict=True):
                self.allocators[g].free(pages)
                held.drop(first, stop)
            for held, first, stop in changed:
                held.extend(first, self.allocators[g].allocate(stop - first - len(held.ids)))
            for row, (held, first, stop) in enumerate(spans):
                after_gap = starts[row] > requests[row].context_len
                stored_from = starts[row] if after_gap else min(held.stored_from, starts[row])
                held.stored_from = max(stored_from, first * page_size)
                tables[g, row, first:stop] = held.ids
        return tables
