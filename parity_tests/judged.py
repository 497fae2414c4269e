"""Standard cases judged once per process: PyTorch eager against the JAX program."""

from functools import cache

from parity_tests.harness import standard, verdict


@cache
def comparison(name: str) -> verdict.Result:
    return verdict.compare(standard.CASES[name]())


def judged(name: str) -> dict[str, dict]:
    """The rows of a comparison by tap."""
    return {row["tap"]: row for row in comparison(name).rows}
