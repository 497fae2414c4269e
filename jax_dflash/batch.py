"""What a draft step is given: the constants of its engine, the target step before it, and the one packed int32 array of
its integers. Plain Python and numpy: both engines use it, so that their inputs are the same by construction."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_dflash.buckets import row_bucket_sizes
from jax_dflash.config import DraftConfig, InputError
from jax_dflash.pages import pages_touched

PAD_SLOT = -1
CHUNK_KEYS = 256  # keys between two rescalings of the dense attention's online softmax, in both frameworks
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")  # vLLM's names


@dataclass(frozen=True)
class IntsLayout:
    """Where each field stands in the packed array: one scalar, the fields `[num_reqs]` of PER_REQUEST, the block tables
    `[num_groups, num_reqs, table_width]`. JAX slices it inside the program, PyTorch views its static buffer."""

    num_reqs: int
    table_width: int
    num_groups: int = 1

    # start_position: the position of a request's first context row; its rows are contiguous.
    # next_prefill: the anchor of a request whose prompt is not finished (num_sampled 0).
    # request_index: the request's row in per-request state; -1 marks a padded request.
    # first_context_position: keys before it are of no row's concern, they were never stored (prefix hits).
    # temperature_bits: the temperature's float32 bits. Both it and seed are for sampling.
    PER_REQUEST = (
        "start_position", "num_context", "num_rejected", "num_sampled", "last_sampled", "next_prefill", "request_index",
        "first_context_position", "temperature_bits", "seed",
    )  # fmt: skip

    @property
    def size(self) -> int:
        return 1 + self.num_reqs * (len(self.PER_REQUEST) + self.num_groups * self.table_width)

    def unpack(self, ints) -> dict:
        """Views of a packed array (numpy, JAX or PyTorch) by field name; `num_rows` is the count of context rows that
        the step stores itself, 0 where a context program stored them."""
        fields = {"num_rows": ints[0]}
        for i, name in enumerate(self.PER_REQUEST):
            fields[name] = ints[1 + i * self.num_reqs : 1 + (i + 1) * self.num_reqs]
        fields["block_tables"] = ints[1 + len(self.PER_REQUEST) * self.num_reqs :].reshape(
            self.num_groups, self.num_reqs, self.table_width
        )
        return fields

    def pack(self, columns: dict, num_rows: int) -> np.ndarray:
        """A step's columns (`RequestTable.reserve`), padded to this bucket; missing ones are 0. A block table `[n, W]`
        is that of every group."""
        ints = self.empty()
        ints[0] = num_rows
        fields = self.unpack(ints)
        n, width = columns["block_tables"].shape[-2:]
        for name in self.PER_REQUEST:
            fields[name][:n] = columns.get(name, 0)
        fields["block_tables"][:, :n, :width] = columns["block_tables"]
        return ints

    def empty(self) -> np.ndarray:
        """A batch of padded requests only: nothing is stored, every slot is PAD."""
        ints = np.zeros(self.size, np.int32)
        self.unpack(ints)["request_index"][:] = -1
        return ints


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What is constant over all buckets of an engine; `make` checks it and fills in defaults. `num_pages` has an entry for
    each page group."""

    draft: DraftConfig
    num_speculative_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: tuple[int, ...]
    table_width: int
    draft_sample_method: str = "greedy"
    verify_len: int | None = None  # rows of a full verify, where fewer drafts than the engine's own K are scheduled

    @classmethod
    def make(
        cls,
        draft: DraftConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_speculative_tokens: int | None = None,
        max_num_batched_tokens: int | None = None,
        page_size: int = 16,
        num_pages: int | Sequence[int] | None = None,
        table_width: int | None = None,
        allow_long_block: bool = False,
        draft_sample_method: str = "greedy",
    ) -> "EngineConfig":
        """Defaults: K of the drafter's block, room for a verify of every request and 512 rows, pages for what
        every request sees: max_model_len, in a windowed group the window and the block. A `num_pages` is for each group or,
        one number, for all. `allow_long_block` lets K exceed the block that the drafter was trained with. Raises
        InputError."""
        if draft.geometry.vocab_size is None:
            raise InputError("the drafter's config names no vocab_size; pass what check_pair(draft, target) returns")
        K = draft.max_speculative_tokens if num_speculative_tokens is None else num_speculative_tokens
        if K < 1 or (K > draft.max_speculative_tokens and not allow_long_block):
            raise InputError(
                f"num_speculative_tokens={K}: this drafter's blocks of {draft.block_size} hold an anchor and "
                f"1 to {draft.max_speculative_tokens} drafts; more need allow_long_block"
            )
        if draft_sample_method not in DRAFT_SAMPLE_METHODS:
            raise InputError(
                f"draft_sample_method {draft_sample_method!r} is unknown; pass {' or '.join(DRAFT_SAMPLE_METHODS)}"
            )
        for name, value in (("max_num_seqs", max_num_seqs), ("page_size", page_size)):
            if value < 1:
                raise InputError(f"{name}={value}; pass at least 1")
        if not K + 1 < max_model_len <= draft.geometry.max_position_embeddings:
            raise InputError(
                f"max_model_len={max_model_len}; expected more than a block of {K + 1} and at most the drafter's "
                f"max_position_embeddings={draft.geometry.max_position_embeddings}"
            )
        verify_rows = max_num_seqs * (K + 1)
        T = max(verify_rows, 512) if max_num_batched_tokens is None else max_num_batched_tokens
        if T < verify_rows:
            raise InputError(
                f"max_num_batched_tokens={T} is less than a verify of {max_num_seqs} requests x {K + 1} rows; "
                f"pass {verify_rows} or more"
            )
        pages_per_request = math.ceil(max_model_len / page_size)
        groups = draft.page_groups
        if num_pages is None:
            seen = [max_model_len if window is None else window + K for window, _ in groups]
            held = (min(pages_per_request, pages_touched(keys, page_size)) for keys in seen)
            num_pages = [1 + max_num_seqs * pages for pages in held]
        elif isinstance(num_pages, int):
            num_pages = [num_pages] * len(groups)
        if len(num_pages) != len(groups):
            raise InputError(
                f"num_pages={list(num_pages)}: pass one number, or one for each of {len(groups)} page groups"
            )
        return cls(
            draft=draft,
            num_speculative_tokens=K,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=T,
            page_size=page_size,
            num_pages=tuple(num_pages),
            table_width=pages_per_request if table_width is None else table_width,
            draft_sample_method=draft_sample_method,
        )

    def scheduled(self, num_speculative_tokens: int) -> "EngineConfig":
        """The same engine with fewer drafts in a step; a step still takes the rows of a verify of K. Raises InputError."""
        if not 1 <= num_speculative_tokens <= self.num_speculative_tokens:
            raise InputError(
                f"scheduled K={num_speculative_tokens}; pass 1 to num_speculative_tokens={self.num_speculative_tokens}"
            )
        K = num_speculative_tokens
        return replace(self, num_speculative_tokens=K, verify_len=self.verify_len or self.query_len)

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are sampled and their logits kept for the verification."""
        return self.draft_sample_method == "probabilistic"

    @property
    def draft_logits_shape(self) -> tuple[int, int, int]:
        """`[R, K, V]`: a row for each request, of as many drafts as it may have."""
        return self.max_num_seqs, (self.verify_len or self.query_len) - 1, self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Tokens that may be anchors."""
        assert self.draft.geometry.vocab_size is not None
        return self.draft.geometry.vocab_size

    @property
    def query_len(self) -> int:
        """Query rows of a request: the anchor and K masks."""
        return self.num_speculative_tokens + 1

    def context_rows(self, num_reqs: int) -> int:
        """Context rows that a step of this bucket stores itself: one full verify per request."""
        return min(num_reqs * (self.verify_len or self.query_len), self.max_num_batched_tokens)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Row counts at which context is stored apart from a step."""
        return row_bucket_sizes(self.max_num_batched_tokens)

    def layout(self, num_reqs: int) -> IntsLayout:
        return IntsLayout(num_reqs, self.table_width, len(self.num_pages))

    def first_keys(self, first_context_position: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
        """For each page group `[n]`: the first key that the block of each request sees, behind `end` tokens of context. Its
        anchor's row sees the most; at the length limit attention counts rows back from the last key."""
        anchor = np.minimum(end, self.max_model_len - self.query_len)
        return [
            first_context_position if window is None else np.maximum(anchor - (window - 1), first_context_position)
            for window, _ in self.draft.page_groups
        ]

    def stop_keys(self, end: np.ndarray) -> np.ndarray:
        """`[n]`: the end of each request's block."""
        return np.minimum(end + self.query_len, self.max_model_len)

    def padded_rows(self, shape: Sequence[int], num_rows: int, own_rows: int, *, on_device: bool) -> int:
        """The row count at which features of this shape run: the step's own if `num_rows` fit, else a row bucket.

        A device array must have that shape already, numpy exactly `num_rows` rows. Raises InputError.
        """
        draft, buckets = self.draft, self.row_buckets
        if num_rows > buckets[-1]:
            raise InputError(
                f"{num_rows} context rows exceed max_num_batched_tokens={buckets[-1]}; run the target in smaller chunks"
            )
        if len(shape) != 2 or shape[1] != draft.feature_size:
            raise InputError(
                f"features have shape {list(shape)}, expected [rows, {draft.feature_size}]: "
                f"{len(draft.hidden_state_indices)} hidden states x width {draft.target_hidden_size}"
            )
        if on_device:
            if shape[0] < num_rows or shape[0] not in (own_rows, *buckets):
                raise InputError(
                    f"features on the device have {shape[0]} rows for {num_rows}; pad them in the target to {own_rows} "
                    f"or one of {list(buckets)}, or pass numpy"
                )
            return shape[0]
        if shape[0] != num_rows:
            raise InputError(f"features have {shape[0]} rows, the step's num_context add up to {num_rows}")
        return own_rows if num_rows <= own_rows else next(size for size in buckets if size >= num_rows)


