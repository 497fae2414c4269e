"""The judgement: two implementations of a case, tap by tap, against the float64 oracle."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_dflash.taps import Tap, live_part, tap_table
from parity_tests.harness import metrics, null, runners
from parity_tests.harness.attribution import Attribution, attribute
from parity_tests.harness.case import Case
from parity_tests.harness.runners import Float64Worker, NotDeterministic, Trace

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
    worker: Float64Worker | None = None,
    stop_early: bool = False,
    trust_ref: bool = False,
) -> Result:
    """Judge `sut` against `ref`: semantics in float64, then local and end-to-end error ratios in `dtype`, tokens, and
    whether taps change the program. With `stop_early` a wrong function is not measured further; with `trust_ref` the
    reference's own semantics are taken as judged before. Raises CannotRun."""
    table = [tap for tap in tap_table(case.num_layers) if tap.level <= level or tap.kind == "pool"]
    rows = {tap.name: _row(case, tap) for tap in table}
    result = Result(case, ref, sut, dtype, list(rows.values()))
    try:
        _semantics(result, table, rows, worker, (sut,) if trust_ref else (ref, sut))
        if dtype != "float64" and not (stop_early and not result.ok):
            _rounding(result, table, rows, device, level)
    except NotDeterministic as error:
        result.verdict, result.first_divergence = NOT_DETERMINISTIC, str(error)
    return result


def _row(case: Case, tap: Tap) -> dict[str, Any]:
    return {
        "tap": tap.name,
        "dims": tap.dims,
        "level": tap.level,
        "value_kind": tap.kind,
        "contract": tap.roundings,
        "verdict": OK,
    }


def _live(case: Case, tap: Tap, trace: Trace) -> np.ndarray:
    return live_part(tap, trace[tap.name], case.live_reqs, case.live_rows)


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


def _semantics(
    result: Result, table: list[Tap], rows: dict[str, dict], worker: Float64Worker | None, sides: tuple[str, ...]
) -> None:
    """Tier 1: each side's own code in float64 against the oracle, each tap in order."""
    case = result.case
    exact = runners.oracle(case)
    result.traces["oracle"] = exact
    for side in dict.fromkeys(sides):
        trace = runners.float64_run(case, side, worker)
        if trace.keys() != exact.keys():
            return _other_taps(result, side, trace, exact)
        for tap in table:
            ours, theirs = _live(case, tap, trace), _live(case, tap, exact)
            row = rows[tap.name]
            row["shape"] = list(theirs.shape)
            if ours.shape != theirs.shape:
                error, wrong = float("inf"), True
            elif tap.kind in ("int", "token"):
                error, wrong = None, not np.array_equal(ours, theirs)
            else:
                error = metrics.relative_rmse(ours, theirs)
                wrong = not error <= FP64_LIMIT
            if error is not None:
                row["fp64"] = max(row.get("fp64") or 0.0, error)
            if wrong:
                _fail(result, row, WRONG, side, attribute(tap, ours, theirs))


def _rounding(result: Result, table: list[Tap], rows: dict[str, dict], device: str, level: int) -> None:
    """Tiers 2 to 4 and the observer check, in the working dtype."""
    case, dtype, exact = result.case, result.dtype, result.traces["oracle"]
    run_ref, run_sut = runners.runner(result.ref, device), runners.runner(result.sut, device)
    reference = run_ref(case, dtype)
    free = run_sut(case, dtype, level=level)
    untapped = run_sut(case, dtype, level=0)
    for name, value in untapped.items():
        if not np.array_equal(value, free[name], equal_nan=True) and result.verdict in (OK, ROUNDING):
            result.verdict, result.first_divergence, result.side = PERTURBED, name, result.sut
    forced = {name: value for name, value in runners.forcible(case, reference).items() if name in rows}
    local_exact, local = runners.oracle(case, forced=forced), run_sut(case, dtype, forced, level=level)

    def live(tap, x):
        return live_part(tap, x, case.live_reqs, case.live_rows)

    band = null.bands(case, run_ref, dtype, reference, local_exact, exact, live)
    result.traces |= {"ref": reference, "sut": free, "local": local, "local_exact": local_exact}
    for tap in table:
        row = rows[tap.name]
        ours, theirs = live(tap, local[tap.name]), live(tap, reference[tap.name])
        truth, end = live(tap, local_exact[tap.name]), live(tap, exact[tap.name])
        if tap.kind == "int":
            if not np.array_equal(live(tap, free[tap.name]), end):
                _fail(result, row, WRONG, result.sut, attribute(tap, live(tap, free[tap.name]), end))
            continue
        if tap.kind == "token":
            continue
        ratio = metrics.error_ratio(ours, theirs, truth)
        row["rho_local"] = ratio
        row["rho_e2e"] = metrics.error_ratio(live(tap, free[tap.name]), theirs, end)
        row["rel_rmse_u"] = metrics.relative_rmse(ours, truth) / metrics.UNIT[dtype]
        if tap.kind == "pool":
            if ratio is None or not metrics.same_nonfinite(ours, truth):
                _fail(result, row, _kind(row), result.sut, attribute(tap, ours, truth))
            continue
        low_high, end_band = band[tap.name]
        row["band_local"], row["band_e2e"] = [low_high.low, low_high.high], [end_band.low, end_band.high]
        errors = metrics.ulp_errors(live(tap, free[tap.name]), end, dtype)
        row |= {f"ulp_p{q}": float(np.percentile(errors, q)) for q in (50, 99)}
        row |= {
            "ulp_max": float(errors.max()),
            "ulp_at": [int(i) for i in np.unravel_index(errors.argmax(), errors.shape)],
        }
        row["roundings"] = metrics.roundings(ours, truth, dtype)
        if not low_high.holds(ratio) or not _in_contract(tap, row, dtype):
            _fail(result, row, _kind(row), result.sut, attribute(tap, ours, truth))
        elif not end_band.holds(row["rho_e2e"]):
            _fail(result, row, ROUNDING, result.sut, attribute(tap, live(tap, free[tap.name]), end))
    _tokens(result, reference, free, exact)


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


def _tokens(result: Result, reference: Trace, free: Trace, exact: Trace) -> None:
    """Tier 4: drafts equal wherever the reference's own error could not have turned them."""
    n = result.case.live_reqs
    decided = metrics.decided(exact["logits"][:n], reference["logits"][:n], SIGMAS)
    ours, theirs = free["draft_tokens"][:n], reference["draft_tokens"][:n]
    unequal = decided & (ours != theirs)
    result.tokens = {
        "compared": int(ours.size), "equal": int((ours == theirs).sum()), "undecidable": int((~decided).sum()),
        "decided_unequal": int(unequal.sum()),
    }  # fmt: skip
    if unequal.any():
        row = next(row for row in result.rows if row["tap"] == "draft_tokens")
        tap = next(tap for tap in tap_table(result.case.num_layers) if tap.name == "draft_tokens")
        _fail(result, row, WRONG, result.sut, attribute(tap, np.where(decided, ours, theirs), theirs))
