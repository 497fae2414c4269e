"""The judgement: two implementations of a case, tap by tap, against the float64 oracle."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jax_dflash.taps import Tap
from parity_tests.harness import metrics, null, runners
from parity_tests.harness.attribution import Attribution, attribute
from parity_tests.harness.case import Case
from parity_tests.harness.null import distinct
from parity_tests.harness.runners import NotDeterministic, Trace

OK, WRONG, ROUNDING = "ok", "wrong maths", "rounding policy differs"
NOT_DETERMINISTIC, PERTURBED = "not deterministic", "taps perturb"
# The same function in another order differs by 2e-15 (5.6e-14 with shifted positions); the weakest of the planted bugs
# that are not roundings by 4.7e-6.
FP64_LIMIT = 1e-11
SIGMAS = 5  # no argmax of a legitimate bfloat16 run turned beyond 4 sigma of its own error in 1,560 tokens
# The contract's count of roundings is held within these factors of the relative RMS error 0.42 u sqrt(n): operands that
# are rounded and then amplified (exp, silu) or added to something larger count for more or less than one. A single
# rounding has nothing before it: 0.9 to 1.1 of one were measured, two are another policy.
CONTRACT_BAND, SINGLE_BAND = (0.7, 1.4), (0.75, 1.2)
NO_ROUNDING = 0.01  # an error of a tenth of one rounding's: float32 sums in another order make 1e-5 of it
# Times the contract: more is no policy. Scores rounded before the softmax, the worst of the public ones, make 11 times it;
# reversed heads in bfloat16 alone 200,000.
GROSS = 50
COPIES = ("features", "embeds")  # taps without arithmetic: whatever differs there is wrong
FOLLOWS = "follows"  # right from right values before it, off because of an earlier tap


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
    notes: list[str] = field(default_factory=list)  # what a check was relaxed to, and why

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
        _semantics(result, reference, rows, sides, stop_early)
        comparable = all("shape" in row for row in result.rows)
        if comparable and dtype != "float64" and not (stop_early and not result.ok):
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


def _semantics(
    result: Result, reference: null.Reference, rows: dict[str, dict], sides: tuple[str, ...], stop_early: bool
) -> None:
    """Tier 1: each side's own code in float64 against the oracle, each tap in order. After a wrong tap the later ones are
    computed from the oracle's values too, to tell those that are wrong themselves from those that follow."""
    exact = reference.exact
    result.traces["oracle"] = exact
    for side in dict.fromkeys(sides):
        trace = runners.float64_run(result.case, side)
        if trace.keys() != exact.keys():
            return _other_taps(result, side, trace, exact)
        failing = [tap for tap in reference.table if _float64_error(reference, rows, tap, trace) > FP64_LIMIT]
        if not failing:
            continue
        forced = {tap.name: exact[tap.name] for tap in reference.floats if tap.name != "features"}
        local = trace if stop_early else runners.float64_run(result.case, side, forced)
        for tap in failing:
            _fail(
                result,
                rows[tap.name],
                WRONG,
                side,
                attribute(tap, reference.live(tap, trace), reference.live(tap, exact)),
            )
            if (
                tap is not failing[0]
                and _error(tap, reference.live(tap, local), reference.live(tap, exact)) <= FP64_LIMIT
            ):
                rows[tap.name]["verdict"] = FOLLOWS


def _error(tap: Tap, ours: np.ndarray, exact: np.ndarray) -> float:
    """Relative RMSE of floats and pools; 0 or infinity for what must be equal."""
    if ours.shape != exact.shape:
        return float("inf")
    if tap.kind in ("int", "token"):
        return 0.0 if np.array_equal(ours, exact) else float("inf")
    return metrics.relative_rmse(ours, exact)


