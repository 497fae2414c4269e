"""The PyTorch engine: eager against the JAX engine, the body of its CUDA graphs run eagerly, and, on a GPU, replay."""

from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_dflash.engine
from jax_dflash.batch import TargetStep
from jax_dflash.buckets import BucketLadder, GraphMode
from jax_dflash.config import InputError
from jax_dflash.taps import tap_table
from parity_tests.tiny import DRAFT, FRAMEWORKS, GEOMETRY, WINDOWED, draft_weights, numpy, resized
from torch_ref.attention.dense import attention
from torch_ref.cuda_graphs import CudaGraphs
from torch_ref.engine import DraftEngine
from torch_ref.numerics import pin_numerics

K, R, LEN, ROWS, PAGE = 4, 3, 61, 37, 3
LIMITS = {
    "max_num_seqs": R, "max_model_len": LEN, "num_speculative_tokens": K, "max_num_batched_tokens": ROWS,
    "page_size": PAGE,
}  # fmt: skip
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


# Sizes that the GPU's fused attention takes; the others run its plain fallback.
EVEN = replace(resized(hidden_size=64, head_dim=64, intermediate_size=96), target_hidden_size=64)


def torch_engine(device="cpu", config=DRAFT, **changes) -> DraftEngine:
    weights = jax.tree.map(lambda x: x.to(device), draft_weights(FRAMEWORKS["torch"], config))
    return DraftEngine(config, weights, **LIMITS | changes)


