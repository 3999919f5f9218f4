"""How far an output is from what it should be, and whether that is rounding or an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

# The largest error of an output, relative to the largest finite magnitude that it should have.
#
# What it should be is the original's own output, except where the original computes in half precision: there it is the
# original evaluated in float32, and an output also passes if its error is not larger than that of the original as it
# is.  The original's rounding is no standard: onnxruntime's CPU provider puts Casts around most float16 nodes and drops
# pairs of them, so where it rounds depends on the nodes around.  Merely folding the shape arithmetic of the Reshapes
# moved an output of float16 ViTs by 1.8e-3 (onnxruntime 1.31), without a change of arithmetic.  Against the float32
# evaluation, the exported float16 transformers are off by 4.8e-4 to 1.5e-3, optimized by 3.8e-4 to 1.9e-3.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-12,  # 2^-53 = 1.1e-16: sums of some thousand terms in another order; no fusion touches doubles
    "float32": 1e-5,  # 2^-24 = 6e-8: some hundred roundings in another order
    "complex128": 1e-12,  # as float64
    "complex64": 1e-5,  # as float32
    "float16": 2e-3,  # 2^-11 = 4.9e-4: four roundings; a fused op rounds once where its nodes rounded each time
    "bfloat16": 1.6e-2,  # 2^-8 = 3.9e-3: four roundings, as for float16
}  # every other dtype is exact: integers, booleans and strings have no roundings
HALVES = ("float16", "bfloat16")

# Magnitudes that only masks have: -3.4e38, or -65504 in float16.  They would make every error look small, so they
# count for themselves alone.
MASKS: Mapping[str, float] = {"float16": 3e4}
MASK = 1e30


@dataclass(frozen=True)
class OutputError:
    """The error of one output, the worst of all rounds.

    `max_rel` is relative to the output's largest magnitude, masks aside.  For what comes from half precision it is the
    error against the original evaluated in float32, and `original_rel` the original's own error against that; None
    elsewhere.
    """

    name: str
    max_abs: float
    max_rel: float
    tolerance: float
    passed: bool
    reason: str
    original_rel: float | None = None


@dataclass(frozen=True)
class _Measured:
    """Errors relative to the largest magnitude: the optimized's, the original's, and where the original overflowed."""

    max_abs: float
    rel: float
    own: float
    overflow: float


def difference(name: str, expected: Any, actual: Any, exact: Any = None, half: str = "") -> OutputError:
    """The error of one value; sequences element by element, maps exactly.

    `half` is the half precision that the value comes from, '' for none, and `exact` the original's value in float32.
    """
    if not isinstance(expected, np.ndarray):
        return _difference_of_objects(name, expected, actual, exact, half)
    dtype = str(expected.dtype)
    tolerance = TOLERANCES.get(dtype, 0.0)
    wrong = _mismatch(expected, actual, tolerance)
    if wrong or not tolerance:
        size = math.inf if wrong else 0.0
        return OutputError(name, size, size, tolerance, not wrong, wrong and f"output '{name}' {wrong}")
    mask = min(MASKS.get(each, MASK) for each in (dtype, half))
    known = isinstance(exact, np.ndarray) and exact.shape == expected.shape
    rounded = half if half and dtype not in HALVES else dtype
    return _judge(name, expected, actual, exact if known else None, rounded, mask)


def worst(errors: Iterable[OutputError]) -> OutputError:
    """The one that fails, else the one with the largest error."""
    return max(errors, key=lambda e: (not e.passed, e.max_rel))


def _mismatch(expected: Array, actual: Any, tolerance: float) -> str:
    """What is wrong other than rounding; '' for nothing."""
    if not isinstance(actual, np.ndarray):
        return "is missing" if actual is None else "is no tensor any more"
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return f"is {_type(actual)}; the original has {_type(expected)}"
    wrong = 0 if tolerance else int((expected != actual).sum())
    if wrong:
        return f"differs in {wrong} of {expected.size} elements; {expected.dtype} has to be equal"
    return ""


def _judge(name: str, expected: Array, actual: Array, exact: Array | None, dtype: str, mask: float) -> OutputError:
    """Whether NaN and infinities are where they have to be, and the rest within the tolerance of `dtype`."""
    tolerance = TOLERANCES[dtype]
    misplaced = _misplaced(expected, actual, expected if exact is None else exact)
    if misplaced:
        return OutputError(name, math.inf, math.inf, tolerance, False, f"output '{name}' differs in {misplaced}")
    found = _measure(expected, actual, expected if exact is None else exact, mask)
    passed = found.rel <= max(tolerance, found.own) and found.overflow <= tolerance
    rel = max(found.rel, found.overflow)
    text = f"output '{name}' is off by {rel:.1e} of its largest value"
    if exact is not None:
        text += f" from the original in float32, the original itself by {found.own:.1e}"
    reason = "" if passed else f"{text}; {dtype} allows {tolerance:.1e}"
    return OutputError(name, found.max_abs, rel, tolerance, passed, reason, None if exact is None else found.own)


def _misplaced(expected: Array, actual: Array, exact: Array) -> str:
    """How many NaN or infinities came or went; one that float32 does not have may go, none may come."""
    old, new, true = _wide(expected), _wide(actual), _wide(exact)
    both_nan = np.isnan(old) & np.isnan(new)
    wrong = ~np.isfinite(old) & (old != new) & ~both_nan & ~(np.isfinite(true) & np.isfinite(new))
    wrong |= np.isfinite(old) & ~np.isfinite(new)
    for kind, places in (("NaN", wrong & (np.isnan(old) != np.isnan(new))), ("infinite values", wrong)):
        if places.any():
            return f"{kind} at {int(places.sum())} of {old.size} places"
    return ""


def _measure(expected: Array, actual: Array, exact: Array, mask: float) -> _Measured:
    """Errors against `exact`, or against `expected` where only that is finite."""
    old, new, true = _wide(expected), _wide(actual), _wide(exact)
    true = np.where(np.isfinite(true), true, old)
    size = np.where(np.isfinite(true), np.abs(true), 0.0)
    scale = float(size[size < mask].max(initial=0.0)) or 1.0
    size = np.where(size < mask, scale, size)

    def largest(value: Array, places: Array, relative: bool = True) -> float:
        with np.errstate(over="ignore"):  # an infinite error is one
            errors = np.abs(value[places] - true[places])
            return float((errors / size[places] if relative else errors).max(initial=0.0))

    known, there = np.isfinite(old) & np.isfinite(true), np.isfinite(new) & np.isfinite(true)
    return _Measured(
        largest(new, there, relative=False), largest(new, there & known), largest(old, known),
        largest(new, there & ~known),
    )  # fmt: skip


def _wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _difference_of_objects(name: str, expected: Any, actual: Any, exact: Any, half: str) -> OutputError:
    if not isinstance(expected, list) or any(not isinstance(e, np.ndarray) for e in expected):
        same = type(expected) is type(actual) and expected == actual
        size = 0.0 if same else math.inf
        return OutputError(name, size, size, 0.0, same, "" if same else f"output '{name}' differs; a map is exact")
    if not isinstance(actual, list) or len(actual) != len(expected):
        text = f"output '{name}' is no sequence of {len(expected)} tensors, as it is in the original"
        return OutputError(name, math.inf, math.inf, 0.0, False, text)
    exacts = exact if isinstance(exact, list) and len(exact) == len(expected) else [None] * len(expected)
    triples = zip(expected, actual, exacts, strict=True)
    found = [difference(name, old, new, true, half) for old, new, true in triples]
    return worst(found) if found else OutputError(name, 0.0, 0.0, 0.0, True, "")


def _type(array: Array) -> str:
    return f"{array.dtype} of shape {' x '.join(map(str, array.shape)) or '()'}"
