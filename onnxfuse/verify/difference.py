"""Measure how far an output is from the expected one, and decide whether that is rounding or an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import ml_dtypes
import numpy as np

from onnxfuse.ir.dtypes import HALF_PRECISION, Array

TF32 = "tf32"  # the precision of float32 products on CUDA, unless the session's option use_tf32 is 0

# The largest allowed error of an output, relative to the largest finite magnitude of the expected output.
#
# The expected output is the original's own, unless the original computes in half precision.  Then the original is
# evaluated in float32, and an output also passes if the original's own output has no smaller error.  The original's
# rounding is not a standard: onnxruntime's CPU provider puts Casts around most float16 nodes and drops pairs of them,
# so where it rounds depends on the neighbouring nodes.  Merely folding the shape arithmetic of the Reshapes changed an
# output of float16 ViTs by 1.8e-3 (onnxruntime 1.31), without a change of arithmetic.  Against the float32 evaluation,
# the exported float16 transformers are off by 4.8e-4 to 1.5e-3, and the optimized ones by 3.8e-4 to 1.9e-3.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-12,  # 2^-53 = 1.1e-16: sums of some thousand terms in another order; fusions leave float64 alone
    "float32": 1e-5,  # 2^-24 = 6e-8: some hundred roundings in another order
    "complex128": 1e-12,  # the same as float64
    "complex64": 1e-5,  # the same as float32
    "float16": 2e-3,  # 2^-11 = 4.9e-4: four roundings; each replaced node rounds, but a fused node only once
    "bfloat16": 1.6e-2,  # 2^-8 = 3.9e-3: four roundings, as for float16
    TF32: 4e-3,  # 2^-11 = 4.9e-4: rounding of factors; a ResNet-50 and a vocoder are off by 2.3e-3 and 2.8e-3
}  # every other dtype is exact: integers, booleans and strings have no roundings

GIVEN = "the given tolerance"
Base: TypeAlias = Literal["original", "converted model"]

# A value of at least this magnitude can only come from a mask, such as -3.4e38, or -65504 in float16.  Such
# values would make every error look small, so the error of such a value is relative to the value itself.
MASK_MAGNITUDE = 1e30
MASK_MAGNITUDES: Mapping[str, float] = {"float16": 3e4}


@dataclass(frozen=True)
class OutputDifference:
    """The largest error of one output over all runs.

    `max_rel` is relative to the output's largest magnitude, apart from mask values such as -3.4e38.  If the output is
    computed in or from half precision, or by products in TF32, `max_rel` is the error against the original evaluated in
    float32, and `original_rel` is the original's own error against that evaluation.  For other outputs, `original_rel`
    is None.  If an output passes although some integers are one step of a quantizer off, `note` gives their share.
    `set_by` names the source of the tolerance: the original's noise or error, or a request; "" if it is the dtype.
    `base` is the model that the output was compared with: a conversion to half precision is fused before it is compared
    with the model that it converted.
    """

    name: str
    max_abs: float
    max_rel: float
    tolerance: float
    passed: bool
    reason: str
    original_rel: float | None = None
    note: str = ""
    set_by: str = ""
    base: Base = "original"


@dataclass(frozen=True)
class _Errors:
    """Largest errors of one output; all but `max_abs` are relative to the expected output's largest magnitude."""

    max_abs: float
    optimized: float
    original: float
    overflowed: float  # the optimized model's error at elements where only the original overflowed


@dataclass(frozen=True)
class Standard:
    """The tolerance and the scale by which the error of an output is judged."""

    half: str = ""  # the half precision or TF32, if the output is computed in or from it
    limit: float | None = None  # replaces the tolerance of floating-point dtypes
    set_by: str = GIVEN  # names the source of `limit`
    scale: float = 0.0  # errors are relative to the largest value of the output, or to `scale` if `scale` is larger
    base: Base = "original"


