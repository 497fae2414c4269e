"""Shape buckets and which one a batch runs in: vLLM's CUDA-graph ladder. Plain Python: both frameworks use it.

The ladder holds no state: before anything is captured it is the engine that has no program to run.
LoRA cases and variable-length decode graphs are left out; the DFlash drafter has neither.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from jax_dflash.config import InputError

MIN_ROW_BUCKET = 16


class GraphMode(enum.Enum):
    """How a batch runs: one program for all of it, pieces, or eagerly; a pair is (decode batches, mixed batches)."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def separate_routine(self) -> bool:
        """Whether decode and mixed batches run in different modes."""
        return isinstance(self.value, tuple)

    def decode_mode(self) -> "GraphMode":
        return GraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    def mixed_mode(self) -> "GraphMode":
        return GraphMode(self.value[1]) if isinstance(self.value, tuple) else self


@dataclass(frozen=True)
class BatchDescriptor:
    """A bucket. `num_reqs` None: requests need no padding. `uniform_token_count`: the query length of every request;
    None: any."""

    mode: GraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None

    @property
    def padded_reqs(self) -> int:
        """`num_reqs` of a bucket that pads requests, as every bucket of a drafter does."""
        assert self.num_reqs is not None, self
        return self.num_reqs

    def covers(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None) -> bool:
        """Whether such a batch may run in this bucket, padded."""
        return (
            self.uniform_token_count in (None, uniform_token_count)
            and (self.num_reqs is None or self.num_reqs >= num_reqs)
            and self.num_tokens >= num_tokens
        )

    def __str__(self) -> str:
        requests = "any" if self.num_reqs is None else self.num_reqs
        return f"{self.num_tokens} tokens, {requests} requests ({self.mode.name})"


def uniform_token_count(num_reqs: int, num_tokens: int, max_query_len: int) -> int | None:
    """The query length that all requests of a batch have, or None."""
    return max_query_len if num_tokens == max_query_len * num_reqs else None


def vllm_default_sizes(max_num_seqs: int, num_speculative_tokens: int, max_num_batched_tokens: int) -> list[int]:
    """vLLM's default capture sizes: 1, 2, 4, by 8 below 256, by 16 up to the cap, and the token budget if it fits."""
    cap = min(max_num_seqs * (1 + num_speculative_tokens) * 2, 512, max_num_batched_tokens)
    sizes = {*(1, 2, 4), *range(8, 256, 8), *range(256, 513, 16)}
    if max_num_batched_tokens <= cap:
        sizes.add(max_num_batched_tokens)
    return sorted(size for size in sizes if size <= cap)


