"""Capture: one ahead-of-time compiled program per bucket. The only caller of `lower().compile()` for the draft step.

A `Compiled` cannot retrace, which is what a CUDA graph promises; the live context length is data inside it.
"""

import contextlib
import functools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.stages import Compiled, Lowered
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jax_dflash.batch import EngineConfig
from jax_dflash.buckets import BatchDescriptor, BucketLadder, GraphMode
from jax_dflash.draft_step import DraftState, context_step, draft_step, step_inputs, zero_state
from jax_dflash.drafter import DraftWeights
from jax_dflash.numerics import COMPILER_OPTIONS
from jax_dflash.taps import Taps

log = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def _compiles_by_thread() -> Counter:
    """Backend compilations so far by thread id; JAX calls the listener in the thread that compiles."""
    counts: Counter = Counter()

    def listen(event: str, duration: float, **_: Any):
        if event == COMPILE_EVENT:
            counts[threading.get_ident()] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)  # pyright: ignore[reportArgumentType]
    return counts


def num_compiles() -> int:
    """Backend compilations of this thread since the first call; the first call starts the count."""
    return _compiles_by_thread()[threading.get_ident()]


@contextlib.contextmanager
def forbid_compiles(what: str) -> Iterator[None]:
    """Raise RuntimeError if this thread compiled anything inside the block."""
    before = num_compiles()
    yield
    if (count := num_compiles() - before) > 0:
        raise RuntimeError(
            f"{what} compiled {count} program(s) after capture; this is a bug in the engine, please report it"
        )


@contextlib.contextmanager
def compile_cache(directory: str | Path) -> Iterator[None]:
    """Keep what compiles inside the block in `directory`, small programs too, for later processes to load."""
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX opens a cache once and would go on with an earlier directory, or none
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@dataclass(frozen=True)
class CaptureRow:
    """What one capture cost."""

    program: str
    seconds: float
    temp_bytes: int
    alias_bytes: int


@dataclass(frozen=True)
class _Job:
    """A traced program on its way to be compiled."""

    name: str
    num_reqs: int
    context_rows: int
    lowered: Lowered
    options: dict[str, Any]

    def compile(self) -> tuple[Compiled, float]:
        """The program and the seconds it took; safe in any thread."""
        start = time.perf_counter()
        return self.lowered.compile(self.options), time.perf_counter() - start


