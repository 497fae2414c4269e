"""compare: the same draft steps in JAX and PyTorch, in lockstep on real text, and how fast each is.

The target runs once. Its features go to every drafter: the JAX programs whose drafts it verifies, the same programs with
taps, PyTorch eager with the contract's attention in the same dtype and in float64, PyTorch eager with its fused attention,
and on a GPU the latter's replayed CUDA graphs. What is timed is the fused one.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from jax_dflash import drafter as jax_drafter
from jax_dflash import excerpts, numerics
from jax_dflash import target as jax_target
from jax_dflash.batch import PAD_SLOT, TargetStep
from jax_dflash.buckets import BucketLadder, GraphMode
from jax_dflash.config import InputError, check_pair, load_draft_config, load_target_config
from jax_dflash.engine import DraftEngine
from jax_dflash.greedy_loop import GreedyLoop, LoopStep, num_pages
from jax_dflash.modules import tensors
from jax_dflash.names import match_draft
from jax_dflash.programs import compile_cache, num_compiles
from jax_dflash.taps import live_part, tap_table
from jax_dflash.target_runner import TargetRunner
from torch_ref import drafter as torch_drafter
from torch_ref import numerics as torch_numerics
from torch_ref import target as torch_target
from torch_ref.engine import DraftEngine as TorchEngine

# A token is decided if its float64 top-2 margin is more than this many sigma, sigma being the RMS error of PyTorch
# eager's logits on that row. One run is one draw of that error, at times a lucky one: both of eager's attention kernels
# count. Even so bfloat16's errors have heavier tails than a Gaussian's (LOG.md).
SIGMAS = 5
MIN_TOKENS = 2000
# Share of tokens that may be undecidable, and relative RMS distance of JAX from PyTorch at any tap.
LIMITS = {"float32": (0.001, 1e-5), "bfloat16": (0.1, 2e-2)}
PROMPT_LENGTHS = (24, 200, 57, 330, 101, 16, 260, 150)  # tokens, in turn: short and long, several prefill chunks
CHUNK = 128
MIN_TAU = 3.0  # of the shipped pair at its default K: both frameworks drafting the same nonsense would agree too
MAX_ERROR = 1e30  # stands for an error that is not finite: JSON has no infinity


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """What the command line asks for. `device` is cpu or gpu; `yarn_attention` as in `parse_draft_config`."""

    checkpoint: Path
    target: Path
    pair: str
    device: str
    dtype: str
    num_speculative_tokens: int | None
    max_num_seqs: int
    max_model_len: int
    yarn_attention: str = "mscale"
    allow_long_block: bool = False
    compile_cache: str | None = None
    num_prompts: int | None = None  # default: three for each request of the largest bucket, 24 at least
    max_new_tokens: int = 96
    timed_steps: int = 30


@dataclass
class Tally:
    """What the lockstep counted."""

    tokens_compared: int = 0
    tokens_equal: int = 0
    undecidable: int = 0
    undecidable_unequal: int = 0
    fused_equal: int = 0  # tokens that PyTorch's fused attention drafts like JAX
    pool_checks: int = 0
    errors: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    by_bucket: dict[int, list[float]] = field(default_factory=dict)  # num_reqs -> [equal, compared, worst error]
    compiles: int = 0
    torch_accepted: int = 0
    torch_steps: int = 0
    torch_drafts: dict[int, np.ndarray] = field(default_factory=dict)
    jax_drafts: dict[int, np.ndarray] = field(default_factory=dict)

    def fault(self, what: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(what)

    def float_error(self, bucket: int, name: str, ours: np.ndarray, theirs: np.ndarray, limit: float) -> None:
        """Keep the relative RMS distance of one tap; past the limit, or not finite alike, it is a fault."""
        error = min(relative_rms(ours, theirs), MAX_ERROR)
        error = MAX_ERROR if np.isnan(error) else error
        self.errors[name] = max(self.errors.get(name, 0.0), error)
        row = self.by_bucket.setdefault(bucket, [0, 0, 0.0])
        row[2] = max(row[2], error)
        if not error <= limit:
            self.fault(f"{name} of a bucket of {bucket} requests differs by {error:.2e} (limit {limit:.0e})")


def _difference(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """ours - theirs; 0 where both are -inf, as the logits of tokens that a reduced vocabulary lacks."""
    return np.subtract(ours, theirs, out=np.zeros(np.shape(ours)), where=~(np.isneginf(ours) & np.isneginf(theirs)))


def relative_rms(ours: np.ndarray, theirs: np.ndarray) -> float:
    """RMS(ours - theirs) / RMS(theirs); NaN if either is not finite. The pool `[L, 2, R, K, H]` is judged by its worst
    layer and kind and other arrays of heads by their worst layer or request, which may differ in scale."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    axes = tuple(range(ours.ndim - 3, ours.ndim)) if ours.ndim > 3 else None
    scale = np.sqrt(np.mean(np.where(np.isneginf(theirs), 0, theirs) ** 2, axis=axes))
    error = np.sqrt(np.mean(_difference(ours, theirs) ** 2, axis=axes))
    return float(np.max(error / np.where(scale == 0, 1.0, scale)))