def row_bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Row counts of the context programs: powers of two from 16 below `max_rows`, and `max_rows` itself."""
    if max_rows < 1:
        raise InputError(f"max_rows={max_rows}; pass at least 1")
    sizes, size = [], MIN_ROW_BUCKET
    while size < max_rows:
        sizes.append(size)
        size *= 2
    return (*sizes, max_rows)


class BucketLadder:
    """The buckets of a set of capture sizes, and the smallest one that covers a batch.

    Each mode has its own ladder (vLLM after #53407): a token count sees the nearest FULL group and then the nearest
    PIECEWISE group, and nothing larger. `query_lens` are the decode query lengths, normally one: K + 1.
    """

    def __init__(
        self,
        capture_sizes: Sequence[int],
        *,
        max_num_seqs: int,
        query_lens: int | Sequence[int],
        mode: GraphMode = GraphMode.FULL_DECODE_ONLY,
    ):
        lens = (query_lens,) if isinstance(query_lens, int) else tuple(query_lens)
        sizes = list(capture_sizes)
        if max_num_seqs < 1 or not lens or min(lens) < 1:
            raise InputError(f"max_num_seqs={max_num_seqs}, query_lens={list(lens)}; both start at 1")
        if any(size < 1 for size in sizes) or sizes != sorted(set(sizes)):
            raise InputError(f"capture_sizes={sizes}; pass distinct positive sizes in ascending order")
        self.max_num_seqs = max_num_seqs
        self._staged: dict[GraphMode, list[BatchDescriptor]] = {GraphMode.FULL: [], GraphMode.PIECEWISE: []}
        if mode is not GraphMode.NONE:
            for size in sizes:
                self._stage(size, sizes[-1], max_num_seqs, lens, mode)
        self.candidates: dict[int, list[BatchDescriptor]] = {}
        for kind in (GraphMode.FULL, GraphMode.PIECEWISE):
            self._spread(sorted(self._staged[kind], key=lambda d: d.num_tokens))

    def _stage(self, size: int, max_size: int, max_num_seqs: int, lens: tuple[int, ...], mode: GraphMode) -> None:
        if mode.separate_routine():
            for query_len in lens:
                num_reqs = -(-size // query_len)
                tokens = num_reqs * query_len
                if tokens > max_num_seqs * max(lens) or tokens > max_size or num_reqs > max_num_seqs:
                    continue
                descriptor = BatchDescriptor(GraphMode.FULL, tokens, num_reqs, query_len)
                if descriptor not in self._staged[GraphMode.FULL]:
                    self._staged[GraphMode.FULL].append(descriptor)
        mixed = mode.mixed_mode()
        if mixed is not GraphMode.NONE:
            num_reqs = None if mixed is GraphMode.PIECEWISE else min(size, max_num_seqs)
            self._staged[mixed].append(BatchDescriptor(mixed, size, num_reqs))

    def _spread(self, ascending: list[BatchDescriptor]) -> None:
        """List each group of equal size under every token count from the previous size on."""
        below = 0
        for size in sorted({d.num_tokens for d in ascending}):
            group = [d for d in ascending if d.num_tokens == size]
            for num_tokens in range(below + 1, size + 1):
                self.candidates.setdefault(num_tokens, []).extend(group)
            below = size

    def with_query_len(self, query_len: int) -> "BucketLadder":
        """The same request counts at another query length."""
        counts = sorted({descriptor.padded_reqs for descriptor in self.capture_order(GraphMode.FULL)})
        sizes = [n * query_len for n in counts]
        return BucketLadder(sizes, max_num_seqs=self.max_num_seqs, query_lens=query_len)

    def capture_order(self, mode: GraphMode) -> list[BatchDescriptor]:
        """A mode's buckets, largest first, so that later ones fit into memory already taken."""
        return sorted(self._staged[mode], key=lambda d: -d.num_tokens)

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None) -> BatchDescriptor:
        """The bucket a batch runs in; mode NONE and its own size where none covers it."""
        for descriptor in self.candidates.get(num_tokens, ()):
            if descriptor.covers(num_reqs, num_tokens, uniform_token_count):
                return descriptor
        return BatchDescriptor(GraphMode.NONE, num_tokens, num_reqs)

    @classmethod
    def vllm_default(
        cls, *, max_num_seqs: int, num_speculative_tokens: int, max_num_batched_tokens: int
    ) -> "BucketLadder":
        """vLLM's ladder for a DFlash drafter. It has holes: with R=33, K=3 a batch of 33 requests runs eagerly."""
        sizes = vllm_default_sizes(max_num_seqs, num_speculative_tokens, max_num_batched_tokens)
        return cls(sizes, max_num_seqs=max_num_seqs, query_lens=num_speculative_tokens + 1)

    @classmethod
    def without_holes(cls, *, max_num_seqs: int, query_len: int) -> "BucketLadder":
        """The engine's own default: 1, 2, 4, then powers of two and their halves between (6, 8, 12, 16, 24, ...) up to
        `max_num_seqs`, which is always a bucket. From 3 requests on, padding is at most half of what was asked for."""
        counts = {1, 2, 4} | {base * 2**i for base in (3, 4) for i in range(1, max_num_seqs.bit_length())}
        sizes = sorted({n for n in counts if n < max_num_seqs} | {max_num_seqs})
        return cls([n * query_len for n in sizes], max_num_seqs=max_num_seqs, query_lens=query_len)
