"""What is kept of a comparison: rows for the report, the evidence for its pictures, and the case itself when it failed."""

from pathlib import Path
from typing import Any

import numpy as np

from jax_dflash.taps import live_part, tap_table
from parity_tests.harness import case as cases
from parity_tests.harness import metrics
from parity_tests.harness.case import Case
from parity_tests.harness.verdict import Result

HISTOGRAM_EDGES = [0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 8, 16, float("inf")]
ULP_GUIDES = [0.5, 1, 4]
POINTS = 400  # of the error-against-magnitude picture


def rows(result: Result, *, device: str, tiers: dict[str, str], replay: str | None = None) -> list[dict[str, Any]]:
    """One row per tap and a summary, as `report` reads them; plain JSON types throughout."""
    same = {"case": result.case.name, "ref": result.ref, "sut": result.sut, "dtype": result.dtype}
    found = [{"kind": "tap", **same, **row} for row in result.rows]
    attribution = result.attribution
    summary = {
        "kind": "summary", **same, **cases.environment(device), "ok": result.ok, "verdict": result.verdict,
        "first_divergence": result.first_divergence, "side": result.side, "tokens": result.tokens, "tiers": tiers,
        "notes": result.notes,
        "attribution": attribution.lines if attribution else [],
        "hypothesis": attribution.hypothesis if attribution else None,
        "error_map": attribution.error_map if attribution else None,
        "replay": replay,
        **evidence(result),
    }  # fmt: skip
    return [*found, summary]


def evidence(result: Result) -> dict[str, Any]:
    """Errors in ULP of both sides and error against magnitude, at the first diverging tap or the last hidden states."""
    t = result.traces
    floats = {tap.name: tap for tap in tap_table(result.case.num_layers) if tap.kind == "float"}
    name = result.first_divergence if result.first_divergence in floats else "hidden"
    if not {"local", "ref", "local_exact"} <= t.keys() or name not in t["local"]:
        return {"histograms": None, "magnitude": None}
    case, dtype = result.case, result.dtype
    ours, reference, exact = (
        live_part(floats[name], t[k][name], case.live_reqs, case.live_rows) for k in ("local", "ref", "local_exact")
    )
    counts = {}
    for side, x in (("ref", reference), ("sut", ours)):
        errors = metrics.ulp_errors(x, exact, dtype)
        counts[side] = np.histogram(errors, HISTOGRAM_EDGES)[0].tolist()
    pick = np.random.default_rng(0).permutation(exact.size)[:POINTS]
    flat = {k: np.abs(v).reshape(-1)[pick].tolist() for k, v in (("ref", reference - exact), ("sut", ours - exact))}
    return {
        "histograms": {"tap": name, "edges": HISTOGRAM_EDGES, **counts},
        "magnitude": {
            "tap": name, "abs_value": np.abs(exact).reshape(-1)[pick].tolist(), "abs_error_ref": flat["ref"],
            "abs_error_sut": flat["sut"], "ulp_guides": ULP_GUIDES,
        },
    }  # fmt: skip


def keep(result: Result, folder: str | Path, device: str = "cpu") -> Path:
    """Write the case of a failed comparison with what it was judged to be; the name says where it fails."""
    case = judged(result, device)
    tap = (result.first_divergence or "case").replace("/", "_")
    return cases.save(case, Path(folder) / f"{tap}-{cases.digest(case)}.safetensors")


def judged(result: Result, device: str = "cpu") -> Case:
    """The case with its verdict written into it."""
    verdict = {
        "ref": result.ref, "sut": result.sut, "dtype": result.dtype, "verdict": result.verdict,
        "tap": result.first_divergence, "taps": [tap.name for tap in tap_table(result.case.num_layers)],
        **cases.environment(device),
    }  # fmt: skip
    return cases.with_meta(result.case, **verdict)