class Programs:
    """The compiled draft steps of a ladder and the context programs of its row buckets."""

    def __init__(
        self,
        config: EngineConfig,
        ladder: BucketLadder,
        weights: DraftWeights,
        *,
        context_in_program: bool = True,
        taps: int = 0,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.config, self.ladder = config, ladder
        self.context_in_program, self.taps = context_in_program, taps
        self.compiler_options = COMPILER_OPTIONS | (compiler_options or {})
        self.set_weights(weights)
        self.dtype = weights.fc.dtype
        self.steps: dict[BatchDescriptor, Compiled] = {}
        self.contexts: dict[int, Compiled] = {}
        self.eager: dict[int, Compiled] = {}
        self.report: list[CaptureRow] = []
        self._blank: dict[int, jax.Array] = {}

    def set_weights(self, weights: DraftWeights) -> None:
        """What the programs are called with: of the shapes that they are compiled for."""
        self.weights = weights
        leaves, self._treedef = jax.tree.flatten(weights)
        self._leaves = tuple(leaves)

    def context_rows(self, num_reqs: int) -> int:
        """Context rows that a step of this bucket stores itself."""
        return self.config.context_rows(num_reqs) if self.context_in_program else 0

    def abstract_args(self, num_reqs: int, context_rows: int) -> tuple:
        """(leaves, state, features, ints) as shapes: what is lowered, what warm-up fills, what a call must match."""

        def abstract(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)

        state = jax.eval_shape(lambda: zero_state(self.config, self.dtype))
        features = jax.ShapeDtypeStruct((context_rows, self.config.draft.feature_size), self.dtype)
        ints = jax.ShapeDtypeStruct((self.config.layout(num_reqs).size,), jnp.int32)
        return tuple(map(abstract, self._leaves)), jax.tree.map(abstract, state), features, ints

    def step_function(self, num_reqs: int) -> Callable:
        """The function that is compiled for a bucket: (leaves, state, features, ints) -> (state, draft_tokens, taps)."""

        def dflash_step(leaves, state, features, ints):
            tap = Taps(self.taps)
            weights = jax.tree.unflatten(self._treedef, leaves)
            state, tokens = draft_step(self.config, weights, state, features, ints, num_reqs=num_reqs, tap=tap)
            return state, tokens, tap.values

        return dflash_step

    def context_function(self) -> Callable:
        """(leaves, state, features, ints) -> (state, taps): context rows of any batch, laid out for max_num_seqs."""

        def dflash_context(leaves, state, features, ints):
            tap = Taps(self.taps)
            weights = jax.tree.unflatten(self._treedef, leaves)
            inputs, _ = step_inputs(self.config, ints, self.config.max_num_seqs, features.shape[0])
            pools = context_step(self.config, weights, state.pools, features, inputs, tap)
            return state._replace(pools=pools), tap.values

        return dflash_context

    def _lower(self, name: str, function: Callable, num_reqs: int, context_rows: int) -> "_Job":
        abstract = self.abstract_args(num_reqs, context_rows)
        lowered = jax.jit(function, donate_argnums=1).lower(*abstract)
        return _Job(name, num_reqs, context_rows, lowered, self.compiler_options)

    def _finish(self, job: "_Job", compiled: Compiled, seconds: float) -> Compiled:
        memory = compiled.memory_analysis()
        assert memory is not None, "this backend reports no memory"
        self.report.append(CaptureRow(job.name, seconds, memory.temp_size_in_bytes, memory.alias_size_in_bytes))
        return compiled

    def capture(self, state: DraftState, context_rows: Collection[int], *, progress: bool = True) -> DraftState:
        """Compile every bucket, largest first, and run each once on PAD slots. The state comes back unchanged. So do the
        programs that store `context_rows` rows of context alone.

        Tracing is Python and stays in this thread; XLA compiles in others, one per core.
        """
        descriptors = self.ladder.capture_order(GraphMode.FULL)
        steps = [
            self._lower(str(d), self.step_function(d.padded_reqs), d.padded_reqs, self.context_rows(d.padded_reqs))
            for d in descriptors
        ]
        buckets = sorted(context_rows, reverse=True)
        stores = [
            self._lower(f"context {rows} rows", self.context_function(), self.config.max_num_seqs, rows)
            for rows in buckets
        ]
        jobs = steps + stores
        with progress_bar(progress) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
            task = bar.add_task("Capturing draft programs", total=len(jobs), last="")
            done = []
            for job, future in [(job, pool.submit(job.compile)) for job in jobs]:
                compiled = self._finish(job, *future.result())
                done.append(compiled)
                features = self.blank_features(job.context_rows)
                state = compiled(self._leaves, state, features, self.config.layout(job.num_reqs).empty())[0]
                row = self.report[-1]
                last = f"{row.program}: {row.seconds:.1f} s, {row.temp_bytes / 2**20:.1f} MiB temp"
                bar.update(task, advance=1, last=last)
        self.steps = dict(zip(descriptors, done[: len(steps)], strict=True))
        self.contexts = dict(zip(buckets, done[len(steps) :], strict=True))
        return jax.block_until_ready(state)

    def blank_features(self, rows: int) -> jax.Array:
        """Zeros for a step whose context is already stored. Made once per row count: features are never donated."""
        if rows not in self._blank:
            self._blank[rows] = jax.device_put(np.zeros((rows, self.config.draft.feature_size), self.dtype))
        return self._blank[rows]

    def compile_eager(self, num_reqs: int) -> None:
        """A program for a request count that no bucket covers."""
        rows = self.context_rows(num_reqs)
        job = self._lower(f"eager {num_reqs} requests", self.step_function(num_reqs), num_reqs, rows)
        self.eager[num_reqs] = self._finish(job, *job.compile())
        self.blank_features(rows)
        log.warning(
            "no bucket covers %d requests: compiled an eager program in %.1f s", num_reqs, self.report[-1].seconds
        )

    def run_step(self, descriptor: BatchDescriptor, state: DraftState, features, ints: np.ndarray):
        """(state, draft_tokens [N, K], taps). The state passed in is consumed."""
        eager = descriptor.mode is GraphMode.NONE
        compiled = self.eager[descriptor.padded_reqs] if eager else self.steps[descriptor]
        return compiled(self._leaves, state, features, ints)

    def run_context(self, rows: int, state: DraftState, features, ints: np.ndarray):
        """(state, taps): store context rows through the program of a row bucket. The state passed in is consumed."""
        return self.contexts[rows](self._leaves, state, features, ints)


def progress_bar(enabled: bool) -> Progress:
    """The bar of a capture, on stderr; its field `last` says what was captured last."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[last]}"),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not enabled)
