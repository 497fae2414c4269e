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
from dataclasses import dataclass
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
from jax_dflash.buckets import BucketLadder, GraphMode
from jax_dflash.config import InputError, check_pair, load_draft_config, load_target_config
from jax_dflash.decoding import DecodeLoop, DecoderSizes, Generation, accepted_length
from jax_dflash.engine import DraftEngine
from jax_dflash.lockstep import Engines, Lockstep, Tally
from jax_dflash.modules import tensors
from jax_dflash.names import match_draft
from jax_dflash.programs import compile_cache
from jax_dflash.sampling_params import SamplingParams
from jax_dflash.target_runner import TargetRunner
from torch_ref import drafter as torch_drafter
from torch_ref import numerics as torch_numerics
from torch_ref import target as torch_target
from torch_ref.engine import DraftEngine as TorchEngine

MIN_TOKENS = 2000
# Share of tokens that may be undecidable, and relative RMS distance of JAX from PyTorch at any tap.
LIMITS = {"float32": (0.001, 1e-5), "bfloat16": (0.1, 2e-2)}
PROMPT_LENGTHS = (24, 200, 57, 330, 101, 16, 260, 150)  # tokens, in turn: short and long, several prefill chunks
CHUNK = 128
PAGE_SIZE = 16
MIN_TAU = 3.0  # of the shipped pair at its default K: both frameworks drafting the same nonsense would agree too
REPEAT = 32  # a text that repeats 32 tokens in a row has begun to loop, and easy loops would flatter the drafter


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


class Drafters:
    """The pair, and its drafter in every form that is compared; their pages are the loop's."""

    def __init__(self, job: CompareJob, progress: bool):
        dtype = numerics.as_dtype(job.dtype)
        draft_config, drafter = jax_drafter.load_drafter(job.checkpoint, dtype, yarn_attention=job.yarn_attention)
        self.target_config, target = jax_target.load_target(job.target, dtype)
        self.draft_config = check_pair(draft_config, self.target_config, tensors(drafter))
        self.target_weights = jax_target.pack_target(target, self.target_config)
        shared = self.target_weights.embed_tokens, self.target_weights.lm_head
        weights = jax_drafter.pack_drafter(drafter, self.draft_config, *shared)
        sizes = engine_sizes(job)

        def jax_engine(taps: int) -> DraftEngine:
            engine = DraftEngine(self.draft_config, weights, taps=taps, external_pages=True, **sizes)
            engine.capture(progress=progress and not taps)
            return engine

        def torch_engine(name: str, mode: str, attention: str, taps: int) -> TorchEngine:
            kind, device = torch_numerics.as_dtype(name), {"cpu": "cpu", "gpu": "cuda"}[job.device]
            config, yarn = self.draft_config, job.yarn_attention
            _, drafter = torch_drafter.load_drafter(job.checkpoint, kind, device, yarn_attention=yarn)
            target_config, target = torch_target.load_target(job.target, kind, device)
            shared = torch_target.pack_target(target, target_config)
            weights = torch_drafter.pack_drafter(drafter, config, shared.embed_tokens, shared.lm_head)
            engine = TorchEngine(
                config, weights, mode=mode, attention=attention, taps=taps, external_pages=True, **sizes
            )
            engine.capture(progress=progress and mode == "cuda_graph")
            return engine

        self.engines = Engines(
            jax=jax_engine(taps=0),
            tapped=jax_engine(taps=1),
            torch=torch_engine(job.dtype, "eager", "dense", 1),
            oracle=torch_engine("float64", "eager", "dense", 1),
            fused=torch_engine(job.dtype, "eager", "sdpa", 1),
            graph=torch_engine(job.dtype, "cuda_graph", "sdpa", 0) if job.device == "gpu" else None,
        )


def engine_sizes(job: CompareJob) -> dict[str, Any]:
    """The arguments that every engine of a job has alike. A page group with a window has as many pages as the others: the
    loop knows of one pool."""
    return {
        "max_num_seqs": job.max_num_seqs,
        "max_model_len": job.max_model_len,
        "num_speculative_tokens": job.num_speculative_tokens,
        "allow_long_block": job.allow_long_block,
        "page_size": PAGE_SIZE,
        "num_pages": DecoderSizes.num_pages(job.max_num_seqs, job.max_model_len, PAGE_SIZE),
    }


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


def run_lockstep(
    job: CompareJob, drafters: Drafters, advance: Callable[[int, int], None]
) -> tuple[Tally, list[Generation]]:
    """Decode every prompt with all drafters in lockstep and compare each step."""
    engine = drafters.engines.jax
    Q, sizes = engine.config.query_len, DecoderSizes.of(engine.config, engine.ladder, CHUNK)
    # One bucket: the drafters are compared here, and a target program compiles for seconds.
    one_bucket: dict[str, Any] = {
        "widths": (Q, CHUNK),
        "max_num_batched_tokens": job.max_num_seqs * max(Q, CHUNK),
        "ladder": BucketLadder([job.max_num_seqs * Q], max_num_seqs=job.max_num_seqs, query_lens=Q),
    }
    runner = TargetRunner(
        drafters.target_config,
        drafters.target_weights,
        taps=drafters.draft_config.hidden_state_indices,
        **sizes.runner | one_bucket,
    )
    runner.capture(progress=False)
    num_prompts = job.num_prompts or max(24, 3 * job.max_num_seqs)
    prompts = excerpts.prompts(job.target, num_prompts, PROMPT_LENGTHS)
    lockstep = Lockstep(drafters.engines, max_error=LIMITS[job.dtype][1])
    loop = DecodeLoop(
        runner,
        lockstep,
        eos_token_ids=drafters.target_config.eos_token_ids,
        repeat=REPEAT,
        joins_per_step=1 + job.max_num_seqs // 16,  # a few: every bucket is to be reached
        on_tokens=lockstep.count_accepted,
        **sizes.loop,
    )
    for prompt in prompts:
        loop.add(prompt, SamplingParams(max_new_tokens=job.max_new_tokens))
    while not loop.done:
        loop.step()
        if loop.live and (loop.num_steps % 8 == 0 or not loop.waiting):
            lockstep.compare_pools(loop.live)
        advance(len(loop.finished), len(prompts))
    return lockstep.tally, loop.finished


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
            tally, generations = run_lockstep(
                job, drafters, lambda done, total: bar.update(task, completed=done, total=total)
            )
            engine = drafters.engines.jax
            programs = len(engine.programs.steps) + len(engine.programs.contexts)
            eager_compiles = engine.eager_compiles
            descriptors = engine.ladder.capture_order(GraphMode.FULL)[::-1]
            del drafters, engine
            frameworks = ["jax", "torch-eager", *(["torch-graph"] if job.device == "gpu" else [])]
            task = bar.add_task("Timing", total=len(frameworks))
            times = time_frameworks(
                job, frameworks, cache, lambda name: bar.update(task, description=f"Timing {name}", advance=1)
            )
    return _document(job, tally, generations, times, descriptors, programs, eager_compiles)


def _document(
    job, tally: Tally, generations: list[Generation], times, descriptors, programs: int, eager_compiles: int
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
    tau = accepted_length(generations)
    if job.pair == "builtin" and job.num_speculative_tokens is None and not tau >= MIN_TAU:
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
        "tau_request_mean": round(float(np.mean([g.accepted_length for g in generations if g.accepted])), 4),
        "tau_torch": round(1 + tally.torch_accepted / max(1, tally.torch_steps), 4),
        "looped": sum(g.finish_reason == "repeat" for g in generations),
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
