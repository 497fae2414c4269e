"""TargetRunner: the target over the next rows of several requests, with verification of drafts.

B requests, T rows of one request, D model width, F features, Q = K + 1 rows of a verify, V vocabulary, R feature rows.
"""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array, Bool, Float, Int

from jax_dflash.attention import dense
from jax_dflash.attention.dense import padded_width
from jax_dflash.batch import PAD_SLOT
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError, TargetConfig
from jax_dflash.inputs import slot_mapping
from jax_dflash.kv_cache import Pool, pool_shape, store_layer
from jax_dflash.numerics import COMPILER_OPTIONS, accum_dtype, from_bits
from jax_dflash.pages import NULL_PAGE
from jax_dflash.programs import CaptureRow, forbid_compiles, progress_bar
from jax_dflash.sampling import verify
from jax_dflash.sampling_params import GREEDY, SamplingColumns, SamplingMode
from jax_dflash.target import TargetWeights, compute_logits, embed, target_forward
from jax_dflash.target_batch import FLOATS, TargetBatch, TargetLimits, TargetOutput, check_taps


def target_step(
    config: TargetConfig,
    weights: TargetWeights,
    pool: Pool,
    ids_BT: Int[Array, "B T"],
    starts_B: Int[Array, "B"],
    num_rows_B: Int[Array, "B"],
    block_tables_BW: Int[Array, "B W"],
    *,
    taps: tuple[int, ...],
    page_size: int,
    max_model_len: int,
) -> tuple[Pool, Float[Array, "B T D"], Float[Array, "B T F"]]:
    """The target over row t of request b at position starts[b] + t, live if t < num_rows[b]; hidden states after the final
    norm, and the features.

    Rows store their K/V in the request's pages and see its positions up to their own. Dead rows, and so requests of no
    rows, store nothing and are seen by nobody; what they return means nothing. Attention reads up to the longest live
    request.
    """
    B, T = ids_BT.shape
    width = block_tables_BW.shape[1]
    tables = jnp.pad(block_tables_BW, ((0, 0), (0, padded_width(width, page_size) - width)), constant_values=NULL_PAGE)
    rows = jnp.arange(T, dtype=jnp.int32)
    positions = starts_B[:, None] + rows
    slots = slot_mapping(positions.reshape(-1), jnp.repeat(tables, T, axis=0), page_size, max_model_len)
    slots = jnp.where((rows < num_rows_B[:, None]).reshape(-1), slots, PAD_SLOT)
    seq_lens = jnp.where(num_rows_B > 0, starts_B + num_rows_B, 0)

    def attend(pool, layer, q, k, v):
        pool = store_layer(pool, layer, k.reshape(B * T, *k.shape[2:]), v.reshape(B * T, *v.shape[2:]), slots)
        return pool, dense.attention(pool, layer, q, tables, seq_lens, positions)

    return target_forward(weights, config, pool, embed(weights, ids_BT), positions, attend, taps)


def last_rows(
    num_rows_B: Int[Array, "B"], num_drafts_B: Int[Array, "B"], width: int, query_len: int
) -> Int[Array, "B Q"]:
    """Which of `width` rows a verify reads: the one before the drafts and each draft; behind them some row in range."""
    first = num_rows_B - 1 - num_drafts_B
    return jnp.clip(first[:, None] + jnp.arange(min(query_len, width), dtype=jnp.int32), 0, width - 1)


def sampling_columns(fields: dict) -> SamplingColumns:
    """How each request is sampled, from the unpacked integers."""
    floats = {name: from_bits(fields[name]) for name in FLOATS}
    return SamplingColumns(**floats, top_k=fields["top_k"], seeds=fields["seeds"])


def compact_rows(features_BTF: Float[Array, "B T F"], num_rows_B: Int[Array, "B"], size: int) -> Float[Array, "R F"]:
    """The live rows, request by request without gaps, then zeros up to `size` rows."""
    B, T, F = features_BTF.shape
    ends = jnp.cumsum(num_rows_B)
    row = jnp.arange(size, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, row, side="right", method="compare_all"), B - 1).astype(jnp.int32)
    source = jnp.minimum(owner * T + row - (ends - num_rows_B)[owner], B * T - 1)
    return jnp.where((row < ends[-1])[:, None], features_BTF.reshape(B * T, F)[source], 0)


