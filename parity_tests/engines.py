"""Small engines for the tests of cases.md. One drafter; JAX programs are compiled once per process and shared."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_dflash.engine
import torch_ref.engine
from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder
from parity_tests.test_torch_engine import with_bodies
from parity_tests.tiny import FRAMEWORKS, draft_weights, numpy, resized

CONFIG = replace(resized(num_layers=2, vocab_size=101, max_position_embeddings=512), mask_token_id=99)


class Limits(NamedTuple):
    """What programs are compiled for. `num_pages` leaves some pages that no request can need, as guards."""

    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int = 4


# Page size and K of the cases' shared fixture; rows of buckets 16 and 32; long enough for two chunks of keys.
LIMITS = Limits(max_num_seqs=8, max_model_len=300, num_speculative_tokens=3, max_num_batched_tokens=32, num_pages=640)
LADDER = BucketLadder([8, 16, 32], max_num_seqs=8, query_lens=4)  # 2, 4 and 8 requests: most batches are padded

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# Compiled JAX programs; PyTorch eager; the body of its CUDA graphs over static buffers; on a GPU, the graphs themselves.
KINDS = ["jax", "torch", "torch_static", pytest.param("cuda_graph", marks=[pytest.mark.gpu, needs_gpu])]


@functools.cache
def weights_of(framework: str, dtype: str = "float32"):
    """The drafter of all engines here."""
    return draft_weights(FRAMEWORKS[framework], CONFIG, dtype)


@functools.cache
def jax_programs():
    engine = jax_dflash.engine.DraftEngine(CONFIG, weights_of("jax"), **LIMITS._asdict(), ladder=LADDER)
    engine.capture(progress=False)
    return engine.programs


def make_engine(kind: str, *, fill: float | None = None, **options):
    """A captured engine with a pool of its own, holding `fill` everywhere."""
    arguments = LIMITS._asdict() | {"ladder": LADDER} | options
    if kind == "jax":
        engine = jax_dflash.engine.DraftEngine(CONFIG, weights_of("jax"), **arguments)
        engine.programs = engine.scheduled[engine.config.num_speculative_tokens] = jax_programs()
        engine.captured = True
    else:
        device = "cuda" if kind == "cuda_graph" else "cpu"
        weights = jax.tree.map(lambda x: x.to(device), weights_of("torch"))
        mode = "cuda_graph" if kind == "cuda_graph" else "eager"
        engine = torch_ref.engine.DraftEngine(CONFIG, weights, mode=mode, **arguments)
        if kind == "torch_static":
            with_bodies(engine)
        else:
            engine.capture(progress=False)
    if fill is not None:
        set_pool(engine, fill)
    return engine


def set_pool(engine, values) -> None:
    """Put these values in every group's pool."""
    for pool in engine.state.pools if isinstance(engine.state.pools[0], torch.Tensor) else ():
        pool[:] = torch.as_tensor(values)
    if isinstance(engine.state.pools[0], jax.Array):
        pools = tuple(jnp.broadcast_to(jnp.asarray(values, pool.dtype), pool.shape) for pool in engine.state.pools)
        engine.state = engine.state._replace(pools=pools)


def pool_of(engine) -> np.ndarray:
    """The pool slot by slot: [L, 2, slots, K, H]."""
    pool = engine.state.pools[0]
    pool = numpy(pool.cpu() if isinstance(pool, torch.Tensor) else pool)
    return pool.reshape(*pool.shape[:2], -1, *pool.shape[4:])


def slots_of(engine, request_id, start: int = 0, stop: int | None = None) -> list[int]:
    """Slots of a request's positions; by default its stored context."""
    request, page = engine.requests.requests[request_id], engine.config.page_size
    positions = range(start, request.context_len if stop is None else stop)
    held = request.pages[0]
    return [held.ids[p // page - held.first] * page + p % page for p in positions]


def step_for(ids, num_context, num_rejected=0, num_sampled=1, last=7, **more) -> TargetStep:
    """A step of these requests; a number stands for the same in each."""
    columns = {
        "num_context": num_context, "num_rejected": num_rejected, "num_sampled": num_sampled, "last_sampled": last,
        "next_prefill": more.pop("next_prefill", 0),
    }  # fmt: skip
    columns = {name: np.broadcast_to(np.array(x, np.int32), (len(ids),)).copy() for name, x in columns.items()}
    return TargetStep(request_ids=list(ids), **columns, **more)


def features(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, CONFIG.feature_size)).astype(np.float32)


def prefill(engine, ids, length: int, seed: int = 0) -> np.ndarray:
    """Context of `length` tokens for every request, in chunks of one verify and at last the rest; the last drafts."""
    rows = [features(length, seed + 1000 * i) for i in range(len(ids))]
    chunk = engine.config.max_num_batched_tokens // len(ids)
    drafts = None
    for start in range(0, length, chunk):
        count = min(chunk, length - start)
        chunks = np.concatenate([each[start : start + count] for each in rows])
        drafts = engine.propose(step_for(ids, count, num_sampled=int(start + count == length)), chunks)
    return drafts


def traffic(num_steps: int, seed: int = 0, longest: int = 40) -> Iterator[tuple[list, list, TargetStep]]:
    """(joined, left, step) of requests that come and go: prompts in chunks, decodes with rejections, every count of live
    requests."""
    rng = np.random.default_rng(seed)
    live: dict[int, int] = {}
    K, level = LIMITS.num_speculative_tokens, LIMITS.max_num_seqs
    for number in range(num_steps):
        if rng.random() < 0.1:
            level = int(rng.integers(1, LIMITS.max_num_seqs + 1))
        left = [i for i, length in live.items() if length > longest or rng.random() < 0.1]
        left += [i for i in live if i not in left][level:]
        for i in left:
            del live[i]
        room = max(level - len(live), 0)
        joined = [number * 100 + j for j in range(rng.integers(0 if live else 1, room + 1))]
        order = [int(i) for i in rng.permutation([*live, *joined])]
        most = LIMITS.max_num_batched_tokens // len(order)
        counts = np.array([rng.integers(1, most + 1) if i in joined else rng.integers(1, K + 2) for i in order])
        if counts.sum() > LIMITS.max_num_batched_tokens:
            counts = np.minimum(counts, most)
        rejected = np.array([0 if i in joined else rng.integers(0, c) for i, c in zip(order, counts, strict=True)])
        live |= dict.fromkeys(joined, 0)
        for i, kept in zip(order, counts - rejected, strict=True):
            live[i] += int(kept)
        yield joined, left, step_for(order, counts, rejected, last=rng.integers(0, 99, len(order)))


def run_traffic(engine, joined: list, left: list, step: TargetStep, rows: np.ndarray) -> np.ndarray:
    for i in left:
        engine.remove_request(i)
    for i in joined:
        engine.add_request(i)
    return engine.propose(step, rows[: int(step.num_context.sum())])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small products on several threads wait for each other: on a busy machine, forty times as long as on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