@dataclass(frozen=True, kw_only=True)
class TargetStep:
    """What one target step did, request by request in batch order (spec: requests' rows are contiguous).

    A decode request ran its anchor and drafts (`num_context` rows), of which the last `num_rejected` do not count;
    `num_sampled` tokens were emitted, the last being `last_sampled`. An unfinished prompt has num_sampled 0 and names
    its true next token in `next_prefill`.

    A `start_position` past the stored context leaves a gap, which only a `first_context_position` as high explains: no row
    sees what is before it. With external pages a lower one says that the caller's pages hold those keys (a shared prefix).
    """

    request_ids: Sequence
    num_context: np.ndarray
    num_rejected: np.ndarray
    num_sampled: np.ndarray
    last_sampled: np.ndarray
    next_prefill: np.ndarray
    start_position: np.ndarray | None = None  # default: where the request's stored context ends
    first_context_position: np.ndarray | None = None  # default: the request's, at most start_position
    # With external pages only, page ids: [G, n, width], or [n, width] for all groups alike.
    block_tables: np.ndarray | None = None


def check_scheduled_ks(scheduled_ks: Sequence[int], num_speculative_tokens: int) -> tuple[int, ...]:
    """The numbers of drafts that a step may ask for, largest first; the engine's own K is always among them. Raises
    InputError."""
    if any(not 0 <= k <= num_speculative_tokens for k in scheduled_ks):
        raise InputError(
            f"scheduled_ks={list(scheduled_ks)}; pass numbers of drafts from 0 to num_speculative_tokens="
            f"{num_speculative_tokens}"
        )
    return tuple(sorted({*scheduled_ks, num_speculative_tokens} - {0}, reverse=True))