def _float64_error(reference: null.Reference, rows: dict[str, dict], tap: Tap, trace: Trace) -> float:
    row, exact = rows[tap.name], reference.live(tap, reference.exact)
    error = _error(tap, reference.live(tap, trace), exact)
    row["shape"] = list(exact.shape)
    if tap.kind in ("float", "pool"):
        row["fp64"] = max(row.get("fp64", 0.0), error)
    return error


def _rounding(result: Result, reference: null.Reference, rows: dict[str, dict], device: str, level: int) -> None:
    """Tiers 2 to 4 and the observer check, in the working dtype."""
    case, dtype, live = result.case, result.dtype, reference.live
    run = runners.runner(result.sut, device)
    if result.sut == "torch.graph":
        return _replayed(result, reference, rows, run(case, dtype))
    free, untapped = run(case, dtype, level=level), run(case, dtype, level=0)
    _observed(result, reference, free, untapped, bitwise=device == "cpu")
    local = run(case, dtype, reference.forced, level=level)
    result.traces |= {"ref": reference.trace, "sut": free, "local": local, "local_exact": reference.local_exact}
    for tap in reference.table:
        row = rows[tap.name]
        for side, trace in ((result.ref, reference.trace), (result.sut, local)):
            if (said := _local(tap, row, reference, trace, dtype, level)) != OK:
                where = attribute(tap, live(tap, trace), live(tap, reference.local_exact))
                _fail(result, row, said, side, where)
        if tap.kind == "int" and not np.array_equal(live(tap, free), live(tap, reference.exact)):
            _fail(result, row, WRONG, result.sut, attribute(tap, live(tap, free), live(tap, reference.exact)))
        if tap.kind in ("float", "pool"):
            row["rho_e2e"] = reference.ratio(tap, free, reference.exact)
        if tap.kind == "float":
            _units(row, live(tap, free), live(tap, reference.exact), dtype)
            row["band_e2e"] = list(reference.bands[tap.name][1])
            if dtype == "bfloat16" and not reference.bands[tap.name][1].holds(row["rho_e2e"]) and row["verdict"] == OK:
                _fail(result, row, ROUNDING, result.sut, attribute(tap, live(tap, free), live(tap, reference.exact)))
    _tokens(result, reference, rows, free)


def _observed(result: Result, reference: null.Reference, free: Trace, untapped: Trace, *, bitwise: bool) -> None:
    """The observer check: a step without taps gives what the tapped step gives. On a CPU the same bits; a GPU's compiler
    fuses a value that is also an output another way, which turns a rounding now and then, so there decided drafts are
    equal and the pool's error is what another run of the same function makes."""
    for tap in reference.table:
        if tap.kind not in ("token", "pool") or np.array_equal(untapped[tap.name], free[tap.name], equal_nan=True):
            continue
        ours, theirs = reference.live(tap, untapped), reference.live(tap, free)
        if tap.kind == "token":
            same = not (_decided(reference) & (ours != theirs)).any()
            note = f"{int((ours != theirs).sum())} undecidable of {ours.size} drafts differ"
        else:
            exact = reference.live(tap, reference.exact)
            rho, turned = metrics.error_ratio(ours, theirs, exact), int((ours != theirs)[np.isfinite(exact)].sum())
            same = rho is not None and abs(np.log(rho)) <= np.log(null.independent(distinct(exact)))
            note = f"{turned} of {ours.size} elements, error ratio {rho or 0:.3f}"
        if same and not bitwise:
            result.notes.append(f"{tap.name}: taps turn roundings of {result.sut} ({note})")
        elif result.verdict in (OK, ROUNDING):
            result.verdict, result.first_divergence, result.side = PERTURBED, tap.name, result.sut


