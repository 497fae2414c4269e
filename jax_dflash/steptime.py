"""Milliseconds of one `propose()`, bucket by bucket, for one framework in a process of its own.

`python -m jax_dflash.steptime` reads its job as JSON on stdin and prints the rows as one JSON line.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np

from jax_dflash.batch import TargetStep
from jax_dflash.buckets import GraphMode
from jax_dflash.config import check_pair


def time_buckets(engine, device_features: Callable[[np.ndarray], object], *, context: int, steps: int) -> list[dict]:
    """Median and quartiles over `steps` waited calls of each bucket, smallest first.

    Every request starts with `context` stored tokens and grows by one a step, as after a verify that accepted nothing.
    Features lie on the device already, at the bucket's own row count.
    """
    K = engine.config.num_speculative_tokens
    rng = np.random.default_rng(0)
    rows = []
    for descriptor in reversed(engine.ladder.capture_order(GraphMode.FULL)):
        n = descriptor.padded_reqs
        ids = list(range(n))
        for request_id in ids:
            engine.add_request(request_id)
        width = engine.config.draft.feature_size
        for request_id in ids:
            for start in range(0, context, 128):
                count = min(128, context - start)
                step = _step([request_id], count, 0)
                engine.propose(step, rng.standard_normal((count, width), np.float32))
        features = device_features(rng.standard_normal((n * (K + 1), width), np.float32))
        step, seconds = _step(ids, K + 1, K), []
        for _ in range(steps + 3):
            start = time.perf_counter()
            engine.propose(step, features)
            seconds.append(time.perf_counter() - start)
        low, median, high = np.percentile(np.array(seconds[3:]) * 1e3, [25, 50, 75])
        rows.append({"num_reqs": n, "num_tokens": descriptor.num_tokens, "ms": median, "low": low, "high": high})
        for request_id in ids:
            engine.remove_request(request_id)
    return rows


def _step(ids: list, num_context: int, num_rejected: int) -> TargetStep:
    each = np.ones(len(ids), np.int32)
    return TargetStep(
        request_ids=ids,
        num_context=each * num_context,
        num_rejected=each * num_rejected,
        num_sampled=each,
        last_sampled=each,
        next_prefill=each * 0,
    )


def _jax_engine(job: dict):
    import jax

    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[job["device"]])
    from jax_dflash.drafter import load_drafter, pack_drafter
    from jax_dflash.engine import DraftEngine
    from jax_dflash.modules import tensors
    from jax_dflash.numerics import as_dtype
    from jax_dflash.programs import compile_cache
    from jax_dflash.target import load_target, pack_target

    dtype = as_dtype(job["dtype"])
    config, drafter = load_drafter(job["checkpoint"], dtype, yarn_attention=job["yarn_attention"])
    target_config, target = load_target(job["target"], dtype)
    config = check_pair(config, target_config, tensors(drafter))
    shared = pack_target(target, target_config)
    engine = DraftEngine(config, pack_drafter(drafter, config, shared.embed_tokens, shared.lm_head), **job["engine"])
    with compile_cache(job["compile_cache"]):
        engine.capture(progress=False)
    return engine, lambda x: jax.device_put(x.astype(dtype))


def _torch_engine(job: dict, mode: str):
    from torch_ref.drafter import load_drafter, pack_drafter
    from torch_ref.engine import DraftEngine
    from torch_ref.modules import tensors
    from torch_ref.numerics import as_dtype, pin_numerics, to_device
    from torch_ref.target import load_target, pack_target

    pin_numerics()
    dtype, device = as_dtype(job["dtype"]), {"cpu": "cpu", "gpu": "cuda"}[job["device"]]
    config, drafter = load_drafter(job["checkpoint"], dtype, device, yarn_attention=job["yarn_attention"])
    target_config, target = load_target(job["target"], dtype, device)
    config = check_pair(config, target_config, tensors(drafter))
    shared = pack_target(target, target_config)
    weights = pack_drafter(drafter, config, shared.embed_tokens, shared.lm_head)
    engine = DraftEngine(config, weights, mode=mode, **job["engine"])
    engine.capture(progress=False)
    return engine, lambda x: to_device(x, dtype, device)


def main(job: dict) -> list[dict]:
    """Time the job's framework; the rows of `time_buckets`."""
    if job["framework"] == "jax":
        engine, device_features = _jax_engine(job)
    else:
        mode = {"torch-eager": "eager", "torch-graph": "cuda_graph"}[job["framework"]]
        engine, device_features = _torch_engine(job, mode)
    return time_buckets(engine, device_features, context=job["context"], steps=job["steps"])


if __name__ == "__main__":
    print(json.dumps(main(json.load(sys.stdin))))
