"""Tier 2: each tap, computed from the reference's own values before it, errs as much as the reference does."""

import numpy as np
import pytest

from jax_dflash.taps import tap_table
from parity_tests.harness import case as cases
from parity_tests.harness import metrics, mutations, null, runners, standard, verdict
from parity_tests.judged import judged

FLOATS = [tap for tap in tap_table(2) if tap.kind == "float"]


@pytest.mark.parametrize("tap", FLOATS, ids=lambda tap: tap.name)
def test_local_error_is_the_reference_s_own(tap):
    """Scores rounded before the softmax, weights divided before they are rounded, norms that round twice."""
    row = judged("mixed")[tap.name]
    low, high = row["band_local"]
    assert row["rho_local"] <= high and high < 1.5
    assert row["verdict"] == "ok"


@pytest.mark.parametrize("name", standard.CASES)
def test_error_is_that_of_the_contract_s_roundings(name):
    """Both sides rounding once too often, which no ratio of the two can see."""
    rows = judged(name)
    for tap in tap_table(standard.CASES[name]().num_layers):
        row = rows[tap.name]
        if tap.kind == "float":
            low, high = verdict.contract_band(tap, int(np.prod(row["shape"])))
            assert low <= row["roundings"] <= high, tap.name


def test_the_contract_s_band_follows_the_count_and_the_size():
    """A band that every error falls into: 1000 elements of one rounding look like 0.4 to 2.5 of them, 16 like 0.1 to 12."""
    taps = {tap.name: tap for tap in FLOATS}
    assert verdict.contract_band(taps["combined"], 1000) == pytest.approx((0.39, 2.45), abs=0.01)
    assert verdict.contract_band(taps["combined"], 16) == pytest.approx((0.084, 11.5), abs=0.05)
    assert verdict.contract_band(taps["layers.0.attn"], 10**6) == pytest.approx((0.49, 3.95), abs=0.01)
    assert verdict.contract_band(taps["embeds"], 1000) == (0.0, verdict.NO_ROUNDING)


def test_sdpa_rounds_as_often_as_the_contract_says():
    """PyTorch's fused kernel judged another policy: it is what a user runs."""
    result = verdict.compare(cases.mixed(), "torch.eager", "torch.sdpa")
    assert (result.verdict, result.first_divergence) == (verdict.OK, None)


def test_rounding_counts_are_measured():
    """A count that is not the square of an error: two independent roundings of a Gaussian make 2.0 of them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(200_000)
    once = cases.exact(x)
    assert metrics.roundings(once, x, "bfloat16") == pytest.approx(1.0, abs=0.05)
    twice = cases.exact(cases.exact(x * 1.2345) / 1.2345)
    assert metrics.roundings(twice, x, "bfloat16") == pytest.approx(2.0, abs=0.15)


@pytest.mark.parametrize("seed", [0, 7])
def test_symmetries_change_nothing_in_float64(seed):
    """A null distribution of runs that compute something else: each tap comes back equal, and mapping is undone."""
    case = cases.mixed()
    symmetry, exact = null.Symmetry(case, seed), runners.oracle(case)
    changed = runners.oracle(symmetry.apply(case))
    for tap in tap_table(case.num_layers):
        assert np.array_equal(symmetry.unmap(tap, symmetry.map(tap, exact[tap.name])), exact[tap.name], equal_nan=True)
        back = symmetry.unmap(tap, changed[tap.name])
        n, rows = case.live_reqs, case.live_rows
        if tap.kind == "float":
            from jax_dflash.taps import live_part

            assert (
                metrics.relative_rmse(live_part(tap, back, n, rows), live_part(tap, exact[tap.name], n, rows)) < 1e-13
            )
            moved = live_part(tap, changed[tap.name], n, rows)
            assert tap.name == "logits" or not np.allclose(moved, live_part(tap, exact[tap.name], n, rows)), tap.name


def test_a_policy_is_not_called_wrong():
    """Other people's contracts reported as bugs: the function is right in float64, and the verdict says so."""
    with mutations.planted("scores-rounded", "torch"):
        result = verdict.compare(cases.mixed(), "jax", "torch.eager")
    row = next(row for row in result.rows if row["tap"] == "layers.0.attn")
    assert (result.verdict, result.first_divergence) == (verdict.ROUNDING, "layers.0.attn")
    assert row["fp64"] < 1e-13 and row["rho_local"] > 1.5
