"""Tier 2: each tap, computed from the reference's own values before it, errs as much as the reference does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from jax_dflash.taps import live_part, tap_table
from parity_tests.harness import case as cases
from parity_tests.harness import metrics, mutations, null, runners, standard, verdict
from parity_tests.harness.mutations import Modules
from parity_tests.judged import comparison, judged

FLOATS = [tap for tap in tap_table(2) if tap.kind == "float"]
COMPUTED = [tap for tap in FLOATS if tap.name not in verdict.COPIES]


@pytest.mark.parametrize("tap", COMPUTED, ids=lambda tap: tap.name)
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
        if tap.kind == "float" and tap.name not in verdict.COPIES:
            exact = comparison(name).traces["local_exact"][tap.name]
            rows_ = live_part(tap, exact, standard.CASES[name]().live_reqs, standard.CASES[name]().live_rows)
            low, high = verdict.contract_band(tap, null.distinct(rows_))
            assert low <= row["roundings"] <= high, tap.name


def test_the_contract_s_band_follows_the_count_and_the_size():
    """A band that every error falls into: 4096 elements of one rounding look like 0.5 to 1.6 of them, 16 like 0.1 to 8."""
    taps = {tap.name: tap for tap in FLOATS}
    assert verdict.contract_band(taps["combined"], 4096) == pytest.approx((0.50, 1.61), abs=0.01)
    assert verdict.contract_band(taps["combined"], 16) == pytest.approx((0.096, 8.43), abs=0.05)
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


def test_a_policy_of_both_sides_shows():
    """Both sides rounding once too often, which no ratio of the two can see."""
    case = cases.mixed(hidden_size=128)
    with mutations.planted("norm-rounds-first", "torch"):
        result = verdict.compare(case, "torch.eager", "torch.sdpa")
    assert (result.verdict, result.first_divergence) == (verdict.ROUNDING, "context_norm")
    assert verdict.compare(case, "torch.eager", "torch.sdpa").ok


def only_in_bfloat16(m, wrong):
    """Attention that goes wrong in bfloat16 alone, where float64 cannot see it."""
    kernels = dict(m.dense.KERNELS)

    def dense(q, k, v, visible):
        return (
            kernels["dense"](q, *wrong(k, v), visible)
            if q.dtype == torch.bfloat16
            else kernels["dense"](q, k, v, visible)
        )

    return kernels | {"dense": dense}


@pytest.mark.parametrize("side", ["reference", "tested"])
def test_a_gross_error_in_one_dtype_is_no_policy(side, monkeypatch):
    """A kernel that reads other heads in bfloat16 only: right in float64, so a policy, or, on the reference's side, a
    yardstick so long that everything is within it."""
    m = Modules.of("torch")
    monkeypatch.setattr(m.dense, "KERNELS", only_in_bfloat16(m, lambda k, v: (k.flip(1), v.flip(1))))
    ref, sut = ("torch.eager", "torch.sdpa") if side == "reference" else ("torch.sdpa", "torch.eager")
    result = verdict.compare(cases.mixed(), ref, sut)
    assert (result.verdict, result.first_divergence, result.side) == (verdict.WRONG, "layers.0.attn", "torch.eager")


def test_nan_in_one_dtype_is_no_policy(monkeypatch):
    """A NaN that only bfloat16 has, called a rounding."""
    m = Modules.of("torch")
    right = m.layers.swiglu

    def wrong(x):
        return right(x) * (float("nan") if x.dtype == torch.bfloat16 else 1)

    monkeypatch.setattr(m.layers, "swiglu", wrong)
    result = verdict.compare(cases.mixed(), "torch.eager", "torch.sdpa")
    assert (result.verdict, result.first_divergence) == (verdict.WRONG, "layers.0.act")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("seed", [7, 25, 30])
def test_a_thing_is_itself(seed, dtype):
    """A band that leaves out 1: the reference failing against itself."""
    assert verdict.compare(cases.mixed(seed), "torch.eager", "torch.eager", dtype).verdict == verdict.OK


SMALL = [
    {"hidden_size": 128, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "block_size": 8, "seed": 20},
    {"hidden_size": 8, "block_size": 2, "seed": 3},
    {"hidden_size": 8, "block_size": 2, "num_layers": 3, "seed": 11},
    {"hidden_size": 24, "num_heads": 2, "num_kv_heads": 2, "head_dim": 6, "intermediate_size": 12, "seed": 5},
]


@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_small_cases_are_not_blamed(sizes):
    """Few elements, or many that are the same one: what shrinking leaves must pass when it is right."""
    assert verdict.compare(cases.mixed(**sizes), "torch.eager", "torch.sdpa").verdict == verdict.OK


def test_nothing_to_round_is_not_blamed():
    """A branch of zeros: less error than the contract's, on both sides alike."""
    case = cases.mixed()
    zero = {name: value * ("o_proj" not in name and "down" not in name) for name, value in case.tensors.items()}
    assert verdict.compare(replace(case, tensors=zero), "torch.eager", "torch.sdpa").verdict == verdict.OK


def test_float32_is_judged_by_its_sums():
    """Frameworks that sum in another order failing in float32, or a float32 that is TF32 passing."""
    assert verdict.compare(cases.mixed(), "torch.eager", "jax", "float32").verdict == verdict.OK
    m = Modules.of("torch")
    right = m.layers.linear

    def tf32(x):
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32) if x.dtype == torch.float32 else x

    try:
        m.layers.linear = lambda x, w, *bias: right(tf32(x), tf32(w), *bias)
        result = verdict.compare(cases.mixed(), "torch.sdpa", "torch.eager", "float32")
    finally:
        m.layers.linear = right
    assert not result.ok and result.first_divergence == "layers.0.q"
