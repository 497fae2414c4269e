"""The host's side of one draft step: pages, requests, and the one packed int32 array a step takes. Plain Python and
numpy: both engines use it, so that their inputs are the same by construction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jax_dflash.config import InputError

PAD_SLOT = -1
NULL_PAGE = 0


@dataclass(frozen=True)
class IntsLayout:
    """Where each field stands in the packed array: one scalar, seven fields `[num_reqs]`, the block tables
    `[num_reqs, table_width]`. JAX slices it inside the program, PyTorch views its static buffer."""

    num_reqs: int
    table_width: int

    # start_position: the position of a request's first context row; its rows are contiguous.
    # next_prefill: the anchor of a request whose prompt is not finished (num_sampled 0).
    # request_index: the request's row in per-request state; -1 marks a padded request.
    PER_REQUEST = (
        "start_position", "num_context", "num_rejected", "num_sampled", "last_sampled", "next_prefill", "request_index",
    )  # fmt: skip

    @property
    def size(self) -> int:
        return 1 + self.num_reqs * (len(self.PER_REQUEST) + self.table_width)

    def unpack(self, ints) -> dict:
        """Views of a packed array (numpy, JAX or PyTorch) by field name; `num_rows` is the count of context rows that
        the step stores itself, 0 where a context program stored them."""
        fields = {"num_rows": ints[0]}
        for i, name in enumerate(self.PER_REQUEST):
            fields[name] = ints[1 + i * self.num_reqs : 1 + (i + 1) * self.num_reqs]
        fields["block_tables"] = ints[1 + len(self.PER_REQUEST) * self.num_reqs :].reshape(self.num_reqs, self.table_width)
        return fields

    def empty(self) -> np.ndarray:
        """A batch of padded requests only: nothing is stored, every slot is PAD."""
        ints = np.zeros(self.size, np.int32)
        self.unpack(ints)["request_index"][:] = -1
        return ints


class PageAllocator:
    """Pages 1 to num_pages - 1 of a pool; page 0 is the null page."""

    def __init__(self, num_pages: int):
        if num_pages < 2:
            raise InputError(f"num_pages={num_pages}: page 0 is the null page, so pass at least 2")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, lowest ids first in a fresh pool. The caller has checked `num_free`."""
        assert count <= len(self._free), "allocate() past num_free"
        return [self._free.pop() for _ in range(count)]

    def free(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))


@dataclass
class Request:
    """A live request: its row in per-request state, stored context length, and pages in order of position."""

    index: int
    context_len: int = 0
    pages: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TargetStep:
    """What one target step did, request by request in batch order (spec: requests' rows are contiguous).

    A decode request ran its anchor and drafts (`num_context` rows), of which the last `num_rejected` do not count;
    `num_sampled` tokens were emitted, the last being `last_sampled`. An unfinished prompt has num_sampled 0 and names
    its true next token in `next_prefill`.
    """

    request_ids: Sequence
    num_context: np.ndarray
    num_rejected: np.ndarray
    num_sampled: np.ndarray
    last_sampled: np.ndarray
    next_prefill: np.ndarray
    start_position: np.ndarray | None = None  # default: where the request's stored context ends
    block_tables: np.ndarray | None = None  # [n, width] page ids, with external pages only


