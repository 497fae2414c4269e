"""The judgement: two implementations of a case, tap by tap, against the float64 oracle."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_dflash.taps import Tap
from parity_tests.harness import metrics, null, runners
from parity_tests.harness.attribution import Attribution, attribute
from parity_tests.harness.case import Case
from parity_tests.harness.runners import NotDeterministic, Trace

OK, WRONG, ROUNDING = "ok", "wrong maths", "rounding policy differs"
NOT_DETERMINISTIC, PERTURBED = "not deterministic", "taps perturb"
# The same function in another order differs by 2e-15 (5.6e-14 with shifted positions); the weakest of the planted bugs
# that are not roundings by 1.4e-5.
FP64_LIMIT = 1e-11
SIGMAS = 5  # no argmax of a legitimate bfloat16 run turned beyond 4 sigma of its own error in 1,560 tokens
# The contract's count of roundings is held within these factors of the relative RMS error 0.42 u sqrt(n): operands that
# are rounded and then amplified (exp, silu) or added to something larger count for more or less than one.
CONTRACT_BAND = (0.7, 1.4)
NO_ROUNDING = 0.01  # an error of a tenth of one rounding's: float32 sums in another order make 1e-5 of it


@dataclass
class Result:
    """What a comparison found. `rows` holds one dict per tap, as the report reads them."""

    case: Case
    ref: str
    sut: str
    dtype: str
    rows: list[dict[str, Any]]
    verdict: str = OK
    first_divergence: str | None = None
    side: str | None = None  # which implementation is wrong, where the oracle can tell
    attribution: Attribution | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.verdict == OK


def compare(
    case: Case,
    ref: str = "torch.eager",
    sut: str = "jax",
    dtype: str = "bfloat16",
    *,
    device: str = "cpu",
    level: int = 2,
    stop_early: bool = False,
    reference: null.Reference | None = None,
) -> Result:
    """Judge `sut` against `ref`: semantics in float64, then local and end-to-end error ratios in `dtype`, tokens, and
    whether taps change the program. With `stop_early` a wrong function is not measured further. A `reference` that was
    made before is taken as it is, its own semantics too. Raises CannotRun."""
    sides = (ref, sut) if reference is None else (sut,)
    reference = reference or null.Reference(case, ref, dtype, device, level)
    rows = {tap.name: _row(tap) for tap in reference.table}
    result = Result(case, ref, sut, dtype, list(rows.values()))
    try:
        _semantics(result, reference, rows, sides)
        if dtype != "float64" and not (stop_early and not result.ok):
            _rounding(result, reference, rows, device, level)
    except NotDeterministic as error:
        result.verdict, result.first_divergence = NOT_DETERMINISTIC, str(error)
    return result


def _row(tap: Tap) -> dict[str, Any]:
    fields = {"tap": tap.name, "dims": tap.dims, "level": tap.level, "value_kind": tap.kind}
    return {**fields, "contract": tap.roundings, "verdict": OK}


def _other_taps(result: Result, side: str, trace: Trace, exact: Trace) -> None:
    """A tap that one side lacks, or has and should not, is a failure: nothing of that name was compared."""
    name = min(trace.keys() ^ exact.keys())
    line = f"{side} {'has an extra' if name in trace else 'lacks the'} tap {name}"
    result.verdict, result.first_divergence, result.side = WRONG, name, side
    result.attribution = Attribution(name, [line], {}, "a tap call that was dropped, added or renamed", None)


def _fail(result: Result, row: dict[str, Any], verdict: str, side: str, attribution: Attribution) -> None:
    row["verdict"] = verdict
    if result.verdict == OK or (result.verdict == ROUNDING and verdict == WRONG):
        result.verdict, result.first_divergence, result.side = verdict, row["tap"], side
        result.attribution = attribution


def _semantics(result: Result, reference: null.Reference, rows: dict[str, dict], sides: tuple[str, ...]) -> None:
    """Tier 1: each side's own code in float64 against the oracle, each tap in order."""
    exact, live = reference.exact, reference.live
    result.traces["oracle"] = exact
    for side in dict.fromkeys(sides):
        trace = runners.float64_run(result.case, side)
        if trace.keys() != exact.keys():
            return _other_taps(result, side, trace, exact)
        for tap in reference.table:
            ours, theirs = live(tap, trace), live(tap, exact)
            row = rows[tap.name]
            row["shape"] = list(theirs.shape)
            if tap.kind in ("int", "token"):
                wrong = not np.array_equal(ours, theirs)
            else:
                error = metrics.relative_rmse(ours, theirs) if ours.shape == theirs.shape else float("inf")
                row["fp64"] = max(row.get("fp64", 0.0), error)
                wrong = not error <= FP64_LIMIT
            if wrong:
                _fail(result, row, WRONG, side, attribute(tap, ours, theirs))


