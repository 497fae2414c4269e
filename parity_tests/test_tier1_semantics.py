"""Tier 1: the same code in float64 computes the oracle's function, on every tap."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_dflash.taps import live_part, tap_table
from parity_tests.harness import case as cases
from parity_tests.harness import metrics, runners, standard, tiers
from parity_tests.harness.case import Request
from parity_tests.harness.verdict import FP64_LIMIT


def worst(case, name):
    """The largest relative RMSE of any float tap; integers and drafts must be equal, NaN at the same places."""
    ours, exact = runners.float64_run(case, name), runners.oracle(case)
    assert ours.keys() == exact.keys()
    found = 0.0
    for tap in tap_table(case.num_layers):
        a, b = (live_part(tap, t[tap.name], case.live_reqs, case.live_rows) for t in (ours, exact))
        if tap.kind in ("int", "token"):
            assert np.array_equal(a, b), tap.name
            assert tap.kind == "token" or a.dtype == np.int32
        else:
            error = metrics.relative_rmse(a, b)
            assert error <= FP64_LIMIT, (tap.name, error)
            found = max(found, error)
    return found


@st.composite
def steps(draw):
    """Shapes, lengths, page layouts and rejected counts; every request has a valid row."""
    page_size, block = draw(st.sampled_from([1, 3, 4, 16])), draw(st.integers(2, 8))
    K = draw(st.integers(1, block - 1))
    limit = draw(st.integers(24, 60))
    requests = []
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, limit - 8))
        rows = draw(st.integers(1, min(7, limit - start)))
        requests.append(Request(start, rows, draw(st.integers(0, rows - 1)), draw(st.sampled_from([0, 1, 3]))))
    kv_heads = draw(st.integers(1, 3))
    E = draw(st.integers(1, 3))
    return cases.build(
        "drawn", requests, seed=draw(st.integers(0, 99)), num_layers=draw(st.integers(1, 3)), num_kv_heads=kv_heads,
        num_heads=kv_heads * draw(st.integers(1, 3)), head_dim=2 * draw(st.integers(1, 8)),
        hidden_size=draw(st.integers(3, 37)), intermediate_size=draw(st.integers(1, 41)),
        target_hidden_size=draw(st.sampled_from([None, 5, 29])), vocab_size=draw(st.integers(8, 70)),
        target_layer_ids=tuple(draw(st.permutations(range(5)))[:E]), block_size=block, num_speculative_tokens=K,
        page_size=page_size, max_model_len=limit, num_reqs=len(requests) + draw(st.integers(0, 2)),
        extra_rows=draw(st.integers(0, 5)), rope_theta=draw(st.sampled_from([1e4, 1e6, 5e5])),
    )  # fmt: skip


@given(steps())
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_pytorch_is_the_oracle_on_drawn_steps(case):
    """Any wrong sum, mask, slot, length or head at a shape that nobody thought of."""
    worst(case, "torch.eager")


@given(steps())
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_jax_is_the_oracle_on_drawn_steps(case):
    """As above; few, since every shape is a compilation of seconds in the float64 process."""
    worst(case, "jax")


@pytest.mark.parametrize("sut", ["torch.eager", "jax"])
@pytest.mark.parametrize("name", standard.CASES)
def test_standard_cases(name, sut):
    """The weakest of the known bugs is 1.4e-5 off; what is right is 1e-15 off."""
    assert worst(standard.CASES[name](), sut) < 1e-13


@pytest.mark.parametrize("sut", ["torch.eager", "jax"])
def test_a_bucket_of_another_size_computes_the_same(sut):
    """A live request's values that depend on how many padded ones stand beside it."""
    assert tiers.other_bucket(cases.mixed(), sut) == []


@pytest.mark.parametrize("sut", ["torch.eager", "jax"])
def test_context_in_two_steps_is_context_at_once(sut):
    """A block's K/V left in the pool where context belongs, or positions that restart with a chunk."""
    assert tiers.in_steps(sut) == []