class Drafters:
    """The same pair in every form that is compared, behind one add, remove and propose."""

    def __init__(self, job: CompareJob, progress: bool):
        dtype = numerics.as_dtype(job.dtype)
        draft_config, drafter = jax_drafter.load_drafter(job.checkpoint, dtype, yarn_attention=job.yarn_attention)
        self.target_config, target = jax_target.load_target(job.target, dtype)
        self.draft_config = check_pair(draft_config, self.target_config, tensors(drafter))
        self.target_weights = jax_target.pack_target(target, self.target_config)
        shared = self.target_weights.embed_tokens, self.target_weights.lm_head
        weights = jax_drafter.pack_drafter(drafter, self.draft_config, *shared)
        sizes = engine_sizes(job)
        self.jax = DraftEngine(self.draft_config, weights, **sizes)
        self.jax.capture(progress=progress)
        self.tapped = DraftEngine(self.draft_config, weights, **sizes, taps=1)
        self.tapped.capture(progress=False)

        def torch_engine(name: str, mode: str, attention: str, taps: int) -> TorchEngine:
            kind, device = torch_numerics.as_dtype(name), {"cpu": "cpu", "gpu": "cuda"}[job.device]
            config, yarn = self.draft_config, job.yarn_attention
            _, drafter = torch_drafter.load_drafter(job.checkpoint, kind, device, yarn_attention=yarn)
            target_config, target = torch_target.load_target(job.target, kind, device)
            shared = torch_target.pack_target(target, target_config)
            weights = torch_drafter.pack_drafter(drafter, config, shared.embed_tokens, shared.lm_head)
            engine = TorchEngine(config, weights, mode=mode, attention=attention, taps=taps, **sizes)
            engine.capture(progress=progress and mode == "cuda_graph")
            return engine

        self.torch = torch_engine(job.dtype, "eager", "dense", 1)
        self.oracle = torch_engine("float64", "eager", "dense", 1)
        self.fused = torch_engine(job.dtype, "eager", "sdpa", 1)
        self.graph = torch_engine(job.dtype, "cuda_graph", "sdpa", 0) if job.device == "gpu" else None
        self.all = [
            e for e in (self.jax, self.tapped, self.torch, self.oracle, self.fused, self.graph) if e is not None
        ]


def engine_sizes(job: CompareJob) -> dict[str, Any]:
    """The arguments that every engine of a job has alike."""
    sizes: dict[str, Any] = {"max_num_seqs": job.max_num_seqs, "max_model_len": job.max_model_len}
    sizes["allow_long_block"] = job.allow_long_block
    return (
        sizes if job.num_speculative_tokens is None else sizes | {"num_speculative_tokens": job.num_speculative_tokens}
    )


def check_job(job: CompareJob) -> None:
    """Refuse what cannot run before anything is loaded. Raises InputError."""
    draft = load_draft_config(job.checkpoint, yarn_attention=job.yarn_attention)
    target = load_target_config(job.target)
    check_pair(draft, target, match_draft(job.checkpoint, draft).sources)
    if (size := excerpts.tokenizer(job.target).get_vocab_size()) > target.vocab_size:
        raise InputError(f"{job.target}: a tokenizer of {size} does not fit a vocabulary of {target.vocab_size}")
    K = job.num_speculative_tokens or draft.max_speculative_tokens
    needed = max(PROMPT_LENGTHS) + job.max_new_tokens + 2 * (K + 1)
    if needed > job.max_model_len:
        raise InputError(
            f"max_model_len={job.max_model_len} is too small for prompts of {max(PROMPT_LENGTHS)} tokens and answers of "
            f"{job.max_new_tokens}; pass {needed} or more"
        )


