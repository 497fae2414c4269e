"""Tier 4: drafts are equal wherever the reference's own error could not have turned them."""

import numpy as np
import pytest

from parity_tests.harness import case as cases
from parity_tests.harness import metrics, runners, standard, verdict
from parity_tests.judged import comparison


@pytest.mark.parametrize("name", standard.CASES)
def test_decided_drafts_are_equal(name):
    """A draft that differs though its margin is many times the noise."""
    tokens = comparison(name).tokens
    assert tokens["decided_unequal"] == 0 and tokens["compared"] > 0
    if name == "ties":  # nothing is decided there but by the rule, which both follow
        assert tokens["undecidable"] == tokens["equal"] == tokens["compared"]
    else:
        assert tokens["undecidable"] <= 0.1 * tokens["compared"] + 1


def test_decided_is_a_matter_of_the_margin():
    """Margins measured from the wrong logit, or sigma over the wrong rows."""
    exact = np.array([[4.0, 1.0, 3.9], [4.0, 1.0, 2.0]])
    reference = exact + np.array([[0.1, -0.1, 0.1], [0.1, -0.1, 0.1]])
    assert metrics.decided(exact, reference, 5).tolist() == [False, True]
    assert metrics.decided(exact, reference, 0.5).tolist() == [True, True]


def test_a_decided_draft_that_differs_fails(monkeypatch):
    """Token equality that is counted and not judged: the second best token of every row."""
    from parity_tests.harness.mutations import Modules

    m = Modules.of("torch")
    monkeypatch.setattr(m.sampling, "greedy", lambda logits: logits.topk(2, -1).indices[..., 1].int())
    result = verdict.compare(cases.mixed(), "jax", "torch.eager")
    assert (result.verdict, result.first_divergence) == (verdict.WRONG, "draft_tokens")
    assert result.attribution.hypothesis == "argmax: ties go to the lowest id"


def test_bfloat16_turns_only_undecided_drafts():
    """Margins that decide nothing: over many made-up steps bfloat16 does turn drafts, and none of the decided."""
    turned = decided_turned = undecided = total = 0
    for seed in range(12):
        case = cases.mixed(seed)
        exact, low = runners.oracle(case), runners.runner("torch.eager")(case, "bfloat16", rerun=False)
        n = case.live_reqs
        sure = metrics.decided(exact["logits"][:n], low["logits"][:n], verdict.SIGMAS)
        differs = exact["draft_tokens"][:n] != low["draft_tokens"][:n]
        turned += int(differs.sum())
        decided_turned += int((differs & sure).sum())
        undecided += int((~sure).sum())
        total += differs.size
    assert total == 12 * 16 and turned > 0 and decided_turned == 0
    assert turned < undecided < 0.3 * total
