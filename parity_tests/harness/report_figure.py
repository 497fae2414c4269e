"""The report's picture: tap by tap, downwards in topological order, then where and how large the first failure is."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from parity_tests.harness import report
from parity_tests.harness.report import Comparison, Row

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}  # u by dtype
FP64_LIMIT = 1e-11  # of the semantics tier: legitimate variants stay under 1e-13, the weakest planted bug is at 1e-5
# Okabe and Ito's palette, told apart with any colour vision. What fails has a shape and a bold name besides.
OK, REFERENCE, BAND = "#0072B2", "#777777", "#9ecae9"
COLOURS = {
    "wrong maths": "#D55E00",
    "rounding policy differs": "#E69F00",
    "not deterministic": "#CC79A7",
    "taps perturb": "#009E73",
}


def save(found: list[Comparison], path: str | Path) -> None:
    # Names come from outside: a $ in them is no formula.
    with matplotlib.rc_context({"text.parse_math": False, "font.family": "sans-serif", "font.size": 9}):
        draw(found).savefig(path, dpi=120)


def draw(found: list[Comparison]) -> Figure:
    """The first comparison that is not ok, else the first one. A panel whose data is absent is left out."""
    c = next((c for c in found if report.verdict(c) != "ok"), found[0])
    (name, first), (taps, integers) = report.first_divergence(c), report.shown(c)
    panels = [(key, panel) for key, panel in PANELS.items() if c.summary.get(key)]
    heights = [1.1 + 0.19 * max(len(taps), 8), 3.3][: 2 if panels else 1]
    fig = Figure(figsize=(12, 1 + sum(heights)), layout="constrained")
    others = f" (one of {len(found)} comparisons)" if len(found) > 1 else ""
    title = f"{c.label}: {report.verdict(c)}{f' at {name}' if name else ''}{others}"
    fig.suptitle(title, fontsize=12 if len(title) < 110 else 9, fontweight="bold")
    fig.supxlabel(" | ".join(s for s in (report.provenance(c), integers) if s), fontsize=8, color="#444444")
    parts = fig.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_taps(parts[0], taps, first)
    if panels:
        for ax, (key, panel) in zip(parts[1].subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(ax, c.summary[key], c)
            ax.set_title(ax.get_title(), fontsize=10)
    return fig


def _draw_taps(fig: SubFigure, taps: list[Row], first: Row) -> None:
    titles = {
        "rho_local": "local rho (error / reference's error)",
        "rho_e2e": "end-to-end rho",
        "roundings": "roundings, estimated",
        "fp64": "relative RMSE in float64",
    }
    keys = [k for k in titles if k == "rho_local" or any(report.number(t.get(k)) is not None for t in taps)]
    axes = fig.subplots(1, len(keys), sharey=True, squeeze=False, width_ratios=[3, 3, 2, 2][: len(keys)])[0]
    legend: dict[str, Any] = {}
    for ax, key in zip(axes, keys, strict=True):
        low, high = _limits(key, taps)
        ax.set(xscale="log", xlim=(low, high))
        ax.set_title(titles[key], fontsize=10)
        _log_ticks(ax.xaxis, low, high)
        if key != "roundings":
            line = FP64_LIMIT if key == "fp64" else 1
            dashes = ax.axvline(line, color="#555555", lw=0.9, ls=":" if key == "fp64" else "--", zorder=1)
            legend.setdefault(f"{'float64 limit' if key == 'fp64' else 'rho'} {line:g}", dashes)
        for y, t in enumerate(taps):
            _draw_tap(ax, key, y, t, legend)
        ax.grid(axis="x", color="#dddddd", lw=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(axis="y", length=0, pad=8)
        ax.spines[["top", "right", "left"]].set_visible(False)
    mark = "\N{BLACK RIGHT-POINTING TRIANGLE} "
    names = [mark * (t is first) + report.short(t.get("tap"), 40) for t in taps]
    axes[0].set_yticks(range(len(taps)), names, fontsize=8)
    axes[0].set_ylim(len(taps) - 0.4, -0.6)
    for label, t in zip(axes[0].get_yticklabels(), taps, strict=True):
        label.set_fontweight("bold" if report.fails(t) else "normal")
    fig.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=8, frameon=False, fontsize=8)


def _draw_tap(ax: Axes, key: str, y: int, t: Row, legend: dict[str, Any]) -> None:
    """One dot, on its band or beside its contract. Zero and infinity are arrows at the edge."""
    failed, said, (low, high) = report.fails(t), report.plain(t.get("verdict")), ax.get_xlim()
    colour = COLOURS.get(said, "#000000") if failed else OK
    if failed:
        ax.axhspan(y - 0.5, y + 0.5, color=colour, alpha=0.14, lw=0)
    band = report.band_of(t, key.removeprefix("rho_"))
    if band:
        legend.setdefault("null band", ax.barh(y, band[1] - band[0], left=band[0], height=0.6, color=BAND, lw=0))
    if key == "roundings" and report.number(t.get("contract")):
        tick = ax.plot(t["contract"], y, "|", color="#222222", ms=10, mew=1.5)
        legend.setdefault("roundings in the contract", tick[0])
    x = report.number(t.get(key))
    if x is None:
        if failed and key == "rho_local":  # unequal integers
            ax.text(0.5, y, said, transform=ax.get_yaxis_transform(), ha="center", va="center", fontsize=8)
        return
    outside = bool(band) and not failed and not band[0] <= x <= band[1]
    marker = "<" if x < low else ">" if x > high else "X" if failed else "o"
    face, edge, width = ("white", colour, 1.3) if outside else (colour, "white", 0.5)
    dot = ax.plot(
        min(max(x, low), high), y, marker, ms=7 if failed else 6, mfc=face, mec=edge, mew=width, clip_on=False
    )
    legend.setdefault(f"{said}, outside the band" if outside else said, dot[0])


def _limits(key: str, taps: list[Row]) -> tuple[float, float]:
    names = ("rho_local", "rho_e2e") if key.startswith("rho") else (key, "contract") if key == "roundings" else (key,)
    seen = [t.get(name) for t in taps for name in names]
    seen += [
        edge for t in taps for w in ("local", "e2e") for edge in report.band_of(t, w) or [] if "rho_local" in names
    ]
    floor = 0.02 if key == "roundings" else 0  # an arrow says "none": how far below one rounding is no news
    seen = [x for x in map(report.number, seen) if x and floor < x < math.inf]
    low, high = {"fp64": (1e-16, FP64_LIMIT), "roundings": (1, 8)}.get(key, (0.5, 2))
    margin = 10 if key == "fp64" else 1.25
    return min([low, *seen]) / margin, max([high, *seen]) * margin


def _log_ticks(axis: Axis, low: float, high: float, numticks: int = 5) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=numticks))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.set_minor_locator(NullLocator())


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype="float64")  # None becomes nan


def _draw_error_map(ax: Axes, m: Row, c: Comparison) -> None:
    values = _floats(m["values"])
    values[~np.isfinite(values)] = np.nan
    limits = (np.nanmin(values), np.nanmax(values)) if np.isfinite(values).any() else (0, 1)
    image = ax.imshow(values, aspect="auto", cmap="cividis", interpolation="nearest", vmin=limits[0], vmax=limits[1])
    ax.set_facecolor("#d9a0a0")  # shows through where no value is finite
    rows, columns = report.plain(m.get("rows")), report.plain(m.get("columns"))
    ax.set(title=f"error at {report.short(m.get('tap'), 40)}, {rows} x {columns}", xlabel=columns, ylabel=rows)
    not_finite = " (red: not finite)" if np.isnan(values).any() else ""
    ax.figure.colorbar(image, ax=ax, label=report.plain(m.get("unit") or "RMS error") + not_finite)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))


def _draw_histograms(ax: Axes, h: Row, c: Comparison) -> None:
    """Equal widths whatever the bins, so that 0 to 1 ULP is as easy to see as 64 to infinity."""
    edges = _floats(h["edges"])
    for side, colour, fill in (("ref", REFERENCE, True), ("sut", OK, False)):
        share = 100 * _floats(h[side]) / max(sum(h[side]), 1)
        label = report.plain(c.summary.get(side))
        ax.stairs(share, range(len(edges)), color=colour, fill=fill, alpha=0.5 if fill else 1, lw=2, label=label)
    every = -(-len(edges) // 9)
    ax.set_xticks(range(0, len(edges), every), [f"{x:g}" for x in edges[::every]])
    ax.set(title=f"error in ULP at {report.short(h.get('tap'), 40)}", yscale="log")
    ax.set(xlabel="error (ULP), edges of the bins", ylabel="elements (%)")
    _log_ticks(ax.yaxis, *ax.get_ylim(), numticks=8)
    ax.legend(frameon=False, fontsize=8)


def _draw_magnitude(ax: Axes, m: Row, c: Comparison) -> None:
    """Errors of zero have no place on a log axis: the legend counts them."""
    x = _floats(m["abs_value"])
    for side, colour, marker, size in (("ref", REFERENCE, "o", 5), ("sut", OK, "x", 3.5)):
        y = _floats(m[f"abs_error_{side}"])
        on_axis = (x > 0) & (y > 0) & np.isfinite(x) & np.isfinite(y)
        label = f"{report.plain(c.summary.get(side))} ({100 * np.mean(y == 0):.0f}% exact)"
        ax.plot(x[on_axis], y[on_axis], marker, color=colour, mfc="none", ms=size, mew=0.8, label=label)
    ax.set(title=f"error by magnitude at {report.short(m.get('tap'), 40)}", xscale="log", yscale="log")
    ax.set(xlabel="|value|", ylabel="|error|")
    x = x[(x > 0) & np.isfinite(x)]
    if len(x) and c.summary.get("dtype") in UNIT:
        low, high = np.floor(np.log2(x.min())), np.ceil(np.log2(x.max()))
        powers = 2.0 ** np.arange(low, max(high, low + 1) + 1)
        ulp = powers * 2 * UNIT[c.summary["dtype"]]
        ulp[-1] /= 2  # the last step ends where the next would begin
        for k in m.get("ulp_guides") or (0.5, 1, 4):
            ax.step(powers, k * ulp, where="post", color="#222222", lw=0.7, ls=":")
            ax.annotate(f" {k:g} ULP", (powers[-1], k * ulp[-1]), fontsize=7, va="center")
        ax.set_xlim(right=powers[-1] * (powers[-1] / powers[0]) ** 0.2)  # room for the guides' names
    _log_ticks(ax.xaxis, *ax.get_xlim())
    _log_ticks(ax.yaxis, *ax.get_ylim(), numticks=8)
    ax.legend(frameon=False, fontsize=8, loc="upper left")


PANELS = {"error_map": _draw_error_map, "histograms": _draw_histograms, "magnitude": _draw_magnitude}
