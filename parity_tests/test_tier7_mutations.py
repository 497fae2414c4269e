"""Tier 7: the harness finds bugs that are known to be there, and none where there is none."""

import pytest

from parity_tests.harness import case as cases
from parity_tests.harness import mutate, mutations, verdict

# One of each kind in JAX, where each is a compilation; all of them in PyTorch. `make mutate` plants all in both.
IN_JAX = ["gqa-tile", "slot-wraps", "scores-rounded"]


@pytest.fixture(scope="module")
def torch_findings():
    return mutate.mutate(["torch"], None, lambda what: None)


def test_every_bug_is_caught_at_its_tap(torch_findings):
    """A bug that the harness lets through, or blames on something else."""
    bugs = [f for f in torch_findings if f.expected]
    assert len(bugs) == len(mutations.MUTATIONS) >= 24
    assert [f"{f.name}: {f.verdict} at {f.tap}" for f in bugs if not f.at_right_tap] == []


def test_nothing_is_found_where_there_is_nothing(torch_findings):
    """Tolerances so tight that other orders of the same sums fail: 16 symmetries and attention in one go."""
    controls = [f for f in torch_findings if not f.expected]
    assert len(controls) == 17
    assert [f.name for f in controls if f.caught] == []


def test_bugs_in_jax_are_caught():
    """A float64 process that runs the package without the bug."""
    found = [f for f in mutate.mutate(["jax"], IN_JAX, lambda what: None) if f.expected]
    assert [(f.name, f.at_right_tap) for f in found] == [(name, True) for name in IN_JAX]


def test_the_harness_is_not_told(monkeypatch):
    """A verdict that looks up what was planted: with the table's answers exchanged the findings stay the same."""
    with mutations.planted("gate-up-swapped", "torch"):
        monkeypatch.setattr(mutations, "MUTATIONS", {})
        result = verdict.compare(cases.mixed(), "jax", "torch.eager", stop_early=True)
    assert (result.verdict, result.first_divergence) == (verdict.WRONG, "layers.0.act")


def test_attribution_says_where():
    """An attribution that is always the same: GQA by tiling leaves the first and last head right, a causal block the last
    row, layer 0's norm layer 0."""
    lines = {}
    for name in ("gqa-tile", "causal-block", "k-norm-of-layer-0"):
        with mutations.planted(name, "torch"):
            lines[name] = verdict.compare(cases.mixed(), "jax", "torch.eager", stop_early=True).attribution
    assert lines["gqa-tile"].lines == ["all but 2 of 6 err: none in query head 0, 5"]
    assert lines["causal-block"].lines == ["all but 1 of 5 err: none in row of the block 4"]
    assert lines["k-norm-of-layer-0"].lines == ["100% of the squared error in 1 of 2: layer 1"]
    assert lines["gqa-tile"].hypothesis.startswith("GQA") and lines["causal-block"].hypothesis.startswith("a mask")


def test_an_unknown_bug_is_named():
    """A misspelt name that plants nothing and passes."""
    with (
        pytest.raises(ValueError, match="no bug 'gqa' to plant; did you mean gqa-tile"),
        mutations.planted("gqa", "jax"),
    ):
        pass