def verify_step(
    config: TargetConfig,
    limits: TargetLimits,
    weights: TargetWeights,
    pool: Pool,
    ints: Int[Array, "B _"],
    draft_logits: Float[Array, "R K V"] | None = None,
    seen: Bool[Array, "B V"] | None = None,
    *,
    taps: tuple[int, ...],
    feature_rows: int,
) -> tuple[Pool, Int[Array, "B Q"], Int[Array, "B"], Float[Array, "R F"]]:
    """A whole step over `TargetLimits.pack`: forward, logits of the rows that are verified, verification, features."""
    fields = limits.unpack(ints)
    ids, num_rows, num_drafts = fields["ids"], fields["num_rows"], fields["num_drafts"]
    pool, hidden, features = target_step(
        config, weights, pool, ids, fields["start"], num_rows, fields["block_tables"], taps=taps,
        page_size=limits.page_size, max_model_len=limits.max_model_len,
    )  # fmt: skip
    # Before the LM head: a large vocabulary times every row of a prompt's chunk would not fit.
    index = last_rows(num_rows, num_drafts, ids.shape[1], limits.query_len)
    logits = compute_logits(weights, jnp.take_along_axis(hidden, index[..., None], axis=1))
    draft_tokens = jnp.take_along_axis(ids, index[:, 1:], axis=1)
    if draft_logits is not None:
        draft_logits = draft_logits[fields["request_index"].clip(0), : draft_tokens.shape[1]]
    tokens, num_sampled = verify(
        logits, draft_tokens, num_drafts, fields["start"] + num_rows - 1 - num_drafts, sampling_columns(fields), limits.mode,
        draft_logits, seen,
    )  # fmt: skip
    return pool, tokens, num_sampled, compact_rows(features, num_rows, feature_rows)


