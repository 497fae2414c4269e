"""Does an engine stay what it was? Random traffic for as long as one likes, between guard pages of NaN.

`python -m parity_tests.soak` runs the 12,000 draft steps of case C56 in every kind of engine: requests join, leave and
reject, lengths and batch sizes change. Guards keep their NaN; every `CHECK` steps the live requests' drafts and stored
K/V are those of a fresh engine that was given their context alone; nothing compiles and no device array is left over.
The tests run a few hundred steps.
"""

import argparse
import json
import resource
import sys
import time

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from jax_dflash.programs import num_compiles
from parity_tests.engines import (
    CONFIG,
    LIMITS,
    features,
    make_engine,
    pool_of,
    run_traffic,
    slots_of,
    step_for,
    traffic,
)

K = LIMITS.num_speculative_tokens
CHECK = 100
KINDS = ("jax", "torch", "torch_static")


def guarded(kind):
    """An engine on NaN whose requests can only have the pages in the middle; the outer ones are guards."""
    engine = make_engine(kind, fill=np.nan)
    allocator = engine.requests.allocators[0]
    pages = allocator.allocate(allocator.num_free)
    usable = pages[20:620:2]  # every other page: guards between them, too
    allocator.free(usable)
    slots = (np.array(usable)[:, None] * LIMITS.page_size + np.arange(LIMITS.page_size)).ravel()
    return engine, np.setdiff1d(np.arange(pool_of(engine).shape[2]), slots)


def assert_same_state(a, b, ids) -> None:
    """Context and block of each request, wherever its pages are."""
    for i in ids:
        stop = a.requests.requests[i].context_len + K + 1
        ours, theirs = (pool_of(e)[:, :, slots_of(e, i, 0, stop)] for e in (a, b))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=5e-5)


def assert_as_fresh(kind, engine, step, drafts: np.ndarray, contexts: dict[int, np.ndarray]) -> None:
    """A new engine that is given the requests' context has their K/V and makes the drafts that this step made."""
    fresh = make_engine(kind, fill=np.nan)
    for request_id, anchor, ours in zip(step.request_ids, step.last_sampled, drafts, strict=True):
        fresh.add_request(request_id)
        context = contexts[request_id]
        for start in range(0, len(context), LIMITS.max_num_batched_tokens):
            rows = context[start : start + LIMITS.max_num_batched_tokens]
            theirs = fresh.propose(step_for([request_id], len(rows), last=anchor), rows)
        assert (theirs[0] == ours).all(), f"request {request_id}: {ours} in the long run, {theirs[0]} in a fresh engine"
    assert_same_state(engine, fresh, step.request_ids)


def soak(kind, num_steps: int, seed: int = 0, advance=lambda: None) -> dict:
    """Random traffic; what was seen. Raises AssertionError at the first fault."""
    engine, guards = guarded(kind)
    bank, sizes, contexts = features(64, 1), set(), {}
    baseline: dict[str, int] = {}
    checks = 0
    for number, (joined, left, step) in enumerate(traffic(num_steps, seed)):
        rows = bank[number % 32 :]
        drafts = run_traffic(engine, joined, left, step, rows)
        sizes.add(len(drafts))
        assert drafts.min() >= 0 and drafts.max() < CONFIG.geometry.vocab_size
        contexts = {i: rows for i, rows in contexts.items() if i not in left}
        starts = np.cumsum(step.num_context) - step.num_context
        for i, start, kept in zip(step.request_ids, starts, step.num_context - step.num_rejected, strict=True):
            contexts[i] = np.concatenate([contexts.get(i, rows[:0]), rows[start : start + kept]])
        if number % CHECK == CHECK - 1:
            assert_as_fresh(kind, engine, step, drafts, contexts)
            checks += len(drafts)
            held = {"compiles": num_compiles(), "device_arrays": len(jax.live_arrays())}
            baseline = baseline or held  # the first step and check make what later ones use
            assert held == baseline, f"after {number + 1} steps {held}, at first {baseline}"
        advance()
    pool = pool_of(engine)
    assert np.isnan(pool[:, :, guards]).all(), "a guard page was written"
    for i, request in engine.requests.requests.items():
        assert np.isfinite(pool[:, :, slots_of(engine, i, 0, request.context_len + K + 1)]).all()
    return {"batch_sizes": len(sizes), "requests_checked": checks}


def main() -> int:
    """Soak every kind of engine; the rows, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12_000, help="draft steps for each kind of engine")
    steps, found = parser.parse_args().steps, {}
    import torch

    torch.set_num_threads(1)  # tiny steps
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("steps", total=len(KINDS) * steps)
        for kind in KINDS:
            make_engine(kind)
            start, rss = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            found[kind] = soak(kind, steps, advance=lambda: bar.advance(task))
            found[kind] |= {
                "seconds": round(time.monotonic() - start),
                "peak_mib_grew": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) / 1024, 1),
            }
            print(f"{kind}: {steps} steps, guards unchanged; {found[kind]}", file=sys.stderr)
    print(json.dumps({"job": "soak", "ok": True, "steps": steps} | found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