class RequestTable:
    """Live requests, their pages, and the checks before a step: a step that is refused has changed nothing."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, query_len: int, page_size: int, num_pages: int, external_pages: bool):
        self.max_num_seqs, self.max_model_len, self.query_len = max_num_seqs, max_model_len, query_len
        self.page_size, self.external_pages = page_size, external_pages
        self.allocator = PageAllocator(num_pages)
        self.requests: dict = {}
        self._free_indices = list(range(max_num_seqs - 1, -1, -1))

    def add(self, request_id, num_prompt_tokens: int = 0) -> None:
        """Admit a request; it takes pages as its context grows."""
        if request_id in self.requests:
            raise InputError(f"request {request_id!r} is already live; remove it first or pass another id")
        if not self._free_indices:
            raise InputError(f"{len(self.requests) + 1} requests exceed max_num_seqs={self.max_num_seqs}; pass a larger max_num_seqs")
        if num_prompt_tokens > self.max_model_len:
            raise InputError(
                f"request {request_id!r}: a prompt of {num_prompt_tokens} tokens exceeds max_model_len={self.max_model_len}; "
                "shorten it or pass a larger max_model_len"
            )
        self.requests[request_id] = Request(self._free_indices.pop())

    def remove(self, request_id) -> None:
        """Forget a request and free its pages."""
        request = self._get(request_id)
        del self.requests[request_id]
        self.allocator.free(request.pages)
        self._free_indices.append(request.index)

    def _get(self, request_id) -> Request:
        if request_id not in self.requests:
            raise InputError(f"request {request_id!r} is not live; add_request() it first")
        return self.requests[request_id]

    def prepare(self, step: TargetStep, layout: IntsLayout, num_rows: int) -> np.ndarray:
        """Check a step, reserve its pages, and pack it for a bucket of `layout.num_reqs` requests.

        `num_rows` context rows are stored by the step itself. Pages cover the accepted context and the block of
        `query_len` rows after it. Raises InputError before anything has changed.
        """
        requests = [self._get(request_id) for request_id in step.request_ids]
        columns = {
            "num_context": step.num_context, "num_rejected": step.num_rejected, "num_sampled": step.num_sampled,
            "last_sampled": step.last_sampled, "next_prefill": step.next_prefill,
            "start_position": [r.context_len for r in requests] if step.start_position is None else step.start_position,
        }  # fmt: skip
        columns = {name: np.asarray(value, np.int32) for name, value in columns.items()}
        n = len(requests)
        self._check(step, requests, columns)
        end = columns["start_position"] + columns["num_context"] - columns["num_rejected"]
        if not self.external_pages:
            self._reserve(step, requests, end)

        ints = layout.empty()
        fields = layout.unpack(ints)
        for name, value in columns.items():
            fields[name][:n] = value
        fields["request_index"][:n] = [r.index for r in requests]
        ints[0] = num_rows
        tables = fields["block_tables"]
        for row, request in enumerate(requests):
            pages = step.block_tables[row] if self.external_pages else request.pages
            tables[row, : len(pages)] = pages
            request.context_len = int(end[row])
        return ints

    def _check(self, step: TargetStep, requests: list[Request], columns: dict[str, np.ndarray]) -> None:
        n = len(requests)
        if len(set(map(id, requests))) < n:
            raise InputError(f"request_ids {list(step.request_ids)} name a request twice")
        for name, value in columns.items():
            if value.shape != (n,):
                raise InputError(f"{name} has shape {list(value.shape)}, expected [{n}], one entry a request")
        valid = columns["num_context"] - columns["num_rejected"]
        end = columns["start_position"] + columns["num_context"]
        for row, request_id in enumerate(step.request_ids):
            if columns["num_rejected"][row] < 0 or valid[row] < 1:
                raise InputError(
                    f"request {request_id!r}: {columns['num_rejected'][row]} of {columns['num_context'][row]} context rows "
                    "rejected; at least one row must count"
                )
            if columns["start_position"][row] < 0 or end[row] > self.max_model_len:
                raise InputError(
                    f"request {request_id!r}: context positions {columns['start_position'][row]} to {end[row] - 1} exceed "
                    f"max_model_len={self.max_model_len}; pass a larger max_model_len or end the request"
                )
        if self.external_pages:
            width = self.num_pages_for(self.max_model_len)
            shape = np.shape(step.block_tables)
            if len(shape) != 2 or shape[0] != n or shape[1] > width:
                raise InputError(f"block_tables has shape {list(shape)}, expected [{n}, at most {width}]")
            if np.min(step.block_tables, initial=0) < 0 or np.max(step.block_tables, initial=0) >= self.allocator.num_pages:
                raise InputError(f"block_tables holds page ids outside 0 to {self.allocator.num_pages - 1}")

    def num_pages_for(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.page_size)

    def _reserve(self, step: TargetStep, requests: list[Request], end: np.ndarray) -> None:
        """Give every request the pages of its context and block, or none to anybody."""
        needed = [
            max(0, self.num_pages_for(min(int(e) + self.query_len, self.max_model_len)) - len(r.pages))
            for r, e in zip(requests, end, strict=True)
        ]
        if sum(needed) > self.allocator.num_free:
            raise InputError(
                f"the step needs {sum(needed)} more pages of {self.page_size} tokens, {self.allocator.num_free} are free; "
                "remove a request or pass a larger num_pages"
            )
        for request, count in zip(requests, needed, strict=True):
            request.pages += self.allocator.allocate(count)