class TargetRunner:
    """The target's pool and one ahead-of-time compiled program per (request bucket, row width). Pages belong to the caller.

    Args:
        config: the target.
        weights: `pack_target(...)`; their dtype is the pool's and the features'.
        taps: hidden states that make the features; m is the stream after m layers, 0 the embeddings.
        num_speculative_tokens: K, the drafts of a verify at most.
        max_num_seqs, max_model_len: requests of a batch, and positions of a request, at most.
        num_pages: pages of the pool, the null page 0 among them.
        widths: rows of one request that programs are compiled for, for example (1, K + 1, 32, 256).
        max_num_batched_tokens: rows of a batch with its padding at most; give the draft engine the same.
        ladder: the request buckets; default `BucketLadder.without_holes`.
        mode: how requests may be sampled; programs hold no more than that.
        draft_logits: drafts are sampled too, and `run` is given the logits that they came from.
    """

    def __init__(
        self,
        config: TargetConfig,
        weights: TargetWeights,
        *,
        taps: Sequence[int],
        num_speculative_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_pages: int,
        widths: Sequence[int],
        page_size: int = 16,
        max_num_batched_tokens: int | None = None,
        ladder: BucketLadder | None = None,
        mode: SamplingMode = GREEDY,
        draft_logits: bool = False,
    ):
        self.config, self.taps = config, check_taps(taps, config.geometry.num_layers)
        self.limits = TargetLimits.make(
            config, num_speculative_tokens=num_speculative_tokens, max_num_seqs=max_num_seqs, widths=widths,
            max_model_len=max_model_len, num_pages=num_pages, page_size=page_size, ladder=ladder,
            max_num_batched_tokens=max_num_batched_tokens, mode=mode,
        )  # fmt: skip
        self.draft_logits = draft_logits
        self._no_logits: Array | None = None
        self.waited = 0.0  # seconds, for results of the device
        leaves, self._treedef = jax.tree.flatten(weights)
        self.weights, self._leaves = weights, tuple(leaves)
        self._pool: Pool | None = jnp.zeros(pool_shape(config.geometry, num_pages, page_size), weights.norm.dtype)
        self.programs: dict[tuple[int, int], Compiled] = {}
        self.report: list[CaptureRow] = []
        self.captured = False

    @property
    def pool(self) -> Pool:
        """`[L, 2, P, page, K, H]`. Raises RuntimeError once a failed step has consumed it."""
        if self._pool is None:
            raise RuntimeError("the target lost its pool in a step that failed; make a new TargetRunner")
        return self._pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self._pool = pool

    def _lower(self, num_reqs: int, width: int):
        """The program of one shape, traced: (leaves, pool, ints, draft_logits, seen) -> (pool, tokens, num_sampled,
        features)."""

        def target_program(leaves, pool, ints, draft_logits, seen):
            weights = jax.tree.unflatten(self._treedef, leaves)
            rows = self.limits.feature_rows(num_reqs, width)
            return verify_step(
                self.config, self.limits, weights, pool, ints, draft_logits, seen, taps=self.taps, feature_rows=rows
            )

        arguments = (self._leaves, self.pool, *self._blank(num_reqs, width))
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
        return jax.jit(target_program, donate_argnums=1).lower(*shapes)

    def _blank_logits(self, width: int) -> Array | None:
        """Draft logits where a batch has none; a single row verifies no draft."""
        if not self.draft_logits or width == 1:
            return None
        if self._no_logits is None:
            limits = self.limits
            shape = (limits.max_num_seqs, limits.num_speculative_tokens, limits.vocab_size)
            self._no_logits = jnp.zeros(shape, accum_dtype(self.pool.dtype))
        return self._no_logits

    def _blank(self, num_reqs: int, width: int) -> tuple:
        """(ints, draft_logits, seen) of a batch of padded requests."""
        limits = self.limits
        seen = np.zeros((num_reqs, limits.vocab_size), bool) if limits.mode.penalised else None
        return limits.empty(num_reqs, width), self._blank_logits(width), seen

    def capture(self, *, progress: bool = True) -> None:
        """Compile every program, largest first, and run each once on padding; the pool keeps its bits.

        Tracing is Python and stays in this thread; XLA compiles in others, one per core.
        """
        lowered = {shape: self._lower(*shape) for shape in self.limits.programs}

        def compile_one(shape):
            start = time.perf_counter()
            return lowered[shape].compile(COMPILER_OPTIONS), time.perf_counter() - start

        with progress_bar(progress) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
            task = bar.add_task("Capturing target programs", total=len(lowered), last="")
            futures = {shape: pool.submit(compile_one, shape) for shape in lowered}
            for (num_reqs, width), future in futures.items():
                compiled, seconds = future.result()
                memory = compiled.memory_analysis()
                assert memory is not None, "this backend reports no memory"
                name = f"{num_reqs} requests x {width} rows"
                self.report.append(CaptureRow(name, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes))
                self.programs[num_reqs, width] = compiled
                self._call((num_reqs, width), *self._blank(num_reqs, width))
                last = f"{name}: {seconds:.1f} s, {memory.temp_size_in_bytes / 2**20:.1f} MiB temp"
                bar.update(task, advance=1, last=last)
        jax.block_until_ready(self.pool)
        self.captured = True

    def _call(self, shape: tuple[int, int], ints: np.ndarray, draft_logits: Array | None, seen: np.ndarray | None):
        """Run a program, which consumes the pool. If it fails the pool is gone, and the runner says so from then on."""
        pool, self._pool = self.pool, None
        self._pool, *outputs = self.programs[shape](self._leaves, pool, ints, draft_logits, seen)
        return outputs

    def run(self, batch: TargetBatch, draft_logits: Float[Array, "R K V"] | None = None) -> TargetOutput:
        """One step; waits for its tokens, the features stay on the device. `draft_logits` are the drafter's, if drafts are
        sampled and the batch has some. Raises InputError before anything has changed."""
        if not self.captured:
            raise InputError("the target has no programs yet; call capture() first")
        columns = self.limits.check(batch)
        n = len(columns.tokens)
        shape = self.limits.dispatch(n, int(columns.num_rows.max()))
        blank = self._blank_logits(shape[1])
        logits = blank if blank is None or draft_logits is None else draft_logits
        if self.draft_logits and draft_logits is None and columns.num_drafts.any():
            raise InputError("the batch has drafts that were sampled; pass the draft_logits that they came from")
        with forbid_compiles("run()"):
            ints = self.limits.pack(columns, *shape)
            outputs = self._call(shape, ints, logits, self.limits.seen_rows(columns, shape[0]))
            start = time.perf_counter()
            try:
                tokens, num_sampled = jax.device_get(outputs[:2])
            except Exception:
                self._pool = None  # the step failed while it ran, after its pool had been consumed
                raise
            self.waited += time.perf_counter() - start
        out = np.zeros((n, self.limits.query_len), np.int32)
        out[:, : tokens.shape[1]] = tokens[:n]
        return TargetOutput(tokens=out, num_sampled=num_sampled[:n], features=outputs[2])
