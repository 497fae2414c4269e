"""One step of a target: what its caller passes and gets back, the limits, and the checks before anything runs. Plain
Python and numpy: both runners use it.

n requests of a batch, N of its bucket, T rows of one request, Q = K + 1 rows of a verify, W pages of a block table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jax_dflash.buckets import BucketLadder, GraphMode, row_bucket_sizes
from jax_dflash.config import InputError, TargetConfig
from jax_dflash.pages import NULL_PAGE
from jax_dflash.sampling_params import GREEDY, SamplingMode, SamplingParams, float_bits

Ints = Sequence[int] | np.ndarray
# How a request is sampled, as integers: the fields of SamplingColumns, floats as their bits, and its row of draft state.
FLOATS = ("temperature", "top_p", "repetition_penalty")
SAMPLING = (*FLOATS, "top_k", "seeds", "request_index")


FIELDS = ("start", "num_rows", "num_drafts", *SAMPLING)
GREEDY_PARAMS = SamplingParams(max_new_tokens=1)


def sampling_bits(params: SamplingParams, request_index: int) -> list[int]:
    """One request's row of `SAMPLING`."""
    floats = float_bits([getattr(params, name) for name in FLOATS])
    return [*floats.tolist(), params.top_k, params.seed, request_index]


@dataclass(frozen=True, kw_only=True)
class TargetBatch:
    """The next rows of some requests.

    `tokens[i]` run at positions from `start[i]` on: a chunk of a prompt, or the last token and its drafts. The last
    `num_drafts[i]` of them are drafts to verify, 0 in prefill and plain decoding. `block_tables [n, W]` hold the pages of
    each request's positions up to its last row.

    `params` say how each request is sampled, greedily by default; `history` holds its tokens so far, which a repetition
    penalty needs; `request_index` its row in the drafter's `draft_logits`.
    """

    tokens: Sequence[Ints]
    start: Ints
    num_drafts: Ints
    block_tables: np.ndarray
    params: Sequence[SamplingParams] | None = None
    history: Sequence[Ints] | None = None
    request_index: Ints | None = None


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """What the target said.

    `tokens [n, K + 1]`: of each request the accepted drafts and then the target's own next token, `num_sampled[i]` in all;
    0 behind them; `num_drafts + 1 - num_sampled` drafts were rejected. A prompt's chunk has one token, the one after its
    last row. `features [rows, F]` stay on the device: all rows
    of the batch, request by request without gaps, then zeros up to a row count that `DraftEngine.propose` takes.
    """

    tokens: np.ndarray
    num_sampled: np.ndarray
    features: Any


class Columns(NamedTuple):
    """A checked batch, int32."""

    tokens: list[np.ndarray]
    start: np.ndarray
    num_rows: np.ndarray
    num_drafts: np.ndarray
    block_tables: np.ndarray
    sampling: np.ndarray  # [n, len(SAMPLING)], floats as their bits
    seen: np.ndarray | None  # [n, V] bool, where a mode penalises

    @property
    def longest(self) -> int:
        """Positions of the longest request after the step."""
        return int(np.max(self.start + self.num_rows))


def _ints(name: str, value: Any, ndim: int = 1) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        raise InputError(
            f"{name} has shape {list(array.shape)} of {array.dtype}, expected integers of {ndim} dimension(s)"
        )
    return array