def run_lockstep(job: CompareJob, drafters: Drafters, advance: Callable[[int, int], None]) -> tuple[Tally, GreedyLoop]:
    """Decode every prompt with all drafters in lockstep and compare each step."""
    query_len = drafters.jax.config.query_len
    runner = TargetRunner(
        drafters.target_config,
        drafters.target_weights,
        taps=drafters.draft_config.hidden_state_indices,
        num_speculative_tokens=query_len - 1,
        max_num_seqs=job.max_num_seqs,
        max_model_len=job.max_model_len,
        num_pages=num_pages(job.max_num_seqs, job.max_model_len),
        widths=(query_len, CHUNK),
        max_num_batched_tokens=job.max_num_seqs * max(query_len, CHUNK),
        # One bucket: the drafters are compared here, and a target program compiles for seconds.
        ladder=BucketLadder([job.max_num_seqs * query_len], max_num_seqs=job.max_num_seqs, query_lens=query_len),
    )
    runner.capture(progress=False)
    num_prompts = job.num_prompts or max(24, 3 * job.max_num_seqs)
    prompts = excerpts.prompts(job.target, num_prompts, PROMPT_LENGTHS)
    loop = GreedyLoop(
        runner, prompts, max_new_tokens=job.max_new_tokens, chunk=CHUNK, eos=drafters.target_config.eos_token_ids
    )
    tally, steps = Tally(), 0
    while not loop.done:
        event = loop.advance()
        _count_torch_acceptance(tally, event)
        for engine in drafters.all:
            for answer in event.joined:
                engine.add_request(answer.request_id, len(answer.prompt))
        for engine in drafters.all:
            for answer in event.left:
                if answer.request_id in engine.requests.requests:
                    engine.remove_request(answer.request_id)
        if event.step is not None:
            loop.set_drafts(event.step, _compare_step(tally, job, drafters, event.step, event.features))
            if steps % 8 == 0 or not loop.waiting:
                _compare_pools(tally, job, drafters)
        steps += 1
        advance(len(loop.finished), len(prompts))
    return tally, loop


def _compare_step(
    tally: Tally, job: CompareJob, drafters: Drafters, step: TargetStep, features: np.ndarray
) -> np.ndarray:
    before = num_compiles()
    drafts = drafters.jax.propose(step, features)
    tally.compiles += num_compiles() - before
    tapped = drafters.tapped.propose(step, features)
    torch_drafts = drafters.torch.propose(step, features)
    drafters.oracle.propose(step, features)
    fused = drafters.fused.propose(step, features)
    n, K = drafts.shape
    bucket = drafters.jax.ladder.dispatch(n, n * (K + 1), K + 1).padded_reqs
    if not np.array_equal(drafts, tapped):
        tally.fault("programs with taps draft other tokens than those without")
    tally.fused_equal += int((fused == drafts).sum())
    if drafters.graph is not None and not np.array_equal(drafters.graph.propose(step, features), fused):
        tally.fault(f"a CUDA graph of {bucket} requests drafts other tokens than PyTorch eager")

    ours = {name: np.asarray(value) for name, value in drafters.tapped.last_taps.items()}
    theirs, exact, other = (
        {name: torch_numerics.to_numpy(value) for name, value in engine.last_taps.items()}
        for engine in (drafters.torch, drafters.oracle, drafters.fused)
    )
    num_rows = int(np.sum(step.num_context))
    if np.any(ours["context_slots"][..., num_rows:] != PAD_SLOT):
        tally.fault(f"padded context rows of a bucket of {bucket} requests have slots")
    table = [tap for tap in tap_table(drafters.draft_config.geometry.num_layers) if tap.level == 1]
    for tap in table:
        if tap.name not in ours or tap.name not in theirs:
            tally.fault(f"tap {tap.name} is missing on one side")
            continue
        a, b = live_part(tap, ours[tap.name], n, num_rows), live_part(tap, theirs[tap.name], n, num_rows)
        if tap.kind == "token":
            continue  # judged by their margins below
        if tap.kind == "int":
            if a.shape != b.shape or not np.array_equal(a, b):
                tally.fault(f"integers of {tap.name} differ: JAX {a.tolist()[:16]}, PyTorch {b.tolist()[:16]}")
        else:
            tally.float_error(bucket, tap.name, a, b, LIMITS[job.dtype][1])
    torch_logits = np.stack([theirs["logits"][:n], other["logits"][:n]])
    _compare_tokens(tally, bucket, drafts, torch_drafts, torch_logits, exact["logits"][:n])
    _remember(tally, step.request_ids, drafts, torch_drafts)
    return drafts


