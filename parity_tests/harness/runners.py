"""One draft step of a case by each implementation, as a trace: tap name -> numpy array, floats in float64, which holds
float32 and bfloat16 exactly.

Every runner has the same signature, `run(case, dtype, forced=None, level=2, rerun=True) -> Trace`. With `forced` each tap
is computed from the given values of the taps before it (teacher forcing) instead of its own; with `rerun` a second run must
give the same bits.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from jax_dflash.batch import EngineConfig
from jax_dflash.config import DraftConfig, parse_draft_config
from parity_tests.harness import case as cases
from parity_tests.harness import oracle64
from parity_tests.harness.case import PER_REQUEST, Case

Trace = dict[str, np.ndarray]
Runner = Callable[..., Trace]
DTYPES = ("float32", "bfloat16", "float64")
OPTIMISED = {
    "xla_backend_optimization_level": 3
}  # XLA's default, whatever this process compiles its other programs with


class NotDeterministic(RuntimeError):
    """Two runs of one program on one input that differ; the argument is the first tap that does."""


class CannotRun(RuntimeError):
    """An implementation that is not here or cannot run this case; the message is one line."""


def numpy_trace(values: Mapping[str, Any]) -> Trace:
    """Taps of any framework as numpy."""

    def convert(value):
        if hasattr(value, "is_floating_point"):
            value = (value.double() if value.is_floating_point() else value).cpu().numpy()
        value = np.asarray(value)
        return value.astype(np.int32) if value.dtype.kind in "iu" else value.astype(np.float64)

    return {name: convert(value) for name, value in values.items()}


def traced(call: Callable[[], Mapping[str, Any]], rerun: bool) -> Trace:
    """The trace of a call; with `rerun` one that gives the same bits when repeated. Raises NotDeterministic."""
    first = numpy_trace(call())
    second = numpy_trace(call()) if rerun else first
    for name, value in first.items():
        if not np.array_equal(value, second[name], equal_nan=True):
            raise NotDeterministic(name)
    return first


def oracle(case: Case, forced: Trace | None = None) -> Trace:
    """`oracle64`, plain numpy."""
    columns = {name: case.columns[name] for name in PER_REQUEST}
    step = oracle64.Step(**columns, block_tables=case.columns["block_tables"], hidden_states=case.hidden_states)
    return oracle64.run(
        case.config,
        case.tensors,
        step,
        case.pool,
        num_reqs=case.num_reqs,
        context_rows=case.context_rows,
        page_size=case.page_size,
        max_model_len=case.max_model_len,
        num_speculative_tokens=case.num_speculative_tokens,
        forced=forced,
        yarn_attention=case.yarn_attention,
    )


def draft_config(case: Case) -> DraftConfig:
    """The package's own reading of the configuration; a vocabulary that it does not name is the target's."""
    config = parse_draft_config(case.config, yarn_attention=case.yarn_attention)
    if config.geometry.vocab_size is None:
        rows = len(case.tensors["embed_tokens.weight"])
        config = replace(config, geometry=replace(config.geometry, vocab_size=rows))
    return config


def engine_config(case: Case, draft: DraftConfig) -> EngineConfig:
    """The constants of an engine that would run this case."""
    from jax_dflash.attention.dense import padded_width

    return EngineConfig(
        draft=draft,
        num_speculative_tokens=case.num_speculative_tokens,
        max_num_seqs=case.num_reqs,
        max_model_len=case.max_model_len,
        max_num_batched_tokens=max(case.context_rows, case.num_reqs * (case.num_speculative_tokens + 1)),
        page_size=case.page_size,
        num_pages=(case.pool.shape[2],) * len(draft.page_groups),
        table_width=padded_width(case.columns["block_tables"].shape[1], case.page_size),
    )


def features(case: Case, draft: DraftConfig) -> np.ndarray:
    """The target's hidden states at the drafter's taps, side by side, as a target's forward hands them over. Padded rows
    are NaN: they must reach nothing."""
    rows = np.concatenate([case.hidden_states[i] for i in draft.hidden_state_indices], axis=-1)
    padded = np.full((case.context_rows, rows.shape[1]), np.nan, np.float32)
    padded[: case.live_rows] = rows
    return padded


def pools_of(case: Case, draft: DraftConfig) -> list[np.ndarray]:
    """The case's pool group by group; all groups take the case's one block table."""
    return [case.pool[list(group.layers)] for group in draft.page_groups]


def _run_jax(
    case: Case,
    dtype: str,
    forced: Trace | None,
    level: int,
    mode: str,
    rerun: bool = True,
    compiled: dict | None = None,
) -> Trace:
    """`mode`: jit (ahead-of-time compiled with the production flags), jitted (the same by `jax.jit`), op (op by op),
    default (ahead of time with XLA's default flags). Programs are kept in `compiled` for cases of the same sizes."""
    import jax
    import jax.numpy as jnp

    from jax_dflash import drafter, numerics
    from jax_dflash.draft_step import DraftState, draft_step
    from jax_dflash.kv_cache import layers_in_order
    from jax_dflash.taps import Taps

    kind = numerics.as_dtype(dtype)
    draft = draft_config(case)
    config = engine_config(case, draft)

    def array(x, dtype=kind):
        return jnp.asarray(x if kind == jnp.float64 else np.asarray(x, np.float32), dtype)

    def forced_array(name, x):
        return array(x, numerics.accum_dtype(kind) if name == "logits" else kind)  # logits are never rounded

    tensors = {name: array(v) if v.dtype.kind == "f" else jnp.asarray(v, jnp.int32) for name, v in case.tensors.items()}
    weights = drafter.pack(tensors, draft)
    ints = jnp.asarray(config.layout(case.num_reqs).pack(case.columns, case.live_rows))
    forced = {name: forced_array(name, value) for name, value in (forced or {}).items()}

    def step(weights, pools, rows, ints, forced):
        tap = Taps(level, forced)
        state, tokens = draft_step(config, weights, DraftState(pools), rows, ints, num_reqs=case.num_reqs, tap=tap)
        return {"draft_tokens": tokens, "pool": layers_in_order(draft, state.pools)} | tap.values

    args = weights, tuple(map(array, pools_of(case, draft))), array(features(case, draft)), ints, forced
    if mode == "op":
        with jax.disable_jit():
            return traced(lambda: step(*args), rerun)
    if mode == "jitted":
        jitted = jax.jit(step, compiler_options=numerics.COMPILER_OPTIONS | OPTIMISED)
        return traced(lambda: jitted(*args), rerun)
    compiled = {} if compiled is None else compiled
    sizes = [getattr(case, name) for name in cases.SIZES]
    key = json.dumps([case.config, case.yarn_attention, sizes, sorted(tensors), dtype, level, sorted(forced)])
    if key not in compiled:
        compiled[key] = (
            jax.jit(step).lower(*args).compile(OPTIMISED | (numerics.COMPILER_OPTIONS if mode == "jit" else {}))
        )
    return traced(lambda: compiled[key](*args), rerun)


def _run_torch(
    case: Case, dtype: str, forced: Trace | None, level: int, attention: str, device: str, rerun: bool = True
) -> Trace:
    import torch

    from jax_dflash.taps import Taps
    from torch_ref import drafter, numerics
    from torch_ref.draft_step import DraftState, draft_step
    from torch_ref.kv_cache import layers_in_order, zero_pool

    numerics.pin_numerics()
    kind = numerics.as_dtype(dtype)
    draft = draft_config(case)
    config = engine_config(case, draft)

    def array(x, dtype=kind):
        return torch.tensor(np.asarray(x)).to(device, dtype)

    def forced_array(name, x):
        return array(x, numerics.accum_dtype(kind) if name == "logits" else kind)  # logits are never rounded

    tensors = {name: array(v, kind if v.dtype.kind == "f" else torch.int32) for name, v in case.tensors.items()}
    weights = drafter.pack(tensors, draft)
    rows = array(features(case, draft))
    forced = {name: forced_array(name, value) for name, value in (forced or {}).items()}
    ints = torch.from_numpy(config.layout(case.num_reqs).pack(case.columns, case.live_rows)).to(device)

    def step():
        pools = tuple(zero_pool(pool.shape, kind, device) for pool in pools_of(case, draft))
        for pool, values in zip(pools, pools_of(case, draft), strict=True):
            pool[:] = array(values)
        tap = Taps(level, forced)
        state, tokens = draft_step(
            config,
            weights,
            DraftState(pools),
            rows,
            ints,
            num_reqs=case.num_reqs,
            table_width=config.table_width,
            attention=attention,
            tap=tap,
        )
        return {"draft_tokens": tokens, "pool": layers_in_order(draft, state.pools)} | tap.values

    with torch.inference_mode():
        return traced(step, rerun)


def fits_a_graph(case: Case) -> bool:
    """Whether a step is one replay: at most one verify's rows per request. Prefill runs eagerly (spec section 2.3)."""
    return case.live_rows <= case.num_reqs * (case.num_speculative_tokens + 1)


def _run_graph(case: Case, dtype: str) -> Trace:
    """A captured CUDA graph of the step replayed once; it has no taps inside."""
    import torch

    from jax_dflash.buckets import BucketLadder
    from torch_ref import drafter, numerics
    from torch_ref.cuda_graphs import CudaGraphs
    from torch_ref.draft_step import DraftState
    from torch_ref.kv_cache import layers_in_order, zero_pool

    if not torch.cuda.is_available():
        raise CannotRun("torch.graph needs an NVIDIA GPU; pass --sut torch.eager or another runner")
    Q = case.num_speculative_tokens + 1
    if not fits_a_graph(case):
        raise CannotRun(
            f"torch.graph: the step brings {case.live_rows} target rows, a graph of {case.num_reqs} requests takes "
            f"{case.num_reqs * Q}; pass --sut torch.eager, as such a step runs in the engine"
        )
    kind, draft = numerics.as_dtype(dtype), draft_config(case)
    config = engine_config(case, draft)
    kinds = {"f": kind, "i": torch.int32}
    tensors = {name: torch.tensor(v).to("cuda", kinds[v.dtype.kind]) for name, v in case.tensors.items()}
    before = [torch.tensor(pool).to("cuda", kind) for pool in pools_of(case, draft)]
    pools = tuple(zero_pool(pool.shape, kind, "cuda") for pool in before)
    ladder = BucketLadder.without_holes(max_num_seqs=case.num_reqs, query_len=Q)
    with torch.inference_mode():
        weights = drafter.pack(tensors, draft)
        graphs = CudaGraphs(config, ladder, weights, DraftState(pools), "dense")
        graphs.capture(progress=False)
        descriptor = ladder.dispatch(case.num_reqs, case.num_reqs * Q, Q)
        rows = torch.tensor(features(case, draft)[: case.live_rows]).to("cuda", kind)
        ints = torch.from_numpy(config.layout(case.num_reqs).pack(case.columns, case.live_rows))

        def replay():
            for pool, values in zip(pools, before, strict=True):
                pool.copy_(values)
            tokens = graphs.replay(descriptor, rows, ints).clone()
            return {"draft_tokens": tokens, "pool": layers_in_order(draft, pools).clone()}

        return traced(replay, True)


class Float64Worker:
    """JAX in float64 needs a process with x64 on: one is started at first use and serves every later call."""

    def __init__(self):
        environ = os.environ | {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
        command, root = [sys.executable, "-m", "parity_tests.harness.worker"], Path(__file__).parents[2]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, **pipes, text=True, env=environ, cwd=root)
        self.plant: str | None = None  # a bug to plant in that process, as `mutations.planted` does in this one
        self.folder = tempfile.TemporaryDirectory()

    def run(self, case: Case, forced: Trace | None = None) -> Trace:
        """A trace of the JAX package in float64. Raises CannotRun with the worker's own last line."""
        folder = Path(self.folder.name)
        cases.save(case, folder / "case.safetensors")
        if forced is not None:
            save_file(
                {name: np.ascontiguousarray(value) for name, value in forced.items()}, folder / "forced.safetensors"
            )
        request = {"folder": str(folder), "forced": forced is not None, "plant": self.plant}
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        try:
            answer = json.loads(line or '{"error": "it ended"}')
        except json.JSONDecodeError:
            answer = {"error": f"it said {line.strip()[:80]!r}"}
        if "error" in answer:
            raise CannotRun(f"JAX in float64 failed in its own process: {answer['error']}")
        return load_file(folder / "trace.safetensors")

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(timeout=30)
        if self.process.stdout:
            self.process.stdout.close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@cache
def float64_worker() -> Float64Worker:
    """The process-wide worker."""
    import atexit

    worker = Float64Worker()
    atexit.register(worker.close)
    return worker


RUNNERS = ("jax", "jax.jitted", "jax.op", "jax.default", "torch.eager", "torch.sdpa", "torch.graph")


def runner(name: str, device: str = "cpu") -> Runner:
    """`run(case, dtype, forced=None, level=2, rerun=True) -> Trace` of an implementation, which raises CannotRun. Raises
    ValueError for a name that is none."""
    if name not in RUNNERS:
        raise ValueError(f"runner {name!r} is unknown; pass one of {', '.join(RUNNERS)}")
    package, _, mode = name.partition(".")
    compiled: dict[str, Any] = {}  # of this runner only: another one may see a package with a bug planted in it

    def run(case: Case, dtype: str, forced: Trace | None = None, level: int = 2, rerun: bool = True) -> Trace:
        try:
            if name == "torch.graph":
                if forced is not None:
                    raise CannotRun("a CUDA graph has no taps to force; compare torch.eager instead")
                return _run_graph(case, dtype)
            if package == "torch":
                attention = "sdpa" if mode == "sdpa" else "dense"
                return _run_torch(case, dtype, forced, level, attention, {"cpu": "cpu", "gpu": "cuda"}[device], rerun)
            if dtype == "float64":
                return float64_worker().run(case, forced)
            return _run_jax(case, dtype, forced, level, mode or "jit", rerun, compiled)
        except (CannotRun, NotDeterministic):
            raise
        except Exception as error:
            # Whatever a package raises is its own failure to run, never the user's input or a verdict.
            raise CannotRun(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error

    return run


def float64_run(case: Case, name: str, forced: Trace | None = None) -> Trace:
    """The same code in float64 on the CPU: one process with x64 for all ways of running JAX, eager for a CUDA graph.
    Raises CannotRun."""
    name = {"torch.graph": "torch.eager"}.get(name, name)
    return runner(name if name.startswith("torch") else "jax")(case, "float64", forced, rerun=False)
