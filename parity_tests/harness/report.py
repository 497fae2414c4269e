"""Reports on a results file: terminal table, one PNG, Markdown for pull requests, one self-contained HTML page.

Rows are dicts as `load` reads them: kind "tap" (one tap of one comparison, in topological order) or kind "summary" (one
comparison). A comparison is a case, a reference, a system under test and a dtype. Any field may be missing or null.
u is the unit roundoff of the dtype, rho the error of the system under test over the reference's own error.
"""

import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
SHORT = {
    "wrong maths": "maths",
    "rounding policy differs": "rounding",
    "not deterministic": "nondet",
    "taps perturb": "perturb",
}
# What a narrow terminal loses, in this order. The tap, its local rho with the band and the verdict always stay.
LEAVE_OUT = (
    "ULP index",
    "verdict in words",
    "shape",
    "e2e band",
    "RMSE/u",
    "ULP p99/max",
    "roundings",
    "rho e2e",
    "fp64",
)


class Comparison(NamedTuple):
    """The rows of one comparison. `label` names it, `summary` is {} if the file has none."""

    label: str
    summary: Row
    taps: list[Row]


def load(path: str | Path) -> list[Row]:
    """Read a results JSONL. A line that is no row, or a file without rows, is a ValueError that names file and line."""
    rows = []
    for i, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except ValueError as e:
            raise ValueError(f"{path}:{i}: not JSON in UTF-8 ({plain(e)})") from None
        if not isinstance(row, dict) or row.get("kind") not in ("tap", "summary"):
            raise ValueError(f'{path}:{i}: expected an object with "kind": "tap" or "summary", got {plain(row)[:60]}')
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: no rows, so there is nothing to report; was the run stopped?")
    return rows


def comparisons(rows: list[Row]) -> list[Comparison]:
    """Rows by comparison, in file order. A tap or a summary that comes again begins another run of the same."""
    runs: dict[tuple, list[Comparison]] = {}
    found = []
    for row in rows:
        case, ref, sut, dtype = key = tuple(plain(row.get(k)) for k in ("case", "ref", "sut", "dtype"))
        same = runs.setdefault(key, [])
        seen = [same[-1].summary, *same[-1].taps] if same else []
        if not same or any(s.get("kind") == row["kind"] and s.get("tap") == row.get("tap") for s in seen):
            run = f" (run {len(same) + 1})" if same else ""
            same.append(Comparison(f"{case}: {sut} against {ref}, {dtype}{run}", {}, []))
            found.append(same[-1])
        if row["kind"] == "summary":
            same[-1].summary.update(row)
        else:
            same[-1].taps.append(row)
    return found


def fails(tap: Row) -> bool:
    return tap.get("verdict") not in ("ok", None)


def verdict(c: Comparison) -> str:
    """The summary's if it is bad news, else the first failing tap's. Silence is "not judged", not "ok"."""
    bad = [v["verdict"] for v in (c.summary, *c.taps) if fails(v)]
    if bad or c.summary.get("ok") is False:
        return plain(bad[0]) if bad else "failed"
    judged = c.summary.get("ok") or (c.taps and all(t.get("verdict") == "ok" for t in c.taps))
    return "ok" if judged else "not judged"


def first_divergence(c: Comparison) -> tuple[str | None, Row]:
    """Name and row ({} if there is none) of the first diverging tap: the summary's, else the first that fails."""
    name = c.summary.get("first_divergence") or next((t.get("tap") for t in c.taps if fails(t)), None)
    if name is None:
        return None, {}
    return plain(name), next((t for t in c.taps if t.get("tap") == name), {})


def headline(found: list[Comparison]) -> str:
    ok = sum(verdict(c) == "ok" for c in found)
    return f"{ok} of {_count(len(found), 'comparison')} ok, {_count(sum(len(c.taps) for c in found), 'tap')}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def provenance(c: Comparison) -> str:
    """Hardware, versions and commit in one line."""
    versions = ", ".join(f"{k} {v}" for k, v in (c.summary.get("versions") or {}).items())
    git = c.summary.get("git")
    return " | ".join(plain(s) for s in (c.summary.get("device"), versions, git and f"git {git}") if s)


def tiers(c: Comparison) -> str:
    return ", ".join(f"{plain(k)} {plain(v)}" for k, v in (c.summary.get("tiers") or {}).items())


def worst(c: Comparison) -> str:
    """The largest local rho of a comparison, with its tap."""
    known = [(rho, t) for t in c.taps if (rho := number(t.get("rho_local"))) is not None]
    rho, tap = max(known, key=lambda k: k[0], default=(None, {}))
    return "" if rho is None else f"largest local rho {fixed(rho)} at {plain(tap.get('tap'))}"


