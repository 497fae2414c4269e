"""Tier 5: runs that must give the same bits, and those that may differ only as sums in another order do."""

import numpy as np
import pytest
import torch

from parity_tests.harness import case as cases
from parity_tests.harness import mutations, runners, standard, tiers
from parity_tests.harness.mutations import Modules


@pytest.mark.parametrize("sut", ["torch.eager", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_mates_change_no_bit(sut, dtype):
    """A request whose values depend on who stands beside it in the batch."""
    assert tiers.batch_mates(cases.mixed(), sut, dtype) == []


def test_a_batch_mate_that_leaks_is_told(monkeypatch):
    """A check that looks at nothing: here every row is shifted by the batch's mean."""
    m = Modules.of("torch")
    right = m.drafter.embed
    monkeypatch.setattr(m.drafter, "embed", lambda *args: right(*args) + right(*args).mean((0, 1)))
    faults = tiers.batch_mates(cases.mixed(), "torch.eager", "float32")
    assert "torch.eager float32: embeds of a request changes with another request" in faults


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_ahead_of_time_is_jit(dtype):
    """Compiler options that only one of the two ways of compiling gets."""
    assert tiers.ahead_of_time(cases.mixed(), dtype) == []


def test_program_is_op_by_op_but_for_fused_multiply_adds():
    """Rounding points that a program drops (excess precision), or integers that it computes otherwise."""
    assert tiers.op_by_op(cases.mixed(num_layers=1)) == []


def test_nan_of_others_reaches_nobody():
    """Weight 0 times NaN: every page that no request owns, every row past a length and every padded row is NaN here."""
    case = cases.mixed()
    assert np.isnan(case.pool).mean() > 0.1 and case.context_rows > case.live_rows
    for sut in ("torch.eager", "torch.sdpa", "jax"):
        trace = runners.runner(sut)(case, "bfloat16", rerun=False)
        for name in ("hidden", "logits"):
            assert np.isfinite(trace[name][: case.live_reqs]).all(), (sut, name)


def test_excess_precision_shows_op_by_op(monkeypatch):
    """A ratio that no program can fail: one that computes in float32 what it should round has half the error."""
    with mutations.planted("norm-rounds-first", "jax"):
        case = cases.mixed(num_layers=1)
        single = runners.runner("jax.op")(case, "bfloat16", rerun=False)
    program = runners.runner("jax")(case, "bfloat16", rerun=False)
    assert tiers._within_band(case, "x", single, program) != []


def test_a_graph_takes_one_verify_of_each_request():
    """A prefill replayed by a graph that has no rows for it, or a verify that is never replayed."""
    assert {name: runners.fits_a_graph(make()) for name, make in standard.CASES.items()} == {
        "mixed": True, "long": True, "narrow": True, "ties": True, "builtin": False,
    }  # fmt: skip


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_replayed_graph_is_eager_on_the_gpu(dtype):
    """A capture that baked a length, a table or an address."""
    case = cases.mixed()
    graph = runners.runner("torch.graph", "gpu")(case, dtype)
    eager = runners.runner("torch.eager", "gpu")(case, dtype)
    assert np.array_equal(graph["draft_tokens"][: case.live_reqs], eager["draft_tokens"][: case.live_reqs])
    assert np.array_equal(graph["pool"], eager["pool"], equal_nan=True)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("sut", ["torch.eager", "jax"])
def test_batch_mates_change_no_bit_on_the_gpu(sut):
    """As on the CPU, by the GPU's own kernels."""
    assert tiers.batch_mates(cases.mixed(), sut, "bfloat16", "gpu") == []