def _compare_tokens(tally: Tally, bucket: int, drafts, torch_drafts, torch_logits, exact_logits) -> None:
    """Equal or not, and decided or not: by the float64 margin against PyTorch's own error on that row, `torch_logits`
    being those of several eager runs."""
    top2 = np.partition(exact_logits, -2, axis=-1)[..., -2:]
    margin = top2[..., 1] - top2[..., 0]
    squared = np.mean(_difference(torch_logits.astype(np.float64), exact_logits[None]) ** 2, axis=0).sum(-1)
    sigma = np.sqrt(squared / np.isfinite(exact_logits).sum(-1))
    decided, equal = margin > SIGMAS * sigma, drafts == torch_drafts
    tally.tokens_compared += equal.size
    tally.tokens_equal += int(equal.sum())
    tally.undecidable += int((~decided).sum())
    tally.undecidable_unequal += int((~decided & ~equal).sum())
    row = tally.by_bucket.setdefault(bucket, [0, 0, 0.0])
    row[0] += int(equal.sum())
    row[1] += equal.size
    for request, position in np.argwhere(decided & ~equal):
        tally.fault(
            f"draft {position + 1} of a request differs: JAX {drafts[request, position]}, PyTorch "
            f"{torch_drafts[request, position]}, margin {margin[request, position] / sigma[request, position]:.1f} sigma"
        )


def _compare_pools(tally: Tally, job: CompareJob, drafters: Drafters) -> None:
    """Every live request's stored context K/V in both pools, and of CUDA graphs against eager."""
    tally.pool_checks += 1
    page_size = drafters.jax.config.page_size
    for g, jax_pool in enumerate(drafters.jax.state.pools):
        pairs = [("pool", np.asarray(jax_pool), torch_numerics.to_numpy(drafters.torch.state.pools[g]))]
        if drafters.graph is not None:
            graph, fused = (torch_numerics.to_numpy(e.state.pools[g]) for e in (drafters.graph, drafters.fused))
            pairs.append(("graph_pool", graph, fused))
        for request in drafters.jax.requests.requests.values():
            held = request.pages[g]
            slots = np.array(held.ids, np.int32)[:, None] * page_size + np.arange(page_size)
            first = held.first * page_size
            rows = slots.reshape(-1)[held.stored_from - first : request.context_len - first]
            for name, *pools in pairs if rows.size else ():
                a, b = (pool.reshape(*pool.shape[:2], -1, *pool.shape[4:])[:, :, rows] for pool in pools)
                tally.float_error(0, name, a, b, LIMITS[job.dtype][1])


def _remember(tally: Tally, request_ids, drafts: np.ndarray, torch_drafts: np.ndarray) -> None:
    tally.jax_drafts = dict(zip(request_ids, drafts, strict=True))
    tally.torch_drafts = dict(zip(request_ids, torch_drafts, strict=True))


def _count_torch_acceptance(tally: Tally, event: LoopStep) -> None:
    """PyTorch's own accepted length. Past a token in which the two drafters differ the target saw JAX's, so the count
    stops there: a lower bound, exact while the drafts agree."""
    for request_id, own in event.verified.items():
        ours, theirs = tally.jax_drafts[request_id], tally.torch_drafts[request_id]
        accepted = 0
        while accepted < len(theirs) and theirs[accepted] == own[accepted]:
            accepted += 1
            if ours[accepted - 1] != theirs[accepted - 1]:
                break
        tally.torch_accepted += accepted
        tally.torch_steps += 1