def _rounding(result: Result, reference: null.Reference, rows: dict[str, dict], device: str, level: int) -> None:
    """Tiers 2 to 4 and the observer check, in the working dtype."""
    case, dtype, live = result.case, result.dtype, reference.live
    run = runners.runner(result.sut, device)
    if result.sut == "torch.graph":
        return _replayed(result, reference, rows, run(case, dtype))
    free, untapped = run(case, dtype, level=level), run(case, dtype, level=0)
    for name, value in untapped.items():
        if not np.array_equal(value, free[name], equal_nan=True) and result.verdict in (OK, ROUNDING):
            result.verdict, result.first_divergence, result.side = PERTURBED, name, result.sut
    local = run(case, dtype, reference.forced, level=level)
    result.traces |= {"ref": reference.trace, "sut": free, "local": local, "local_exact": reference.local_exact}
    for tap in reference.table:
        row = rows[tap.name]
        if tap.kind == "int" and not np.array_equal(live(tap, free), live(tap, reference.exact)):
            _fail(result, row, WRONG, result.sut, attribute(tap, live(tap, free), live(tap, reference.exact)))
        if tap.kind in ("int", "token"):
            continue
        ours, truth = live(tap, local), live(tap, reference.local_exact)
        row["rho_local"] = reference.ratio(tap, local, reference.local_exact)
        row["rho_e2e"] = reference.ratio(tap, free, reference.exact)
        row["rel_rmse_u"] = metrics.relative_rmse(ours, truth) / metrics.UNIT[dtype]
        if tap.kind == "pool":
            passes, drifts = row["rho_local"] is not None, False
        else:
            local_band, end_band = reference.bands[tap.name]
            row["band_local"], row["band_e2e"] = list(local_band), list(end_band)
            row["roundings"] = metrics.roundings(ours, truth, dtype)
            _units(row, live(tap, free), live(tap, reference.exact), dtype)
            passes = local_band.holds(row["rho_local"]) and (level == 1 or _in_contract(tap, row, dtype))
            drifts = not end_band.holds(row["rho_e2e"])
        if not passes:
            _fail(result, row, _kind(row), result.sut, attribute(tap, ours, truth))
        elif drifts:
            _fail(result, row, ROUNDING, result.sut, attribute(tap, live(tap, free), live(tap, reference.exact)))
    _tokens(result, reference, rows, free)


def _units(row: dict[str, Any], ours: np.ndarray, exact: np.ndarray, dtype: str) -> None:
    """Errors along the free run in units of the last place."""
    errors = metrics.ulp_errors(ours, exact, dtype)
    row |= {f"ulp_p{q}": float(np.percentile(errors, q)) for q in (50, 99)}
    row["ulp_max"] = float(errors.max())
    row["ulp_at"] = [int(i) for i in np.unravel_index(errors.argmax(), errors.shape)]


def _replayed(result: Result, reference: null.Reference, rows: dict[str, dict], replay: Trace) -> None:
    """A replayed CUDA graph, which has no taps inside, gives the drafts and the pool of eager bit for bit."""
    for tap in reference.table:
        if tap.kind in ("token", "pool"):
            ours, theirs = reference.live(tap, replay), reference.live(tap, reference.trace)
            if not np.array_equal(ours, theirs, equal_nan=True):
                _fail(result, rows[tap.name], WRONG, result.sut, attribute(tap, ours, theirs))
            if tap.kind == "token":
                equal = int((ours == theirs).sum())
                result.tokens = {"compared": ours.size, "equal": equal, "undecidable": 0, "decided_unequal": 0}


def _kind(row: dict[str, Any]) -> str:
    """A tap that is off in the working dtype only rounds elsewhere; one that float64 found wrong is wrong."""
    return WRONG if row["verdict"] == WRONG else ROUNDING


def contract_band(tap: Tap, size: int) -> tuple[float, float]:
    """How many roundings an error of `size` elements may look like: the contract's, within CONTRACT_BAND of the RMS error
    and the scatter of so many elements (half of what `null.SCATTER` says of a ratio of two)."""
    scatter = float(np.exp(2 * null.SCATTER / np.sqrt(2 * size)))
    low, high = CONTRACT_BAND
    return low**2 * (tap.roundings - tap.faint) / scatter, max(high**2 * tap.roundings * scatter, NO_ROUNDING)


def _in_contract(tap: Tap, row: dict[str, Any], dtype: str) -> bool:
    """Whether the error is that of the contract's roundings. float32 sums err as much as its roundings do, so there the
    contract says nothing."""
    low, high = contract_band(tap, int(np.prod(row["shape"])))
    return dtype != "bfloat16" or low <= row["roundings"] <= high


def _tokens(result: Result, reference: null.Reference, rows: dict[str, dict], free: Trace) -> None:
    """Tier 4: drafts equal wherever the reference's own error could not have turned them."""
    tap = next(tap for tap in reference.table if tap.kind == "token")
    n = result.case.live_reqs
    decided = metrics.decided(reference.exact["logits"][:n], reference.trace["logits"][:n], SIGMAS)
    ours, theirs = reference.live(tap, free), reference.live(tap, reference.trace)
    unequal = decided & (ours != theirs)
    result.tokens = {
        "compared": int(ours.size), "equal": int((ours == theirs).sum()), "undecidable": int((~decided).sum()),
        "decided_unequal": int(unequal.sum()),
    }  # fmt: skip
    if unequal.any():
        _fail(result, rows[tap.name], WRONG, result.sut, attribute(tap, np.where(decided, ours, theirs), theirs))