def random_trace(num_steps: int, seed: int = 0, feature_size: int = DRAFT.feature_size):
    """(joined, left, step, features) of mixed traffic: prompts in chunks, decodes that reject, requests that come and
    go.
    """
    rng = np.random.default_rng(seed)
    live: dict[int, list[int]] = {}  # id: [context, prompt]
    for number in range(num_steps):
        left = [i for i, (length, _) in live.items() if length > LEN - 2 * (K + 1) or rng.random() < 0.05]
        for i in left:
            del live[i]
        joined = [number] if not live or (len(live) < R and rng.random() < 0.4) else []
        live |= {i: [0, int(rng.integers(1, 40))] for i in joined}
        columns, budget = [], ROWS
        for i in (order := [int(i) for i in rng.permutation(list(live))]):
            length, prompt = live[i]
            budget -= K + 1  # what a decode of every later request may need stays free
            if length < prompt:
                rows = int(rng.integers(1, min(prompt - length, budget // len(live) + K) + 1))
                sampled, rejected = int(length + rows >= prompt), 0
            else:
                rows = int(rng.integers(1, K + 2))
                rejected = int(rng.integers(0, rows))
                sampled = rows - rejected
            live[i][0] += rows - rejected
            columns.append([rows, rejected, sampled, *rng.integers(0, 59, 2)])
        num_context, num_rejected, num_sampled, last_sampled, next_prefill = np.array(columns, np.int32).T
        step = TargetStep(
            request_ids=order, num_context=num_context, num_rejected=num_rejected, num_sampled=num_sampled,
            last_sampled=last_sampled, next_prefill=next_prefill,
        )  # fmt: skip
        features = rng.standard_normal((int(num_context.sum()), feature_size)).astype(np.float32)
        yield joined, left, step, features


def run_lockstep(engines, num_steps, seed=0, before=lambda: None):
    """Run a trace on several engines; their drafts must be equal at every step. Returns the steps' context rows."""
    rows = []
    feature_size = engines[0].config.draft.feature_size
    for joined, left, step, features in random_trace(num_steps, seed, feature_size):
        before()
        drafts = []
        for engine in engines:
            for i in left:
                engine.remove_request(i)
            for i in joined:
                engine.add_request(i)
            drafts.append(engine.propose(step, features))
        for other in drafts[1:]:
            np.testing.assert_array_equal(other, drafts[0])
        rows.append((len(step.request_ids), len(features)))
    return rows


def stored_context(engine) -> list[np.ndarray]:
    """K and V of every live request's context, in order of position."""
    pool = numpy(
        engine.state.pools[0].cpu() if isinstance(engine.state.pools[0], torch.Tensor) else engine.state.pools[0]
    )
    flat = [
        (pool[:, :, r.pages[0].ids].reshape(*pool.shape[:2], -1, *pool.shape[4:]), r)
        for r in engine.requests.requests.values()
    ]
    return [kv[:, :, : r.context_len] for kv, r in flat]


def assert_same_context(a, b):
    for x, y in zip(stored_context(a), stored_context(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5)


def test_eager_drafts_what_jax_drafts():
    """Any difference over the life of requests: pages, lengths, rejected rows, anchors, chunks of prompts, padding."""
    on_jax = jax_dflash.engine.DraftEngine(DRAFT, draft_weights(FRAMEWORKS["jax"]), **LIMITS, taps=2)
    on_torch = torch_engine(taps=2)
    for engine in (on_jax, on_torch):
        engine.capture(progress=False)
    rows = run_lockstep([on_torch, on_jax], 60)
    assert {n for n, _ in rows} == {1, 2, 3}
    assert any(M > n * (K + 1) for n, M in rows) and any(M < n * (K + 1) for n, M in rows)
    assert_same_context(on_torch, on_jax)
    names = [tap.name for tap in tap_table(GEOMETRY.num_layers)]
    assert sorted(on_torch.last_taps) == sorted(on_jax.last_taps) == sorted(names)


class BodyAsGraph:
    """Stands for a captured graph where there is no GPU: a replay runs the captured function."""

    def __init__(self, graphs: CudaGraphs, descriptor):
        self.graphs, self.descriptor = graphs, descriptor

    def replay(self):
        self.graphs.draft_tokens[self.descriptor] = self.graphs.body(self.descriptor)


def with_bodies(engine: DraftEngine) -> DraftEngine:
    """An eager engine whose steps go through static buffers and `CudaGraphs.body`."""
    engine.graphs = graphs = CudaGraphs(engine.config, engine.ladder, engine.weights, engine.state)
    for descriptor in engine.ladder.capture_order(GraphMode.FULL):
        graphs.ints[descriptor] = torch.from_numpy(engine.config.layout(descriptor.num_reqs).empty())
        graphs.graphs[descriptor] = BodyAsGraph(graphs, descriptor)
    engine.captured = True
    return engine


@pytest.mark.parametrize("config", [DRAFT, WINDOWED], ids=["full", "windows"])
def test_static_buffers_draft_what_eager_drafts(config):
    """Context rows past the bucket's own stored twice, late or nowhere; rows of an earlier step taken for this one's;
    pages past the live ones that change the result. C41: a window that counts from the width of the block tables."""
    eager, graph = torch_engine(config=config), with_bodies(torch_engine(config=config))
    eager.capture()

    def poison():
        graph.graphs.features.fill_(float("nan"))

    rows = run_lockstep([eager, graph], 60, seed=1, before=poison)
    assert any(M > n * (K + 1) for n, M in rows) and any(M < n * (K + 1) for n, M in rows)
    assert_same_context(eager, graph)
    assert np.isfinite(numpy(graph.state.pools[0])).all()


@pytest.mark.parametrize("extra", [-1, 0, 1, K + 1])
def test_rows_around_the_bucket_s_own(extra):
    """An off-by-one where the rows of a step are as many as its bucket stores, or one more."""
    eager, graph = torch_engine(), with_bodies(torch_engine())
    eager.capture()
    M = K + 1 + extra
    one = np.ones(1, np.int32)
    step = TargetStep(
        request_ids=["a"], num_context=one * M, num_rejected=one, num_sampled=one, last_sampled=one, next_prefill=one
    )
    features = np.random.default_rng(M).standard_normal((M, DRAFT.feature_size)).astype(np.float32)
    for engine in (eager, graph):
        engine.add_request("a")
    np.testing.assert_array_equal(graph.propose(step, features), eager.propose(step, features))
    assert stored_context(graph)[0].shape[2] == M - 1
    assert_same_context(eager, graph)


def test_the_body_of_an_empty_batch_keeps_the_pool():
    """Warm-up and capture that write through PAD into a page."""
    engine = with_bodies(torch_engine())
    engine.state.pools[0][:] = torch.randn(engine.state.pools[0].shape, generator=torch.Generator().manual_seed(0))
    before = engine.state.pools[0].clone()
    for descriptor, graph in engine.graphs.graphs.items():
        graph.replay()
        assert engine.graphs.draft_tokens[descriptor].shape == (descriptor.num_reqs, K)
    assert torch.equal(engine.state.pools[0], before)


def test_read_only_and_bfloat16_features_are_taken():
    """A view of another framework's array that PyTorch warns about or cannot read."""
    one = np.ones(1, np.int32)
    step = TargetStep(
        request_ids=[0], num_context=one * 3, num_rejected=one, num_sampled=one, last_sampled=one, next_prefill=one
    )
    features = np.random.default_rng(0).standard_normal((3, DRAFT.feature_size)).astype(ml_dtypes.bfloat16)
    drafts = []
    for given in (features, np.asarray(jax.numpy.asarray(features.astype(np.float32)))):
        engine = torch_engine()
        engine.capture()
        engine.add_request(0)
        drafts.append(engine.propose(step, given))
    np.testing.assert_array_equal(*drafts)


def test_refusals():
    """A mode that silently becomes another, an engine that runs uncaptured, or features of another dtype."""
    with pytest.raises(InputError, match="mode 'cuda_graph' needs weights on an NVIDIA GPU, they are on cpu"):
        torch_engine(mode="cuda_graph")
    with pytest.raises(InputError, match="mode 'graph' is unknown"):
        torch_engine(mode="graph")
    engine, four = torch_engine(), np.ones(4, np.int32)
    step = TargetStep(
        request_ids=[0, 1, 2, 3],
        num_context=four,
        num_rejected=0 * four,
        num_sampled=four,
        last_sampled=four,
        next_prefill=four,
    )
    features = np.zeros((4, DRAFT.feature_size), np.float32)
    with pytest.raises(InputError, match=r"call capture\(\) first"):
        engine.propose(step, features)
    engine.capture()
    with pytest.raises(InputError, match="4 requests exceed max_num_seqs=3"):
        engine.propose(step, features)
    for i in range(R):
        engine.add_request(i)
    three = TargetStep(
        request_ids=[0, 1, 2], num_context=four[:3], num_rejected=0 * four[:3], num_sampled=four[:3],
        last_sampled=four[:3], next_prefill=four[:3],
    )  # fmt: skip
    with pytest.raises(InputError, match=r"features are torch.bfloat16, expected torch.float32"):
        engine.propose(three, torch.zeros(16, DRAFT.feature_size, dtype=torch.bfloat16))
    with pytest.raises(InputError, match="features have 2 rows, the step's num_context add up to 3"):
        engine.propose(three, features[:2])
    assert [r.context_len for r in engine.requests.requests.values()] == [0, 0, 0]
    assert not engine.state.pools[0].any()


def test_a_batch_off_the_ladder_runs_eagerly():
    """A hole in the ladder, such as vLLM's own, that has no graph to replay."""
    ladder = BucketLadder([K + 1], max_num_seqs=R, query_lens=K + 1)
    holes, eager = with_bodies(torch_engine(ladder=ladder)), torch_engine()
    eager.capture()
    run_lockstep([eager, holes], 20, seed=2)


@gpu
@needs_gpu
@pytest.mark.parametrize("config, page_size", [(DRAFT, 3), (EVEN, 16)])
def test_replay_drafts_what_eager_drafts_on_the_gpu(config, page_size):
    """What a capture froze: a length, a width, a pointer to memory that was freed, rows of an earlier step."""
    pin_numerics()
    eager, graph = (torch_engine("cuda", config, page_size=page_size, mode=m) for m in ("eager", "cuda_graph"))
    for engine in (eager, graph):
        engine.capture(progress=False)
    assert [d.num_reqs for d in graph.graphs.graphs] == [3, 2, 1]

    def poison():
        graph.graphs.features.fill_(float("nan"))

    run_lockstep([eager, graph], 200, seed=3, before=poison)
    assert_same_context(eager, graph)
    assert torch.isfinite(graph.state.pools[0]).all()


@gpu
@needs_gpu
def test_capture_keeps_the_pool_on_the_gpu():
    """Warm-up or capture that writes into a page."""
    engine = torch_engine("cuda", mode="cuda_graph")
    engine.state.pools[0].normal_()
    before = engine.state.pools[0].clone()
    engine.capture(progress=False)
    assert torch.equal(engine.state.pools[0], before)


@gpu
@needs_gpu
def test_rounding_contract_on_the_gpu():
    """A fused operator of the GPU that rounds before the norm's weight, or logits in bfloat16."""
    f = FRAMEWORKS["torch"]
    x = f.floats([0.90234375, 0.09423828125, -0.7421875, -0.921875], "bfloat16").cuda()
    weight = f.floats([0.76953125, 1.109375, 0.49609375, 0.89453125], "bfloat16").cuda()
    assert f.layers.rms_norm(x, weight, 1e-6).tolist() == [0.9296875, 0.140625, -0.494140625, -1.109375]
    operands = (
        torch.ones(1, 8, device="cuda", dtype=torch.bfloat16),
        torch.ones(8, 8, device="cuda", dtype=torch.bfloat16),
    )
    operands[0][0, 0] = 256
    product = f.numerics.accum_linear(*operands)
    assert product.dtype is torch.float32 and product.tolist() == [[263.0] * 8]


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype, atol", [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_attention_on_the_gpu_equals_the_cpu(dtype, atol):
    """A kernel that takes the mask otherwise: NaN for a request of length 0, NaN rows past the end, keys unmasked."""
    f = FRAMEWORKS["torch"]
    rng = np.random.default_rng(0)
    pool = np.full((2, 2, 11, 8, 2, 64), np.nan, np.float32)
    pool[:, :, [7, 2, 5]] = rng.standard_normal((2, 2, 3, 8, 2, 64))
    pool[:, :, 2, 3:] = pool[:, :, 5, 5:] = np.nan
    q = f.floats(rng.standard_normal((3, 5, 6, 64)), dtype)
    tables, seq_lens = f.ints([[7, 2, 0, 0], [0, 0, 0, 0], [5, 0, 0, 0]]), f.ints([11, 0, 5])
    on_cpu = attention(f.pool(pool.shape, dtype, fill=pool), 1, q, tables, seq_lens)
    on_gpu_pool = f.kv_cache.zero_pool(pool.shape, f.numerics.as_dtype(dtype), "cuda")
    on_gpu_pool[:] = torch.as_tensor(pool, device="cuda")
    on_gpu = attention(on_gpu_pool, 1, q.cuda(), tables.cuda(), seq_lens.cuda())
    np.testing.assert_allclose(numpy(on_gpu.cpu()), numpy(on_cpu), rtol=0, atol=atol)
    assert np.isfinite(numpy(on_gpu.cpu())).all() and not on_gpu[1].any()
