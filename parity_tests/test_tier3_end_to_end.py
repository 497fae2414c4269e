"""Tier 3: along the free run errors grow as the reference's do."""

import numpy as np
import pytest

from parity_tests.harness import standard, verdict
from parity_tests.judged import comparison, judged


@pytest.mark.parametrize("name", standard.CASES)
def test_errors_grow_as_the_reference_s(name):
    """An error that no tap shows alone but that adds up: a residual stream kept or rounded otherwise."""
    for row in comparison(name).rows:
        if row["value_kind"] == "float":
            assert row["rho_e2e"] <= row["band_e2e"][1], row["tap"]
    assert comparison(name).verdict == verdict.OK


def test_last_hidden_states_err_by_a_few_units():
    """A metric that measures nothing: bfloat16 hidden states after two layers are off by parts of a unit, and by some; the
    last norm alone rounds once, 0.42 u."""
    row = judged("builtin")["hidden"]
    assert 0.1 < row["ulp_p50"] < 1.5 and 1 < row["ulp_max"] < 40
    assert row["rel_rmse_u"] == pytest.approx(0.42, abs=0.03)


def test_taps_do_not_change_the_program():
    """An observer that changes what it observes: the comparison runs the step without taps too and holds its bits."""
    assert comparison("mixed").verdict != verdict.PERTURBED


def test_a_program_that_taps_change_is_told(monkeypatch):
    """The observer check never failing: here the step without taps drafts something else."""
    from parity_tests.harness import case as cases
    from parity_tests.harness import runners

    right = runners.runner

    def wrong(name, device="cpu"):
        run = right(name, device)

        def changed(case, dtype, forced=None, level=2, rerun=True):
            trace = run(case, dtype, forced, level, rerun)
            return trace if level else trace | {"draft_tokens": trace["draft_tokens"] + 1}

        return changed

    monkeypatch.setattr(runners, "runner", wrong)
    result = verdict.compare(cases.mixed(), "torch.eager", "torch.sdpa")
    assert (result.verdict, result.first_divergence, result.side) == (verdict.PERTURBED, "draft_tokens", "torch.sdpa")


@pytest.mark.parametrize(
    "change, bitwise, verdict_is, notes",
    [
        ("last bit", True, verdict.PERTURBED, 0),
        ("last bit", False, verdict.OK, 1),
        ("wrong row", False, verdict.PERTURBED, 0),
    ],
)
def test_taps_may_turn_a_rounding_on_a_gpu_and_no_more(change, bitwise, verdict_is, notes):
    """An observer check that a GPU's fusions always fail, or that lets a wrong pool or a decided draft through."""
    from parity_tests.harness import case as cases
    from parity_tests.harness import null

    case = cases.mixed()
    reference = null.Reference(case, "torch.eager", "bfloat16")
    free, untapped = reference.trace, dict(reference.trace)
    pool = untapped["pool"] = free["pool"].copy()
    written = np.argwhere(reference.exact["pool"] != case.pool)[0]  # an element that the step stores
    at = tuple(written)
    pool[at] = pool[at] * (1 + 2**-8) if change == "last bit" else pool[at] + 100
    result = verdict.Result(case, "torch.eager", "jax", "bfloat16", [])
    verdict._observed(result, reference, free, untapped, bitwise=bitwise)
    assert (result.verdict, len(result.notes)) == (verdict_is, notes)
    decided = np.argwhere(verdict._decided(reference))[0]
    untapped["pool"] = free["pool"]
    untapped["draft_tokens"] = free["draft_tokens"].copy()
    untapped["draft_tokens"][tuple(decided)] += 1
    result = verdict.Result(case, "torch.eager", "jax", "bfloat16", [])
    verdict._observed(result, reference, free, untapped, bitwise=False)
    assert (result.verdict, result.first_divergence) == (verdict.PERTURBED, "draft_tokens")


def test_a_run_that_differs_from_itself_is_told(monkeypatch):
    """Noise called a divergence: two runs of one side differ."""
    from parity_tests.harness import case as cases
    from parity_tests.harness.mutations import Modules

    m, calls = Modules.of("torch"), []
    right = m.drafter.compute_logits

    def noisy(*args):
        calls.append(0)
        return right(*args) * (1 + 2.0**-20 * len(calls))

    monkeypatch.setattr(m.drafter, "compute_logits", noisy)
    result = verdict.compare(cases.mixed(), "torch.eager", "torch.eager")
    assert (result.verdict, result.first_divergence) == (verdict.NOT_DETERMINISTIC, "logits")
