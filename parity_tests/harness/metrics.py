"""How far two arrays are apart, in the units the verdicts are written in. Numpy only; experiments use it too."""

import numpy as np

# Half the spacing of the numbers just above 1, relative to them: the largest relative error of one rounding is u / 1, its
# RMS 0.42 u for values whose mantissas are Gaussian-like (measured; 0.39 for log-uniform ones).
UNIT = {"bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ROUNDING_RMS = 0.42
FRACTION_BITS = {"bfloat16": 7, "float32": 23, "float64": 52}
MIN_EXPONENT = {"bfloat16": -126, "float32": -126, "float64": -1022}


def same_nonfinite(a: np.ndarray, b: np.ndarray) -> bool:
    """NaN and infinities at the same places, infinities of one sign."""
    finite = np.isfinite(a)
    return np.array_equal(finite, np.isfinite(b)) and np.array_equal(a[~finite], b[~finite], equal_nan=True)


def rms(x: np.ndarray) -> float:
    """Root mean square of the finite entries; 0 where there are none."""
    x = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def difference(x: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """x - exact, 0 where either is not finite: a reduced vocabulary's logits hold -inf on both sides."""
    return np.subtract(x, exact, out=np.zeros(np.shape(exact)), where=np.isfinite(x) & np.isfinite(exact))


def relative_rmse(x: np.ndarray, exact: np.ndarray) -> float:
    """RMS(x - exact) / RMS(exact); infinite where only one of them is finite."""
    if not same_nonfinite(x, exact):
        return float("inf")
    error, scale = rms(difference(x, exact)), rms(exact)
    return 0.0 if error == 0 else error / scale if scale else float("inf")


def error_ratio(x: np.ndarray, reference: np.ndarray, exact: np.ndarray) -> float | None:
    """rho: the error of `x` in units of the reference's own, both against `exact`. 1 where neither errs, None where only
    the reference does not."""
    ours, theirs = relative_rmse(x, exact), relative_rmse(reference, exact)
    if theirs == 0:
        return 1.0 if ours == 0 else None
    return ours / theirs


def roundings(x: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """How many independent roundings to `dtype` would make this error."""
    return (relative_rmse(x, exact) / (ROUNDING_RMS * UNIT[dtype])) ** 2


def ulp(exact: np.ndarray, dtype: str) -> np.ndarray:
    """The spacing of `dtype` at each value."""
    exponent = np.frexp(np.where(np.isfinite(exact), exact, 0))[1] - 1
    return np.ldexp(1.0, np.maximum(exponent, MIN_EXPONENT[dtype]) - FRACTION_BITS[dtype])


def ulp_errors(x: np.ndarray, exact: np.ndarray, dtype: str) -> np.ndarray:
    """Distances in units of the last place, 0 where neither is finite. A value below the array's RMS is measured at the
    RMS: next to a zero every right answer is thousands of its own units off."""
    error = np.abs(difference(x, exact)) / ulp(np.maximum(np.abs(exact), rms(exact)), dtype)
    return np.where(np.isfinite(exact), error, 0.0)


def decided(exact_logits: np.ndarray, reference_logits: np.ndarray, sigmas: float) -> np.ndarray:
    """Which rows' argmax the reference's own error cannot turn: the float64 top-2 margin exceeds `sigmas` RMS errors."""
    top = np.partition(exact_logits, -2, axis=-1)
    margin = top[..., -1] - top[..., -2]
    finite = np.isfinite(exact_logits)
    squared = np.sum(difference(reference_logits, exact_logits) ** 2, axis=-1) / np.maximum(finite.sum(-1), 1)
    return margin > sigmas * np.sqrt(squared)
