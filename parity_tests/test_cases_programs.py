"""cases.md, captured programs: nothing of a capture, an earlier step or an earlier batch is left in the next one.

PyTorch's eager engine is the reference: it bakes nothing in. JAX's compiled programs, the static buffers of the CUDA
graphs and, on a GPU, the replayed graphs must draft and store what it does.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_dflash.engine
import jax_dflash.programs
from jax_dflash.batch import IntsLayout
from jax_dflash.buckets import BucketLadder
from jax_dflash.config import InputError
from parity_tests.engines import (
    CONFIG,
    KINDS,
    LADDER,
    LIMITS,
    features,
    jax_programs,
    make_engine,
    needs_gpu,
    one_thread,
    pool_of,
    prefill,
    step_for,
    weights_of,
)
from parity_tests.soak import assert_same_state, soak
from parity_tests.tiny import numpy

__all__ = ["one_thread"]
K = LIMITS.num_speculative_tokens
CAPTURED = [kind for kind in KINDS if kind != "torch"]


@functools.cache
def jax_events() -> collections.Counter:
    """Traces and compilations of this process from the first call on."""
    counts: collections.Counter = collections.Counter()
    jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: counts.update([event]))
    return counts


TRACE, COMPILE = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"


def lengths_in_turn(kind, lengths):
    """Two new requests at each length, all in the bucket of two, on a captured engine and on eager PyTorch."""
    captured, eager = make_engine(kind, fill=np.nan), make_engine("torch", fill=np.nan)
    for turn, length in enumerate(lengths):
        ids = [(turn, 0), (turn, 1)]
        drafts = []
        for engine in (captured, eager):
            for i in ids:
                engine.add_request(i)
            drafts.append(prefill(engine, ids, length - K - 1, seed=turn))
        np.testing.assert_array_equal(*drafts)
        assert_same_state(captured, eager, ids)
        for engine in (captured, eager):
            for i in ids:
                engine.remove_request(i)


@pytest.mark.parametrize("kind", CAPTURED)
def test_one_bucket_at_any_length(kind):
    """C60: the longest length as a constant of the program, right only until another one comes: 9, 70, 9, and 290, which
    takes a second chunk of keys."""
    lengths_in_turn(kind, [9, 70, 9, 290, 9])


@pytest.mark.parametrize("kind", CAPTURED)
def test_lengths_that_grow_past_the_captured_one(kind):
    """C62: a plan of attention made on the host at capture (lengths of one block) and replayed at 5, 17 and 33."""
    lengths_in_turn(kind, [K + 2, 5, 17, 33])


@pytest.mark.parametrize("kind", [kind for kind in CAPTURED if kind != "jax"])
def test_up_to_the_capacity_and_not_past_it(kind):
    """C59: context beyond what was captured for, clipped to it. 64 rows equal eager's, the 65th token is refused."""
    captured, eager = (make_engine(k, fill=np.nan, max_model_len=64) for k in (kind, "torch"))
    drafts = []
    for engine in (captured, eager):
        engine.add_request(0)
        drafts.append(prefill(engine, [0], 64 - K - 1))
        with pytest.raises(InputError, match="context positions 60 to 64 exceed max_model_len=64"):
            engine.propose(step_for([0], 5), features(5))
    np.testing.assert_array_equal(*drafts)
    assert_same_state(captured, eager, [0])


def test_up_to_the_capacity_in_jax():
    """C59: the same at the capacity of 300 that the programs of these tests were compiled for."""
    captured, eager = (make_engine(kind, fill=np.nan) for kind in ("jax", "torch"))
    drafts = []
    for engine in (captured, eager):
        engine.add_request(0)
        drafts.append(prefill(engine, [0], 300 - K - 1))
        with pytest.raises(InputError, match="context positions 296 to 300 exceed max_model_len=300"):
            engine.propose(step_for([0], 5), features(5))
    np.testing.assert_array_equal(*drafts)
    assert_same_state(captured, eager, [0])


