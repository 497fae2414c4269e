"""Capture: one ahead-of-time compiled program per bucket. The only caller of `lower().compile()` for the draft step.

A `Compiled` cannot retrace, which is what a CUDA graph promises; the live context length is data inside it.
"""

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jax_dflash.buckets import BatchDescriptor, BucketLadder, GraphMode
from jax_dflash.batch import EngineConfig
from jax_dflash.draft_step import DraftState, context_step, draft_step, step_inputs, zero_state
from jax_dflash.drafter import DraftWeights
from jax_dflash.numerics import COMPILER_OPTIONS

log = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def _compiles_by_thread() -> Counter:
    """Backend compilations so far by thread id; JAX calls the listener in the thread that compiles."""
    counts: Counter = Counter()

    def listen(event: str, _seconds: float, **_):
        if event == COMPILE_EVENT:
            counts[threading.get_ident()] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
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


def use_compile_cache(directory: str | Path) -> None:
    """Keep compiled programs in `directory` for later processes. Holds for the whole process; call before capture."""
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@dataclass(frozen=True)
class CaptureRow:
    """What one capture cost."""

    program: str
    seconds: float
    temp_bytes: int
    alias_bytes: int


class Programs:
    """The compiled draft steps of a ladder and the context programs of its row buckets."""

    def __init__(
        self,
        config: EngineConfig,
        ladder: BucketLadder,
        weights: DraftWeights,
        *,
        context_in_program: bool = True,
        taps: bool = False,
        compiler_options: dict[str, Any] | None = None,
    ):
        self.config, self.ladder = config, ladder
        self.context_in_program, self.taps = context_in_program, taps
        self.compiler_options = COMPILER_OPTIONS | (compiler_options or {})
        leaves, self._treedef = jax.tree.flatten(weights)
        self._leaves = tuple(leaves)
        self.dtype = weights.fc.dtype
        self.steps: dict[BatchDescriptor, Compiled] = {}
        self.contexts: dict[int, Compiled] = {}
        self.eager: dict[int, Compiled] = {}
        self.report: list[CaptureRow] = []
        self._blank: dict[int, jax.Array] = {}

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
            taps = {} if self.taps else None
            weights = jax.tree.unflatten(self._treedef, leaves)
            state, tokens = draft_step(self.config, weights, state, features, ints, num_reqs=num_reqs, taps=taps)
            return state, tokens, taps

        return dflash_step

    def context_function(self) -> Callable:
        """(leaves, state, features, ints) -> (state, taps): context rows of any batch, laid out for max_num_seqs."""

        def dflash_context(leaves, state, features, ints):
            taps = {} if self.taps else None
            weights = jax.tree.unflatten(self._treedef, leaves)
            inputs, _ = step_inputs(self.config, ints, self.config.max_num_seqs, features.shape[0])
            return DraftState(context_step(self.config, weights, state.pool, features, inputs, taps)), taps

        return dflash_context

    def _compile(self, name: str, function: Callable, abstract: tuple) -> Compiled:
        start = time.perf_counter()
        compiled = jax.jit(function, donate_argnums=1).lower(*abstract).compile(self.compiler_options)
        memory = compiled.memory_analysis()
        self.report.append(
            CaptureRow(name, time.perf_counter() - start, memory.temp_size_in_bytes, memory.alias_size_in_bytes)
        )
        return compiled

    def capture(self, state: DraftState, *, progress: bool = True) -> DraftState:
        """Compile every bucket, largest first, and run each once on PAD slots. The state comes back unchanged."""
        descriptors = self.ladder.capture_order(GraphMode.FULL)
        with _progress(progress) as bar:
            task = bar.add_task(
                "Capturing draft programs (FULL)", total=len(descriptors) + len(self.config.row_buckets), last=""
            )
            for descriptor in descriptors:
                abstract = self.abstract_args(descriptor.num_reqs, self.context_rows(descriptor.num_reqs))
                compiled = self._compile(str(descriptor), self.step_function(descriptor.num_reqs), abstract)
                self.steps[descriptor] = compiled
                state = self._warm_up(compiled, state, descriptor.num_reqs, abstract)[0]
                self._advance(bar, task)
            for rows in reversed(self.config.row_buckets):
                abstract = self.abstract_args(self.config.max_num_seqs, rows)
                compiled = self._compile(f"context {rows} rows", self.context_function(), abstract)
                self.contexts[rows] = compiled
                state = self._warm_up(compiled, state, self.config.max_num_seqs, abstract)[0]
                self._advance(bar, task)
        return jax.block_until_ready(state)

    def _advance(self, bar: Progress, task) -> None:
        row = self.report[-1]
        bar.update(
            task, advance=1, last=f"{row.program}: {row.seconds:.1f} s, {row.temp_bytes / 2**20:.1f} MiB temporary"
        )

    def _warm_up(self, compiled: Compiled, state: DraftState, num_reqs: int, abstract: tuple):
        features = self.blank_features(abstract[2].shape[0])
        return compiled(self._leaves, state, features, self.config.layout(num_reqs).empty())

    def blank_features(self, rows: int) -> jax.Array:
        """Zeros for a step whose context is already stored. Made once per row count: features are never donated."""
        if rows not in self._blank:
            self._blank[rows] = jax.device_put(np.zeros((rows, self.config.draft.feature_size), self.dtype))
        return self._blank[rows]

    def compile_eager(self, num_reqs: int) -> None:
        """A program for a request count that no bucket covers."""
        abstract = self.abstract_args(num_reqs, self.context_rows(num_reqs))
        self.eager[num_reqs] = self._compile(f"eager {num_reqs} requests", self.step_function(num_reqs), abstract)
        self.blank_features(abstract[2].shape[0])
        log.warning(
            "no bucket covers %d requests: compiled an eager program in %.1f s", num_reqs, self.report[-1].seconds
        )

    def run_step(self, descriptor: BatchDescriptor, state: DraftState, features, ints: np.ndarray):
        """(state, draft_tokens [N, K], taps). The state passed in is consumed."""
        eager = descriptor.mode is GraphMode.NONE
        compiled = self.eager[descriptor.num_reqs] if eager else self.steps[descriptor]
        return compiled(self._leaves, state, features, ints)

    def run_context(self, rows: int, state: DraftState, features, ints: np.ndarray):
        """(state, taps): store context rows through the program of a row bucket. The state passed in is consumed."""
        return self.contexts[rows](self._leaves, state, features, ints)


def _progress(enabled: bool) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    return Progress(*columns, console=Console(stderr=True), disable=not enabled)