def time_frameworks(
    job: CompareJob, frameworks: list[str], cache: str, advance: Callable[[str], None]
) -> dict[str, list[dict]]:
    """Each framework's `steptime` rows, from a process of its own."""
    spec = {
        "checkpoint": str(job.checkpoint),
        "target": str(job.target),
        "device": job.device,
        "dtype": job.dtype,
        "yarn_attention": job.yarn_attention,
        "engine": engine_sizes(job),
        "compile_cache": cache,
        "context": min(256, job.max_model_len // 2),
        "steps": job.timed_steps,
    }
    rows = {}
    for framework in frameworks:
        advance(framework)
        result = subprocess.run(
            [sys.executable, "-m", "jax_dflash.steptime"],
            input=json.dumps(spec | {"framework": framework}),
            capture_output=True,
            text=True,
            env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )
        if result.returncode:
            raise RuntimeError(f"timing {framework} failed:\n{result.stderr[-2000:]}")
        rows[framework] = json.loads(result.stdout.splitlines()[-1])
    return rows


def compare(job: CompareJob, *, progress: bool = True) -> dict[str, Any]:
    """Run the whole job; the JSON document of the command line. Raises InputError for bad input."""
    check_job(job)
    torch_numerics.pin_numerics()
    with torch.inference_mode(), tempfile.TemporaryDirectory() as scratch:
        cache = job.compile_cache or scratch  # the timing process need not compile again
        with compile_cache(cache):
            drafters = Drafters(job, progress)
        with Progress(console=Console(stderr=True), disable=not progress, transient=True) as bar:
            task = bar.add_task("Drafting in lockstep", total=None)
            tally, loop = run_lockstep(job, drafters, lambda done, total: bar.update(task, completed=done, total=total))
            programs = len(drafters.jax.programs.steps) + len(drafters.jax.programs.contexts)
            eager_compiles = drafters.jax.eager_compiles
            descriptors = drafters.jax.ladder.capture_order(GraphMode.FULL)[::-1]
            del drafters
            frameworks = ["jax", "torch-eager", *(["torch-graph"] if job.device == "gpu" else [])]
            task = bar.add_task("Timing", total=len(frameworks))
            times = time_frameworks(
                job, frameworks, cache, lambda name: bar.update(task, description=f"Timing {name}", advance=1)
            )
    return _document(job, tally, loop, times, descriptors, programs, eager_compiles)


def _document(
    job, tally: Tally, loop: GreedyLoop, times, descriptors, programs: int, eager_compiles: int
) -> dict[str, Any]:
    share, _ = LIMITS[job.dtype]
    if tally.tokens_compared < MIN_TOKENS:
        tally.fault(f"only {tally.tokens_compared} tokens compared, at least {MIN_TOKENS} needed")
    if tally.undecidable > share * tally.tokens_compared:
        tally.fault(f"{tally.undecidable} of {tally.tokens_compared} tokens undecidable, at most {share:.1%} allowed")
    if tally.compiles:
        tally.fault(f"{tally.compiles} compilations after capture")
    if not tally.pool_checks:
        tally.fault("the pools were never compared")
    answers = [answer for answer in loop.finished if answer.steps]
    tau = sum(len(a.generated) - 1 for a in answers) / max(1, sum(a.steps for a in answers))
    if job.pair == "builtin" and job.num_speculative_tokens is None and tau < MIN_TAU:
        tally.fault(f"the shipped pair's accepted length is {tau:.2f}, expected at least {MIN_TAU}")
    by_reqs = {name: {row["num_reqs"]: row for row in rows} for name, rows in times.items()}
    buckets = []
    for descriptor in descriptors:
        n = descriptor.padded_reqs
        equal, compared, worst = tally.by_bucket.get(n, [0, 0, 0.0])
        if not compared:
            tally.fault(f"no step ran in the bucket of {n} requests")
        ms = {name: round(rows[n]["ms"], 4) for name, rows in by_reqs.items()}
        spread = {name: [round(rows[n]["low"], 4), round(rows[n]["high"], 4)] for name, rows in by_reqs.items()}
        buckets.append(
            {
                "num_reqs": n,
                "num_tokens": descriptor.num_tokens,
                "tokens_compared": compared,
                "tokens_equal": equal,
                "max_error": worst,
                "jax_ms": ms["jax"],
                "torch_eager_ms": ms["torch-eager"],
                "torch_graph_ms": ms.get("torch-graph"),
                "spread": spread,
            }
        )
    return {
        "job": "compare",
        "ok": not tally.faults,
        "device": device_name(job.device),
        "dtype": job.dtype,
        "pair": job.pair,
        "yarn_attention": job.yarn_attention,
        "num_speculative_tokens": descriptors[0].num_tokens // descriptors[0].num_reqs - 1,
        "max_model_len": job.max_model_len,
        "tau": round(tau, 4),
        "tau_request_mean": round(float(np.mean([a.accepted_length for a in answers])), 4),
        "tau_torch": round(1 + tally.torch_accepted / max(1, tally.torch_steps), 4),
        "looped": sum(a.looped for a in answers),
        "tokens_compared": tally.tokens_compared,
        "tokens_equal": tally.tokens_equal,
        "undecidable": tally.undecidable,
        "undecidable_unequal": tally.undecidable_unequal,
        "fused_equal": tally.fused_equal,
        "max_error": max(tally.errors.values(), default=0.0),
        "errors": tally.errors,
        "programs": programs,
        "compiles_after_capture": tally.compiles,
        "eager_compiles": eager_compiles,
        "buckets": buckets,
        "faults": tally.faults,
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
    }


def device_name(device: str) -> str:
    """The GPU's name, or how many CPU cores there are."""
    return torch.cuda.get_device_name() if device == "gpu" else f"cpu ({os.cpu_count()} cores)"