@dataclass(frozen=True, kw_only=True)
class TargetLimits:
    """What is constant over all steps of a runner; `make` checks it.

    A step runs at (a request bucket, a width in rows): `programs` lists the pairs, of which none has more than
    `max_num_batched_tokens` rows.
    """

    vocab_size: int
    num_speculative_tokens: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    widths: tuple[int, ...]
    buckets: tuple[int, ...]
    mode: SamplingMode

    @classmethod
    def make(
        cls,
        config: TargetConfig,
        *,
        num_speculative_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_pages: int,
        widths: Sequence[int],
        page_size: int = 16,
        max_num_batched_tokens: int | None = None,
        ladder: BucketLadder | None = None,
        mode: SamplingMode = GREEDY,
    ) -> "TargetLimits":
        """Defaults are those of `EngineConfig.make`: room for a verify of every request and 512 rows. Raises InputError."""
        K, widths = num_speculative_tokens, tuple(sorted(set(widths)))
        for name, value, least in (
            ("num_speculative_tokens", K, 0), ("max_num_seqs", max_num_seqs, 1), ("page_size", page_size, 1),
            ("num_pages", num_pages, 2), ("max_model_len", max_model_len, 1),
        ):  # fmt: skip
            if value < least:
                raise InputError(f"{name}={value}; pass at least {least}")
        if max_model_len > config.max_positions:
            raise InputError(f"max_model_len={max_model_len}; this target is made for {config.max_positions} positions")
        verify_rows = max_num_seqs * (K + 1)
        rows = max(verify_rows, 512) if max_num_batched_tokens is None else max_num_batched_tokens
        if rows < verify_rows:
            raise InputError(
                f"max_num_batched_tokens={rows} is less than a verify of {max_num_seqs} requests x {K + 1} rows; "
                f"pass {verify_rows} or more"
            )
        if not widths or widths[0] < 1 or not any(K + 1 <= width <= rows // max_num_seqs for width in widths):
            raise InputError(f"widths={list(widths)}; pass row counts from 1 on, {K + 1} rows of a verify among them")
        ladder = ladder or BucketLadder.without_holes(max_num_seqs=max_num_seqs, query_len=K + 1)
        buckets = tuple(sorted(d.padded_reqs for d in ladder.capture_order(GraphMode.FULL)))
        if not buckets or buckets[-1] != max_num_seqs:
            raise InputError(f"the ladder's buckets {list(buckets)} do not end with max_num_seqs={max_num_seqs}")
        return cls(
            vocab_size=config.vocab_size,
            num_speculative_tokens=K,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=rows,
            page_size=page_size,
            num_pages=num_pages,
            widths=widths,
            buckets=buckets,
            mode=mode,
        )

    @property
    def query_len(self) -> int:
        """Rows of a full verify: the last token and K drafts."""
        return self.num_speculative_tokens + 1

    @property
    def table_width(self) -> int:
        """Pages of a request of max_model_len."""
        return math.ceil(self.max_model_len / self.page_size)

    @property
    def programs(self) -> list[tuple[int, int]]:
        """(requests, width) of every program, largest first."""
        pairs = [(n, width) for n in self.buckets for width in self.widths if n * width <= self.max_num_batched_tokens]
        return sorted(pairs, key=lambda pair: (pair[0] * pair[1], pair), reverse=True)

    def max_rows(self, num_reqs: int) -> int:
        """Rows that the longest request of such a batch may have: how to size a prompt's chunk."""
        bucket = next(n for n in self.buckets if n >= num_reqs)
        return max(width for n, width in self.programs if n == bucket)

    def dispatch(self, num_reqs: int, num_rows: int) -> tuple[int, int]:
        """The program of a batch whose longest request has `num_rows` rows. Raises InputError."""
        if num_rows > self.max_rows(num_reqs):
            raise InputError(
                f"{num_rows} rows of one request among {num_reqs} exceed the {self.max_rows(num_reqs)} that "
                f"max_num_batched_tokens={self.max_num_batched_tokens} and widths={list(self.widths)} leave; run the prompt "
                "in smaller chunks or beside fewer requests"
            )
        bucket = next(n for n in self.buckets if n >= num_reqs)
        return bucket, next(width for width in self.widths if width >= num_rows)

    def feature_rows(self, num_reqs: int, width: int) -> int:
        """Rows of a program's features: the drafter bucket's own where no request has more than a verify, else a row
        bucket, as `EngineConfig.padded_rows` expects of a device array."""
        if width <= self.query_len:
            return num_reqs * self.query_len
        return next(size for size in row_bucket_sizes(self.max_num_batched_tokens) if size >= num_reqs * width)

    def check(self, batch: TargetBatch) -> Columns:
        """A batch that can run, as int32. Raises InputError."""
        n = len(batch.tokens)
        if not 1 <= n <= self.max_num_seqs:
            raise InputError(f"the batch has {n} requests, expected 1 to max_num_seqs={self.max_num_seqs}")
        tokens = [_ints(f"tokens[{i}]", row) for i, row in enumerate(batch.tokens)]
        start, num_drafts = _ints("start", batch.start), _ints("num_drafts", batch.num_drafts)
        tables = _ints("block_tables", batch.block_tables, ndim=2)
        for name, value in (("start", start), ("num_drafts", num_drafts), ("block_tables", tables)):
            if len(value) != n:
                raise InputError(f"{name} has {len(value)} rows for {n} requests")
        if np.min(tables, initial=0) < 0 or np.max(tables, initial=0) >= self.num_pages:
            raise InputError(f"block_tables holds page ids outside 0 to {self.num_pages - 1}")
        for i, row in enumerate(tokens):
            self._check_request(i, row, int(start[i]), int(num_drafts[i]), tables[i])
        num_rows = np.array([len(row) for row in tokens], np.int32)
        return Columns(
            [row.astype(np.int32) for row in tokens], start.astype(np.int32), num_rows, num_drafts.astype(np.int32),
            tables[:, : self.table_width].astype(np.int32), *self._check_sampling(batch),
        )  # fmt: skip

    def _check_sampling(self, batch: TargetBatch) -> tuple[np.ndarray, np.ndarray | None]:
        """How each request is sampled, as `SAMPLING`, and the tokens that it has seen."""
        n = len(batch.tokens)
        params = [GREEDY_PARAMS] * n if batch.params is None else list(batch.params)
        rows = [-1] * n if batch.request_index is None else list(batch.request_index)
        if len(params) != n or len(rows) != n:
            raise InputError(f"{len(params)} params and {len(rows)} entries of request_index for {n} requests")
        if not self.mode.covers(SamplingMode.of(params)):
            raise InputError(f"the batch needs {SamplingMode.of(params)}, the programs are compiled for {self.mode}")
        sampling = np.array([sampling_bits(*each) for each in zip(params, rows, strict=True)], np.int32)
        if not self.mode.penalised:
            return sampling, None
        if batch.history is None or len(batch.history) != n:
            raise InputError("a repetition penalty needs the tokens of each request so far; pass history")
        seen = np.zeros((n, self.vocab_size), bool)
        for row, history in zip(seen, batch.history, strict=True):
            row[np.asarray(history, np.int64)] = True
        return sampling, seen

    def _check_request(self, i: int, tokens: np.ndarray, start: int, num_drafts: int, table: np.ndarray) -> None:
        end = start + len(tokens)
        if not 0 <= num_drafts <= min(self.num_speculative_tokens, len(tokens) - 1):
            raise InputError(
                f"request {i}: num_drafts={num_drafts} of {len(tokens)} rows; expected at least one row before the drafts "
                f"and 0 to {self.num_speculative_tokens} drafts"
            )
        if start < 0 or end > self.max_model_len:
            raise InputError(
                f"request {i}: positions {start} to {end - 1} are outside 0 to max_model_len={self.max_model_len} - 1; "
                "end the request or pass a larger max_model_len"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            raise InputError(f"request {i}: token {bad} is outside the vocabulary of {self.vocab_size}")
        pages = math.ceil(end / self.page_size)
        if len(table) < pages or (table[:pages] == NULL_PAGE).any():
            raise InputError(f"request {i}: its block table has no page for each of positions 0 to {end - 1}")

    def pack(self, columns: Columns, num_reqs: int, width: int) -> np.ndarray:
        """A batch as one array `[num_reqs, 9 + width + W]`, padded: start, rows, drafts, `SAMPLING`, ids, pages."""
        ints = self.empty(num_reqs, width)
        fields, n = self.unpack(ints), len(columns.tokens)
        for name in ("start", "num_rows", "num_drafts"):
            fields[name][:n] = getattr(columns, name)
        for i, name in enumerate(SAMPLING):
            fields[name][:n] = columns.sampling[:, i]
        for i, row in enumerate(columns.tokens):
            fields["ids"][i, : len(row)] = row
        fields["block_tables"][:n, : columns.block_tables.shape[1]] = columns.block_tables
        return ints

    def empty(self, num_reqs: int, width: int) -> np.ndarray:
        """A batch of padded requests only: no rows, nothing is stored, greedy."""
        ints = np.zeros((num_reqs, len(FIELDS) + width + self.table_width), np.int32)
        fields = self.unpack(ints)
        for name, value in zip(SAMPLING, sampling_bits(GREEDY_PARAMS, -1), strict=True):
            fields[name][:] = value
        return ints

    def unpack(self, ints) -> dict:
        """Views of a packed array (numpy, JAX or PyTorch) by field name."""
        split = ints.shape[1] - self.table_width
        fields = {name: ints[:, i] for i, name in enumerate(FIELDS)}
        return fields | {"ids": ints[:, len(FIELDS) : split], "block_tables": ints[:, split:]}

    def seen_rows(self, columns: Columns, num_reqs: int) -> np.ndarray | None:
        """`Columns.seen` padded to a bucket."""
        if columns.seen is None:
            return None
        return np.pad(columns.seen, ((0, num_reqs - len(columns.seen)), (0, 0)))


def check_taps(taps: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Taps of a target: hidden state m is the stream after m layers. Raises InputError."""
    if any(type(m) is not int or not 0 <= m <= num_layers for m in taps):
        raise InputError(f"taps={list(taps)}; expected hidden states 0 to {num_layers} of this target")
    return tuple(taps)