def sentence(tap: Row) -> str:
    """One tap in words: everything that a narrow table leaves out."""
    at = [f"{d}={i}" for d, i in zip(plain(tap.get("dims")).split(), tap.get("ulp_at") or [], strict=False)]
    parts = {
        "shape": _shape(tap),
        "local rho": _rho(tap, "local"),
        "end-to-end rho": _rho(tap, "e2e"),
        "fp64": _tiny(tap.get("fp64")),
        "roundings": _roundings(tap).replace("/", " where the contract has "),
        "ULP max": _ulp(tap.get("ulp_max")) + (f" at {' '.join(at)}" if at else ""),
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if not value.startswith("-"))


def shown(c: Comparison) -> tuple[list[Row], str]:
    """The taps worth a row each, and a line for the integer taps that are equal."""
    ints = [t for t in c.taps if t.get("value_kind") == "int"]
    taps = [t for t in c.taps if t.get("value_kind") != "int" or t.get("verdict") != "ok"]
    num_equal = len(c.taps) - len(taps)
    count = str(num_equal) if num_equal == len(ints) else f"{num_equal} of {len(ints)}"
    return taps, f"{count} integer tap{'s' if len(ints) > 1 else ''} equal" if ints else ""


def plain(value: Any) -> str:
    """A string from outside: one line, nothing that a terminal obeys."""
    return "".join(c if c.isprintable() else "?" for c in ("-" if value is None else str(value)))


def short(name: Any, length: int) -> str:
    """Both ends of a long name: the layer, and what it is of the layer."""
    name = plain(name)
    keep = (length - 2) // 2
    return name if len(name) <= length else f"{name[:keep]}..{name[-keep:]}"