def _local(tap: Tap, row: dict[str, Any], reference: null.Reference, trace: Trace, dtype: str, level: int) -> str:
    """What a tap's own error says when it is computed from the reference's values; fills the row's local figures."""
    ours, exact = reference.live(tap, trace), reference.live(tap, reference.local_exact)
    if tap.kind in ("int", "token"):
        return OK if np.array_equal(ours, exact) else WRONG
    row["rho_local"] = ratio = reference.ratio(tap, trace, reference.local_exact)
    row["rel_rmse_u"] = metrics.relative_rmse(ours, exact) / metrics.UNIT[dtype]
    if tap.kind == "pool" or tap.name in COPIES:
        stored = ratio is not None and metrics.same_nonfinite(ours, exact)
        return OK if stored and (tap.kind == "pool" or row["rel_rmse_u"] == 0) else WRONG
    row["band_local"] = list(reference.bands[tap.name][0])
    # float32 errs as much in a sum's additions as in its rounding, and every framework sums in another order: no ratio of
    # two of them says anything. A sum of K terms makes at most some K roundings' error, and an angle of p radians p of
    # them in amplitude.
    count = metrics.roundings(ours, exact, dtype)
    most = max(1, tap.roundings)
    if dtype == "float32":
        rotated = tap.name.rpartition(".")[2] in ("q", "k", "context_k")
        most += reference.longest_sum + (reference.case.max_model_len**2 if rotated else 0)
    if not count <= GROSS * most:
        return WRONG
    if dtype == "float32":
        return OK if count <= CONTRACT_BAND[1] ** 2 * most else ROUNDING
    row["roundings"] = count
    if tap.roundings == 0:  # float32 sums, as above
        return OK if count <= NO_ROUNDING else ROUNDING
    kept = level == 1 or _in_contract(tap, count, metrics.roundings(*_pair(tap, reference), dtype), distinct(exact))
    return OK if kept and reference.bands[tap.name][0].holds(ratio) else ROUNDING


def _pair(tap: Tap, reference: null.Reference) -> tuple[np.ndarray, np.ndarray]:
    return reference.live(tap, reference.trace), reference.live(tap, reference.local_exact)


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


def contract_band(tap: Tap, size: int) -> tuple[float, float]:
    """How many roundings an error of `size` distinct elements may look like: the contract's, within the factors above of
    the RMS error and the scatter of so many elements (half of what `null.SCATTER` says of a ratio of two)."""
    scatter = float(np.exp(2 * null.SCATTER / np.sqrt(2 * size)))
    low, high = SINGLE_BAND if tap.roundings == 1 else CONTRACT_BAND
    return low**2 * (tap.roundings - tap.faint) / scatter, max(high**2 * tap.roundings * scatter, NO_ROUNDING)


def _in_contract(tap: Tap, count: float, reference_count: float, size: int) -> bool:
    """Whether an error is that of the contract's roundings. Less is none of them missing where the reference errs as
    little: a case may leave nothing to round."""
    low, high = contract_band(tap, size)
    return count <= high and (low <= count or reference_count < low)


def _decided(reference: null.Reference) -> np.ndarray:
    """Drafts that the reference's own error could not have turned."""
    n = reference.case.live_reqs
    return metrics.decided(reference.exact["logits"][:n], reference.trace["logits"][:n], SIGMAS)


def _tokens(result: Result, reference: null.Reference, rows: dict[str, dict], free: Trace) -> None:
    """Tier 4: drafts equal wherever the reference's own error could not have turned them."""
    tap = next(tap for tap in reference.table if tap.kind == "token")
    decided = _decided(reference)
    ours, theirs = reference.live(tap, free), reference.live(tap, reference.trace)
    unequal = decided & (ours != theirs)
    result.tokens = {
        "compared": int(ours.size), "equal": int((ours == theirs).sum()), "undecidable": int((~decided).sum()),
        "decided_unequal": int(unequal.sum()),
    }  # fmt: skip
    if unequal.any() and result.verdict == ROUNDING:
        result.verdict = WRONG  # what turns a decided draft is no policy; it begins where it began
    elif unequal.any():
        _fail(result, rows[tap.name], WRONG, result.sut, attribute(tap, np.where(decided, ours, theirs), theirs))