def compare_output(
    name: str, expected: object, actual: object, exact: object = None, standard: Standard = Standard()
) -> OutputDifference:
    """Measure the error of one output; sequences are compared element by element, and maps must be equal.

    `exact` is the original's value when it is evaluated in float32.
    """
    if not isinstance(expected, np.ndarray):
        return _compare_objects(name, expected, actual, exact, standard)
    dtype = str(expected.dtype)
    tolerance = TOLERANCES.get(dtype, 0.0)
    wrong = _describe_mismatch(expected, actual, tolerance)
    if wrong or not tolerance or not isinstance(actual, np.ndarray):
        size = math.inf if wrong else 0.0
        return OutputDifference(name, size, size, tolerance, not wrong, wrong and f"output '{name}' {wrong}")
    float32 = exact if isinstance(exact, np.ndarray) and exact.shape == expected.shape else None
    return _compare_floats(name, expected, actual, float32, standard)


def largest_value(value: object) -> float:
    """Return the largest finite magnitude in a floating-point output, except mask values; 0 if there is no other."""
    if isinstance(value, list):
        return max(map(largest_value, value), default=0.0)
    if not isinstance(value, np.ndarray) or str(value.dtype) not in TOLERANCES:
        return 0.0
    size = np.abs(_as_double(value))
    return float(size[size < MASK_MAGNITUDES.get(str(value.dtype), MASK_MAGNITUDE)].max(initial=0.0))


def worst(errors: Iterable[OutputDifference]) -> OutputDifference:
    """Return the first difference that failed; if none failed, the one with the largest relative error."""
    return max(errors, key=lambda e: (not e.passed, e.max_rel))


def _describe_mismatch(expected: Array, actual: object, tolerance: float) -> str:
    """Return how dtype, shape or exact elements (integers) differ, in words that follow the output's name, else ''."""
    if not isinstance(actual, np.ndarray):
        return "is missing" if actual is None else "is not a tensor any more"
    if (expected.dtype, expected.shape) != (actual.dtype, actual.shape):
        return f"is {type_and_shape(actual)}; the original has {type_and_shape(expected)}"
    wrong = 0 if tolerance else int(unequal(expected, actual).sum())
    if wrong:
        return f"differs in {wrong} of {expected.size} elements; {expected.dtype} has to be equal"
    return ""


def unequal(old: Array, new: Array) -> Array:
    """Return where elements differ; NaN equals NaN."""
    result: Array = (old != new) & ((old == old) | (new == new))
    return result


def _compare_floats(
    name: str, expected: Array, actual: Array, exact: Array | None, standard: Standard
) -> OutputDifference:
    """Check that NaN and infinities are where they must be, and all other values within the tolerance."""
    own, half = expected.dtype.name, standard.half
    dtype = half if half and own not in HALF_PRECISION.values() else own
    tolerance = TOLERANCES[dtype] if standard.limit is None else standard.limit
    mask = min(MASK_MAGNITUDES.get(each, MASK_MAGNITUDE) for each in (own, half))
    misplaced = describe_misplaced(expected, actual, expected if exact is None else exact, own)
    if misplaced:
        return OutputDifference(name, math.inf, math.inf, tolerance, False, f"output '{name}' differs in {misplaced}")
    found = _measure_errors(expected, actual, expected if exact is None else exact, mask, standard.scale)
    set_by = "" if standard.limit is None else standard.set_by
    allowed = max(tolerance, found.original)
    passed = found.optimized <= allowed and found.overflowed <= tolerance
    rel = max(found.optimized, found.overflowed)
    text = f"output '{name}' is off by {rel:.1e} of its largest value"
    if exact is not None:
        text += f" from the {standard.base} in float32, the {standard.base} itself by {found.original:.1e}"
    reason = "" if passed else f"{text}; {set_by or dtype} allows {allowed:.1e}"
    original_rel = None if exact is None else found.original
    if passed and rel > tolerance:
        tolerance, set_by = found.original, f"the {standard.base}'s own error in {dtype}"
    return OutputDifference(name, found.max_abs, rel, tolerance, passed, reason, original_rel, set_by=set_by)