def number(value: Any) -> float | None:
    """What can be put on an axis or in an order: no NaN either."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value == value else None


def band_of(tap: Row, which: str) -> list[float] | None:
    band = tap.get(f"band_{which}") or []
    return band if len(band) == 2 and None not in map(number, band) else None


def fixed(value: Any) -> str:
    """Three figures or so, an exponent only outside 0.01 to 10,000."""
    x = number(value)
    if x is None or x == 0 or math.isinf(x):
        return plain(value)
    return f"{x:.{2 if abs(x) < 10 else 1 if abs(x) < 100 else 0}f}" if 0.01 <= abs(x) < 1e4 else _tiny(x)


def _tiny(value: Any) -> str:
    x = number(value)
    return plain(value) if x is None or x == 0 else f"{x:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _ulp(value: Any) -> str:
    x = number(value)
    return plain(value) if x is None else f"{x:.3g}" if x < 1e3 else _tiny(x)


def _rho(tap: Row, which: str, with_band: bool = True) -> str:
    band = band_of(tap, which) if with_band else None
    return fixed(tap.get(f"rho_{which}")) + (f" [{','.join(map(fixed, band))}]" if band else "")


def _roundings(tap: Row) -> str:
    x = number(tap.get("roundings"))
    return "-" if x is None else (f"{x:.1f}" if x < 100 else fixed(x)) + f"/{plain(tap.get('contract'))}"


def _shape(tap: Row) -> str:
    return "-" if tap.get("shape") is None else "x".join(map(str, tap["shape"])) or "()"


def cells_of(tap: Row, left_out: tuple[str, ...] = ()) -> dict[str, str]:
    """One row of the table, by column, without what `left_out` names of LEAVE_OUT."""
    at, said = tap.get("ulp_at") or [], plain(tap.get("verdict"))
    ulp = "-" if tap.get("ulp_max") is None else f"{_ulp(tap.get('ulp_p99'))}/{_ulp(tap['ulp_max'])}"
    cells = {
        "tap": plain(tap.get("tap")),
        "shape": _shape(tap),
        "RMSE/u": fixed(tap.get("rel_rmse_u")),
        "roundings": _roundings(tap),
        "rho local": _rho(tap, "local"),
        "rho e2e": _rho(tap, "e2e", "e2e band" not in left_out),
        "fp64": _tiny(tap.get("fp64")),
        "ULP p99/max": ulp + (f" @{','.join(map(str, at))}" if at and "ULP index" not in left_out else ""),
        "verdict": SHORT.get(said, said) if "verdict in words" in left_out else said,
    }
    return {k: v for k, v in cells.items() if k not in left_out}


def terminal(rows: list[Row], console: Console) -> None:
    """Print each comparison: a table with the first divergence marked, then what is known of it and the replay line."""
    found = comparisons(rows)
    for c in found:
        said, (name, tap), (taps, integers) = verdict(c), first_divergence(c), shown(c)
        console.print(Text(c.label, "bold"))
        if provenance(c):
            console.print(Text(provenance(c), "dim"))
        if taps:
            _print_table(console, taps, tap)
        for line in (integers, tiers(c) and f"tiers: {tiers(c)}"):
            if line:
                console.print(Text(line, "dim"))
        known = f" at {name}: {sentence(tap)}" if name else f", {worst(c)}" if worst(c) else ""
        style = "bold green" if said == "ok" else "bold red"
        console.print(Text.assemble((said if said == "ok" else said.upper(), style), known))
        for line in c.summary.get("attribution") or []:
            console.print(Text(f"  {plain(line)}"))
        if c.summary.get("hypothesis"):
            console.print(Text(f"hypothesis: {plain(c.summary['hypothesis'])}"))
        for note in c.summary.get("notes") or []:
            console.print(Text(f"note: {plain(note)}"))
        if c.summary.get("replay"):
            console.print(Text(f"replay: {plain(c.summary['replay'])}"), soft_wrap=True)  # to be copied: never folded
        console.print()
    console.print(Text(headline(found), "bold"))


def _print_table(console: Console, taps: list[Row], first: Row) -> None:
    for k in range(len(LEAVE_OUT) + 1):
        cells = [cells_of(t, LEAVE_OUT[:k]) for t in taps]
        widths = {name: max(len(name), *(len(row[name]) for row in cells)) for name in cells[0]}
        if 1 + sum(2 + width for width in widths.values()) <= console.width:
            break
    room = max(console.width - 1 - sum(2 + width for name, width in widths.items() if name != "tap") - 2, 12)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold underline")
    table.add_column("", width=1)
    for name in widths:
        right = name in ("RMSE/u", "roundings", "fp64")
        table.add_column(name, justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    for t, row in zip(taps, cells, strict=True):
        style = "bold red reverse" if t is first else "bold red" if fails(t) else ""
        table.add_row(
            ">" if t is first else "", *map(Text, (row | {"tap": short(row["tap"], room)}).values()), style=style
        )
    console.print(table)
    if k:
        console.print(Text(f"left out at {console.width} columns: {', '.join(LEAVE_OUT[:k])}", "dim"))


def figure(rows: list[Row], path: str | Path) -> None:
    """One PNG of the first comparison that is not ok, else of the first one."""
    from parity_tests.harness.report_figure import save  # here: matplotlib takes longer to import than a table to print

    save(comparisons(rows), path)


def _code(value: Any) -> str:
    return "`" + plain(value).replace("`", "'").replace("|", "\\|") + "`"


def _md(value: Any) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|&~@])", r"\\\1", plain(value))


def markdown(rows: list[Row]) -> str:
    """For a pull request: a table of the comparisons, then what is known of each, its taps folded away."""
    found = comparisons(rows)
    lines = [
        f"### Parity: {headline(found)}",
        "",
        "| comparison | verdict | first divergence | taps |",
        "|---|---|---|--:|",
    ]
    for c in found:
        said, name = _md(verdict(c)), first_divergence(c)[0]
        said = said if said == "ok" else f"**{said}**"
        lines.append(f"| {_md(c.label)} | {said} | {_code(name) if name else _md(worst(c))} | {len(c.taps)} |")
    for c in found:
        (name, tap), (taps, integers) = first_divergence(c), shown(c)
        lines += ["", f"#### {_md(c.label)}", "", _md(provenance(c)), ""]
        if name:
            lines += [f"**{_md(verdict(c))}** at {_code(name)}: {_md(sentence(tap))}", ""]
        lines += [f"- {_md(line)}" for line in c.summary.get("attribution") or []]
        if c.summary.get("hypothesis"):
            lines.append(f"- hypothesis: {_md(c.summary['hypothesis'])}")
        lines += [f"- note: {_md(note)}" for note in c.summary.get("notes") or []]
        if c.summary.get("replay"):
            lines += ["", "```sh", plain(c.summary["replay"]), "```"]
        lines += [
            "",
            f"<details><summary>{_count(len(c.taps), 'tap')}</summary>",
            "",
            f"| {' | '.join(cells_of({}))} |",
        ]
        lines.append("|" + "---|" * len(cells_of({})))
        for t in taps:
            cells = cells_of(t)
            code = _code(cells.pop("tap"))
            lines.append(f"| {f'**{code}**' if t is tap else code} | {' | '.join(map(_md, cells.values()))} |")
        lines += ["", integers, "", "</details>"]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def html(rows: list[Row], path: str | Path) -> None:
    """One page that needs nothing else: first divergences on top, then all taps to search, filter and sort."""
    from parity_tests.harness.report_html import page

    Path(path).write_text(page(comparisons(rows)), encoding="utf-8", newline="\n")
