"""The report's page. report.html is its skeleton, style and script; every string from the rows is escaped here."""

import base64
import hashlib
import math
import re
from html import escape
from pathlib import Path

from parity_tests.harness.report import (
    SHORT,
    Comparison,
    Row,
    band_of,
    cells_of,
    first_divergence,
    fixed,
    headline,
    number,
    plain,
    provenance,
    sentence,
    tiers,
    verdict,
    worst,
)

CIVIDIS = ((0, 34, 78), (42, 63, 109), (87, 93, 109), (125, 124, 120), (165, 156, 116), (210, 192, 96), (254, 232, 56))
MAX_CELLS = 64  # rows or columns of a heat map on the page


def page(found: list[Comparison]) -> str:
    """Its content policy lets only the page's own script run and allows no network."""
    skeleton = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    script = skeleton.split("<script>")[1].split("</script>")[0]
    taps = [(i, c, t) for i, c in enumerate(found) for t in c.taps]
    said = sorted({plain(t.get("verdict")) for _, _, t in taps})
    limits = _limits([t for _, _, t in taps])
    values = {
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "headline": escape(headline(found)),
        "cards": "".join(_card(i, c) for i, c in enumerate(found) if verdict(c) != "ok"),
        "ok": "".join(
            f"<li>{_title(c)}, {escape(worst(c))} <small>{escape(provenance(c))}</small>"
            for c in found
            if verdict(c) == "ok"
        ),
        "table": "one" if len(found) == 1 else "several",
        "verdicts": "".join(f"<option>{escape(v)}" for v in said),
        "cases": "".join(f'<option value="{i}">{escape(c.label)}' for i, c in enumerate(found)),
        "rows": "".join(_tr(n, i, c, t, limits) for n, (i, c, t) in enumerate(taps)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda m: values[m[1]], skeleton)  # one pass: a value is never a template


def _badge(said: str) -> str:
    return f'<b class="badge {SHORT.get(said, "ok" if said == "ok" else "other")}">{escape(said)}</b>'


def _title(c: Comparison) -> str:
    return f"{_badge(verdict(c))} {escape(c.label)}"


def _card(i: int, c: Comparison) -> str:
    """What is known of a comparison that is not ok."""
    name, tap = first_divergence(c)
    link = f'<a href="#c{i}-first">{escape(name)}</a>' if name and tap else escape(name or "none of the taps")
    lines = [f"<li>{escape(plain(line))}" for line in c.summary.get("attribution") or []]
    if c.summary.get("hypothesis"):
        lines.append(f"<li><b>hypothesis</b> {escape(plain(c.summary['hypothesis']))}")
    lines += [f"<li><b>note</b> {escape(plain(note))}" for note in c.summary.get("notes") or []]
    replay = c.summary.get("replay")
    copy = f'<p class="replay"><code>{escape(plain(replay))}</code> <button type="button" class="copy">copy</button>'
    notes = "<br>".join(escape(line) for line in (tiers(c) and f"tiers: {tiers(c)}", provenance(c)) if line)
    return (
        f"<article><div><h2>first divergence: {link}</h2><p>{_title(c)}<p>{escape(sentence(tap))}<ul>{''.join(lines)}</ul>"
        f"{copy if replay else ''}<p><small>{notes}</small></div>"
        f"{_heat_map(c.summary['error_map']) if c.summary.get('error_map') else ''}</article>"
    )


def _tr(n: int, i: int, c: Comparison, t: Row, limits: tuple[float, float]) -> str:
    cells, first = cells_of(t), first_divergence(c)[1] is t
    case, sut, ref, dtype = (plain(t.get(k)) for k in ("case", "sut", "ref", "dtype"))
    order = {
        "shape": math.prod(t.get("shape") or [0]),
        "RMSE/u": t.get("rel_rmse_u"),
        "roundings": t.get("roundings"),
        "rho local": t.get("rho_local"),
        "rho e2e": t.get("rho_e2e"),
        "fp64": t.get("fp64"),
        "ULP p99/max": t.get("ulp_max"),
    }
    out = [f'<td data-sort="{n}">{n + 1}', f"<td>{escape(case)}<br><small>{escape(f'{sut} / {ref}, {dtype}')}</small>"]
    for name, value in cells.items():
        body = _badge(value) if name == "verdict" else escape(value)
        if name in ("rho local", "rho e2e"):
            body += _bar(t, name.split()[1], limits)
        elif name == "ULP p99/max":
            body = body.replace(" @", "<br><small>@") + "</small>" * (" @" in body)
        if name == "tap":
            out.append(f'<th scope="row">{body}{" <b>first divergence</b>" if first else ""}')
        else:
            key = number(order.get(name))
            sort = "" if name not in order else f' data-sort="{"" if key is None else key}"'.replace("inf", "Infinity")
            out.append(f"<td{sort}>{body}")
    mark = f' id="c{i}-first" class="first"' if first else ""
    return f'<tr{mark} data-case="{i}" data-verdict="{escape(plain(t.get("verdict")))}">{"".join(out)}\n'


def _limits(taps: list[Row]) -> tuple[float, float]:
    """Of the scale that all bars share."""
    x = [number(t.get(f"rho_{w}")) for t in taps for w in ("local", "e2e")]
    x += [edge for t in taps for w in ("local", "e2e") for edge in band_of(t, w) or []]
    x = [v for v in x if v and 0 < v < math.inf]
    return min([0.5, *x]) / 1.1, max([2, *x]) * 1.1


def _bar(tap: Row, which: str, limits: tuple[float, float]) -> str:
    """rho from 1, over its null band, on a log scale."""
    rho, band = number(tap.get(f"rho_{which}")), band_of(tap, which)
    if rho is None:
        return ""

    def rect(kind: str, a: float, b: float, y: int, height: int) -> str:
        a, b = (
            100 * math.log(min(max(x, limits[0]), limits[1]) / limits[0]) / math.log(limits[1] / limits[0])
            for x in sorted((a, b))
        )
        return f'<rect class="{kind}" x="{a:.2f}" y="{y}" width="{max(b - a, 0.8):.2f}" height="{height}"/>'

    out = "outside" if band and not band[0] <= rho <= band[1] else "inside"
    shapes = (
        (rect("band", band[0], band[1], 0, 10) if band else "") + rect(out, 1, rho, 3, 4) + rect(out, rho, rho, 0, 10)
    )
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>'


def _heat_map(m: Row) -> str:
    """Inline SVG. A map past MAX_CELLS rows or columns is shown by the largest of each group of cells."""
    values = [[number(x) for x in row] for row in m["values"]]
    num_rows, num_columns = len(values), max(map(len, values), default=0)
    known = [(x, r, k) for r, row in enumerate(values) for k, x in enumerate(row) if x is not None and math.isfinite(x)]
    num_blank = num_rows * num_columns - len(known)
    blank = f" Blank: {num_blank} without a finite value." if num_blank else ""
    if not known:
        return "<figure><figcaption>The error map has no finite value.</figcaption></figure>"
    low, (high, at_row, at_column) = min(known)[0], max(known)
    down, right = -(-num_rows // MAX_CELLS), -(-num_columns // MAX_CELLS)
    groups: dict[tuple[int, int], float] = {}
    for x, r, k in known:
        groups[r // down, k // right] = max(x, groups.get((r // down, k // right), x))
    height, width = -(-num_rows // down), -(-num_columns // right)
    h, w = max(5, min(26, 330 // height)), max(5, min(52, 330 // width))  # pixels of a cell
    names = escape(plain(m.get("rows"))), escape(plain(m.get("columns")))

    def colour(x: float) -> str:
        where = (len(CIVIDIS) - 1) * ((x - low) / (high - low) if high > low else 0)
        i = min(int(where), len(CIVIDIS) - 2)
        return "#" + "".join(
            f"{round(a + (b - a) * (where - i)):02x}" for a, b in zip(*CIVIDIS[i : i + 2], strict=True)
        )

    cells = [
        f'<rect x="{40 + k * w}" y="{20 + r * h}" width="{w}" height="{h}" fill="{colour(x)}">'
        f"<title>{names[0]} {r * down}, {names[1]} {k * right}: {fixed(x)}</title></rect>"
        for (r, k), x in groups.items()
    ]
    ticks = [
        f'<text x="36" y="{20 + (r + 0.5) * h}" class="end">{r * down}</text>'
        for r in range(0, height, -(-height // 8))
    ]
    ticks += [
        f'<text x="{40 + (k + 0.5) * w}" y="12" class="mid">{k * right}</text>' for k in range(0, width, -(-width // 8))
    ]
    what = escape(plain(m.get("unit") or "RMS error"))
    caption = (
        f"{what} at {escape(plain(m.get('tap')))}, {names[0]} (down) by {names[1]} (across): {fixed(low)} (dark) "
        f"to {fixed(high)} (bright), which is at {names[0]} {at_row}, {names[1]} {at_column}."
        + (f" One cell is the largest of {down} x {right}." if down * right > 1 else "")
        + blank
    )
    box = f"0 0 {44 + width * w} {24 + height * h}"
    return (
        f'<figure><svg class="heat" role="img" aria-label="{caption}" viewBox="{box}" width="{44 + width * w}">'
        f"{''.join(ticks)}{''.join(cells)}</svg><figcaption>{caption}</figcaption></figure>"
    )
