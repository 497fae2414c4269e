"""Tier 6: after capture nothing compiles."""

from parity_tests.harness import tiers


def test_traffic_compiles_nothing():
    """A shape, weak type or device slice that reaches the compiler at run time; a pool that is copied, not donated."""
    assert tiers.compiles() == []
