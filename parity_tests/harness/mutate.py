"""The mutation score: plant each bug, judge, and see whether it is found where it is; and controls in which nothing is."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from parity_tests.harness import mutations, null, runners, standard, verdict
from parity_tests.harness.mutations import MUTATIONS, Modules, reordered_attention
from parity_tests.harness.verdict import Result

OTHER = {"jax": "torch.eager", "torch": "jax"}  # the reference of a framework with a bug in it is the one without
CONTROL_SEEDS = range(100, 116)  # symmetries that the bands were not made of


@dataclass(frozen=True)
class Finding:
    """One planted bug, or a control (`expected` is None), and what the harness said."""

    name: str
    bug: str
    framework: str
    expected: tuple[str, str] | None
    verdict: str
    tap: str | None
    tier: str
    lines: list[str]

    @property
    def caught(self) -> bool:
        return self.verdict != verdict.OK

    @property
    def at_right_tap(self) -> bool:
        return self.expected == (self.verdict, self.tap)


def steps(frameworks: Sequence[str], only: Sequence[str] | None = None) -> int:
    """How often `mutate` calls `advance`."""
    return len(frameworks) * (len(only or MUTATIONS) + 2)


def mutate(frameworks: Sequence[str], only: Sequence[str] | None, advance: Callable[[str], None]) -> list[Finding]:
    """Every bug in every framework, then the controls."""
    case, found = standard.mixed(), []
    for framework in frameworks:
        sut = {"jax": "jax", "torch": "torch.eager"}[framework]
        references = {
            name: null.Reference(make(), OTHER[framework], "bfloat16") for name, make in standard.CASES.items()
        }
        reference = references["mixed"]
        for name in only or MUTATIONS:
            m = MUTATIONS[name]
            advance(f"{framework}: {name}")
            with planted_everywhere(name, framework):
                known = references[m.case]
                result = verdict.compare(known.case, OTHER[framework], sut, stop_early=True, reference=known)
            found.append(_finding(name, m.bug, framework, (m.verdict, m.tap), result))
        advance(f"{framework}: control, attention in one go")
        with mutations.patched(reordered_attention(Modules.of(framework))):
            result = verdict.compare(case, OTHER[framework], sut, reference=reference)
        found.append(_finding("reordered-attention", "none: attention in one go", framework, None, result))
        advance(f"{framework}: control, exact symmetries")
        found += _symmetries(case, framework, sut)
    return found


@contextmanager
def planted_everywhere(name: str, framework: str):
    """The bug in this process and, for JAX, in the float64 one, which is told to plant it too."""
    worker = runners.float64_worker() if framework == "jax" else None
    with mutations.planted(name, framework):
        if worker:
            worker.plant = name
        try:
            yield
        finally:
            if worker:
                worker.plant = None


def _finding(name: str, bug: str, framework: str, expected, result: Result) -> Finding:
    row = next((r for r in result.rows if r["tap"] == result.first_divergence), {})
    tier = "-" if result.ok else "1" if row.get("verdict") == verdict.WRONG and "rho_local" not in row else "2"
    lines = result.attribution.lines if result.attribution else []
    return Finding(name, bug, framework, expected, result.verdict, result.first_divergence, tier, lines)


def _symmetries(case, framework: str, sut: str) -> list[Finding]:
    """The implementation under symmetries of its own, judged by bands of others: each must pass at every tap."""
    reference, found = null.Reference(case, sut, "bfloat16"), []
    for seed in CONTROL_SEEDS:
        local, _ = null.Symmetry(case, seed).runs(case, reference.run, "bfloat16", reference.forced)
        ratios = {tap.name: reference.ratio(tap, local, reference.local_exact) for tap in reference.floats}
        outside = [name for name, rho in ratios.items() if not reference.bands[name][0].holds(rho)]
        said, first = (verdict.ROUNDING, outside[0]) if outside else (verdict.OK, None)
        found.append(Finding(f"symmetry-{seed}", "none: an exact symmetry", framework, None, said, first, "2", []))
    return found


def document(found: list[Finding]) -> dict[str, Any]:
    """The job's JSON line."""
    bugs, controls = [f for f in found if f.expected], [f for f in found if not f.expected]
    counts = {
        "planted": len(bugs), "caught": sum(f.caught for f in bugs), "at_right_tap": sum(f.at_right_tap for f in bugs),
        "controls": len(controls), "false_positives": sum(f.caught for f in controls),
    }  # fmt: skip
    ok = counts["planted"] == counts["caught"] == counts["at_right_tap"] and not counts["false_positives"]
    missed = [
        f"{f.framework}: {f.name}"
        for f in found
        if (f.expected and not f.at_right_tap) or (not f.expected and f.caught)
    ]
    return {"job": "mutate", "ok": ok, **counts, "missed": missed}


def table(found: list[Finding]) -> Table:
    """Bug, tier, tap, verdict, a line each; both frameworks on one line where they agree."""
    view = Table("bug", "in", "tier", "tap", "verdict", "where", box=None, pad_edge=False)
    merged: dict[tuple, list[str]] = {}
    for f in found:
        if f.expected or f.caught or not f.name.startswith("symmetry"):
            where = f.lines[0] if f.lines else ""
            merged.setdefault(
                (f.bug, f.tier, f.tap or "-", f.verdict, where, f.at_right_tap or not f.expected), []
            ).append(f.framework)
    for (bug, tier, tap, said, where, right), frameworks in merged.items():
        view.add_row(bug, ", ".join(frameworks), tier, tap, said, where, style=None if right else "bold red")
    return view