def with_numbers_for_nan(expected: Array, actual: Array) -> Array:
    """Return the expected values, with each NaN replaced by the optimized model's value.

    For a row whose keys are all masked by -inf, ONNX's Attention gives 0, and the nodes that it replaces give NaN.
    """
    if str(expected.dtype) not in TOLERANCES or (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return expected
    return np.where(np.isnan(expected), actual, expected)


def describe_misplaced(expected: Array, actual: Array, exact: Array, dtype: str) -> str:
    """Return where NaN or infinite values wrongly appeared or vanished, as the end of a sentence; '' if nowhere.

    Such values may vanish where the float32 evaluation is finite.  They may not appear, with one exception: if `dtype`
    is a half precision, a value may be infinite where the float32 evaluation exceeds, or nearly equals, the largest
    number of `dtype`.
    """
    old, new, true = _as_double(expected), _as_double(actual), _as_double(exact)
    both_nan = np.isnan(old) & np.isnan(new)
    wrong = ~np.isfinite(old) & (old != new) & ~both_nan & ~(np.isfinite(true) & np.isfinite(new))
    wrong |= np.isfinite(old) & ~np.isfinite(new)
    if dtype in HALF_PRECISION.values():
        with np.errstate(invalid="ignore"):  # np.sign warns about NaN
            overflows = (np.abs(true) >= _largest_certain(dtype)) & (np.sign(new) == np.sign(true)) & np.isfinite(true)
        wrong &= ~(overflows & (np.isinf(old) | np.isinf(new)))
    for kind, where in (("NaN", wrong & (np.isnan(old) != np.isnan(new))), ("infinite values", wrong)):
        if where.any():
            return f"{kind} at {int(where.sum())} of {old.size} elements"
    return ""


def _largest_certain(dtype: str) -> float:
    """Return a magnitude: smaller half-precision values stay finite, however earlier results are rounded."""
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return largest * (1 - 2 * TOLERANCES[dtype])


def _measure_errors(expected: Array, actual: Array, exact: Array, mask: float, least: float) -> _Errors:
    """Measure errors against `exact`, or against `expected` where only `expected` is finite."""
    old, new, true = _as_double(expected), _as_double(actual), _as_double(exact)
    true = np.where(np.isfinite(true), true, old)
    size = np.where(np.isfinite(true), np.abs(true), 0.0)
    scale = max(float(size[size < mask].max(initial=0.0)), least) or 1.0
    size = np.where(size < mask, scale, size)

    def largest(value: Array, where: Array, relative: bool = True) -> float:
        with np.errstate(over="ignore"):  # the error may overflow to infinity
            errors = np.abs(value[where] - true[where])
            return float((errors / size[where] if relative else errors).max(initial=0.0))

    known, there = np.isfinite(old) & np.isfinite(true), np.isfinite(new) & np.isfinite(true)
    return _Errors(
        largest(new, there, relative=False), largest(new, there & known), largest(old, known),
        largest(new, there & ~known),
    )  # fmt: skip


def _as_double(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _compare_objects(
    name: str, expected: object, actual: object, exact: object, standard: Standard
) -> OutputDifference:
    if not isinstance(expected, list) or any(not isinstance(e, np.ndarray) for e in expected):
        same = type(expected) is type(actual) and expected == actual
        size = 0.0 if same else math.inf
        return OutputDifference(name, size, size, 0.0, same, "" if same else f"output '{name}' differs; a map is exact")
    if not isinstance(actual, list) or len(actual) != len(expected):
        text = f"output '{name}' is not a sequence of {len(expected)} tensors, as it is in the original"
        return OutputDifference(name, math.inf, math.inf, 0.0, False, text)
    exacts = exact if isinstance(exact, list) and len(exact) == len(expected) else [None] * len(expected)
    triples = zip(expected, actual, exacts, strict=True)
    found = [compare_output(name, old, new, true, standard) for old, new, true in triples]
    return worst(found) if found else OutputDifference(name, 0.0, 0.0, 0.0, True, "")


def type_and_shape(array: Array) -> str:
    """Return the dtype and the shape of an array as a text."""
    return f"{array.dtype} of shape {' x '.join(map(str, array.shape)) or '()'}"