def test_python_scalars_are_another_signature():
    """C69: what the next test relies on: JAX traces anew for 0.5 after float32(0.5), and for 1 after int32(1)."""
    for python, typed in ((0.5, np.float32(0.5)), (1, np.int32(1))):
        traces = []

        @jax.jit
        def f(x, y, traces=traces):
            traces.append(1)
            return x * y

        for y in (python, typed, python, typed):
            f(np.ones(3, np.float32), y)
        assert len(traces) == 2


def test_one_trace_a_bucket_and_none_after_capture():
    """C69, C70: a Python scalar, a weak type, or a padding of its own on the way into the programs: traces over 200 random
    steps through every bucket of requests and of context rows."""
    engine, events = make_engine("jax"), jax_events()
    events.clear()
    programs = engine.programs
    assert len(programs.steps) == 3 and list(programs.contexts) == [32, 16]
    rng, seen = np.random.default_rng(0), set()
    bank = [features(32), jax.device_put(features(32)), jax.device_put(features(16))]
    events.clear()  # of device_put
    for _ in range(200):
        n = int(rng.integers(1, 9))
        ids = list(range(n))
        for i in ids:
            engine.add_request(i)
        counts = rng.integers(1, 32 // n + 1, n)
        step = step_for(ids, counts, rng.integers(0, counts), last=rng.integers(0, 99, n))
        rows = int(counts.sum())
        given = bank[0][:rows] if rng.random() < 0.7 else bank[1 if rows > 16 else 2]
        assert engine.propose(step, given).shape == (n, K)
        seen.add((LADDER.dispatch(n, 4 * n, 4).num_reqs, rows > 4 * n, rows > 16))
        for i in ids:
            engine.remove_request(i)
    assert {reqs for reqs, *_ in seen} == {2, 4, 8}
    assert {large for *_, large in seen} == {False, True}
    assert (events[TRACE], events[COMPILE], engine.eager_compiles) == (0, 0, 0)
    assert len(programs.steps) == 3 and len(programs.contexts) == 2


def test_capture_traces_each_program_once(monkeypatch):
    """C69: a capture that traces a program twice, for its shapes and for its warm-up."""
    calls = collections.Counter()

    def counted(name):
        function = getattr(jax_dflash.programs, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(jax_dflash.programs, name, call)

    for name in ("draft_step", "context_step"):
        counted(name)
    engine = jax_dflash.engine.DraftEngine(
        CONFIG, weights_of("jax"), max_num_seqs=1, max_model_len=32, num_speculative_tokens=3, max_num_batched_tokens=8
    )
    engine.capture(progress=False)
    assert calls == {"draft_step": 1, "context_step": 1}
    engine.add_request(0)
    for rows in (4, 5, 3, 8):
        engine.propose(step_for([0], rows), features(rows))
    assert calls == {"draft_step": 1, "context_step": 1}


def test_five_requests_of_six_rows(f):
    """C55: 30 tokens in a bucket of 36: 5 real rows, 30 real slots, 6 PAD slots, no phantom result row."""
    n, ladder = 5, BucketLadder.without_holes(max_num_seqs=8, query_len=6)
    descriptor = ladder.dispatch(n, 30, 6)
    assert (descriptor.num_reqs, descriptor.num_tokens) == (6, 36)
    layout = IntsLayout(6, 4)
    columns = dict.fromkeys(layout.PER_REQUEST, np.zeros(n, np.int32)) | {
        "num_context": np.ones(n, np.int32), "request_index": np.arange(n),
        "block_tables": 1 + np.arange(4 * n).reshape(n, 4),
    }  # fmt: skip

    def run(ints):
        return f.inputs.prepare_inputs(
            layout.unpack(ints), context_rows=36, query_len=6, mask_token_id=99, page_size=4, max_model_len=16
        )

    inputs = f.run(run, f.ints(layout.pack(columns, n)))
    slots = numpy(inputs.query_slots)
    assert ((slots >= 0).sum(), (slots == -1).sum()) == (30, 6)
    assert numpy(inputs.query_start_loc).tolist() == [0, 6, 12, 18, 24, 30, 30]
    assert numpy(inputs.seq_lens).tolist() == [7, 7, 7, 7, 7, 0]
    assert (numpy(inputs.sample_request) >= 0).sum() == 25


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_only_read(kind):
    """C64: the target's hidden states polluted by the draft step that reads them, at every size around a bucket's own."""
    engine = make_engine(kind)
    engine.add_request(0)
    for rows in (7, 8, 9, 16, 17, 32):
        given = features(rows, rows)
        engine.propose(step_for([0], rows), given)
        np.testing.assert_array_equal(given, features(rows, rows))
        if rows not in (8, 16, 32):
            continue  # an array on the device comes at a bucket's size
        held = jax.device_put(given) if kind == "jax" else torch.tensor(given, device=engine.device)
        engine.propose(step_for([0], rows), held)
        np.testing.assert_array_equal(numpy(held if kind == "jax" else held.cpu()), features(rows, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_outlive_the_next_step(kind):
    """C65: drafts that are a view of static memory, overwritten by the next step; features bound instead of copied, so
    that the first step's come again, or read after the caller has overwritten them."""
    engine, other = (make_engine(kind) for _ in range(2))
    for e in (engine, other):
        e.add_request(0)
    rows = features(4)
    pending = engine.propose_padded(step_for([0], 4), rows)
    rows[:] = np.nan
    first = np.asarray(pending.cpu() if isinstance(pending, torch.Tensor) else pending)[:1].copy()
    kept = other.propose(step_for([0], 4), features(4))
    np.testing.assert_array_equal(kept, first)
    second = other.propose(step_for([0], 4, last=23), features(4, 1))
    assert (second != kept).any()
    np.testing.assert_array_equal(kept, first)
    np.testing.assert_array_equal(engine.propose(step_for([0], 4, last=23), features(4, 1)), second)


@pytest.mark.gpu
@needs_gpu
def test_a_replay_overwrites_what_was_not_copied():
    """C65: that the tokens of `propose_padded` are static memory under graphs, as its docstring says."""
    engine = make_engine("cuda_graph")
    engine.add_request(0)
    static = engine.propose_padded(step_for([0], 4), features(4))
    first = static.clone()
    again = engine.propose_padded(step_for([0], 4, last=23), features(4, 1))
    assert again.data_ptr() == static.data_ptr()
    assert torch.equal(static, again) and not torch.equal(first, again)


def test_negative_indices_wrap():
    """C71: what the pools are built against: -1 writes the last row, in JAX even where out-of-range rows are dropped."""
    zeros, at, values = jnp.zeros(4), jnp.array([1, -1]), jnp.array([7.0, 9.0])
    assert zeros.at[at].set(values, mode="drop").tolist() == [0, 7, 0, 9]
    assert zeros.at[at].set(values, mode="drop", wrap_negative_indices=False).tolist() == [0, 7, 0, 0]
    assert zeros.at[jnp.where(at < 0, 4, at)].set(values, mode="drop").tolist() == [0, 7, 0, 0]
    wrapped = torch.zeros(4)
    wrapped[torch.tensor([1, -1])] = torch.tensor([7.0, 9.0])
    assert wrapped.tolist() == [0, 7, 0, 9]


@pytest.mark.parametrize("kind", KINDS)
def test_pad_leaves_the_last_slot(kind):
    """C71: padded context and query rows of a step in the pool's last row."""
    engine = make_engine(kind, fill=512.0)
    engine.add_request(0)
    engine.propose(step_for([0], 3, 1), features(3))  # the bucket has 8 context rows and a second request
    pool = pool_of(engine)
    assert np.all(pool[:, :, -1] == 512) and np.all(pool[:, :, 0] == 512)
    assert np.any(pool != 512, axis=(0, 1, 3, 4)).sum() == 2 + K + 1


@pytest.mark.parametrize("kind", KINDS)
def test_soak_between_guard_pages(kind):
    """C56: a write past a page, a table or a batch that only long traffic meets; programs or arrays that pile up; drafts
    that depend on what an engine did before. The 12,000 steps of the case: `python -m parity_tests.soak`."""
    jax_programs()
    assert soak(kind, 400) == {"batch_sizes": LIMITS.max_num_seqs, "requests_checked": 20}
