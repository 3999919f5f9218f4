"""Tell whether two values of an output differ by more than rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from drafts import types
from onnx import TensorProto

RELATIVE = {"float64": 1e-5, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of the largest value
NOISE = {"": 6, "float16": 16, "bfloat16": 16}  # times as far as the original moves where it rounds otherwise
SMALLEST_FLOAT16 = 2.0**-20  # smaller differences count for nothing: the smallest subnormal is 2^-24
MAX_STEPS = 3  # times as many values may be at another step of a quantizer as where the original rounds otherwise
MAX_ROUNDED_OTHERWISE = 0.02  # of an output's values, where it rounds on purpose or to steps: equal ones move together
VIEWS = {"Cast", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Expand", "Slice", "Split", "Gather",
         "Concat", "Identity", "Tile", "Pad", "Shape", "Size", "Constant"}  # fmt: skip


def rounds_on_purpose(model: onnx.ModelProto) -> bool:
    """Whether half precision is only passed through: inputs and weights have others, and no operator computes in it."""
    halves = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
    if any(i.type.tensor_type.elem_type in halves for i in model.graph.input):
        return False
    known = types(model)
    for node in model.graph.node:
        names = [name for name in (*node.input, *node.output) if name]
        if any(name not in known for name in names) or any(a.HasField("g") for a in node.attribute):
            return False
        reads_half = any(known[name].tensor_type.elem_type in halves for name in names)
        if reads_half and node.op_type not in VIEWS:
            return False
    return True


def difference(expected: Any, found: Any, near: Sequence[Any], exact: Any, half: str, on_purpose: bool) -> str | None:
    """Return in what two values of an output differ; None if by no more than rounding explains."""
    if type(expected) is not type(found):
        return f"is a {type(found).__name__}, not a {type(expected).__name__}"
    if isinstance(expected, list):
        if len(expected) != len(found):
            return f"has {len(found)} tensors, not {len(expected)}"
        alike = [each for each in near if len(each) == len(expected)]
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            right = exact[index] if isinstance(exact, list) and len(exact) == len(expected) else None
            moved = [each[index] for each in alike]
            if reason := difference(one, other, moved, right, half, on_purpose):
                return f"[{index}] {reason}"
        return None
    if not isinstance(expected, np.ndarray):
        return "is another type" if expected != found else None
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return f"is {found.dtype}{list(found.shape)}, not {expected.dtype}{list(expected.shape)}"
    near = [each for each in near if each.shape == expected.shape]
    if expected.dtype.kind not in "fV" and expected.dtype != ml_dtypes.bfloat16:
        steady = np.ones(expected.shape, bool)
        for each in (*near, *([exact] if exact is not None and exact.shape == expected.shape else [])):
            steady &= each == expected
        if half and exact is None and not on_purpose:
            return None  # what a float16 decides cannot be told apart from rounding
        wrong = (expected != found) & steady
        steps = max([int((each != expected).sum()) for each in near], default=0)
        if wrong.sum() <= MAX_STEPS * steps:
            return None
        return f"is {_first(found, wrong)}, not {_first(expected, wrong)}" if wrong.any() else None
    return _float_difference(expected, found, near, exact, half, on_purpose)


def _float_difference(
    expected: Any, found: Any, near: Sequence[Any], exact: Any, half: str, on_purpose: bool
) -> str | None:
    with np.errstate(all="ignore"):
        want, got = expected.astype(np.float64), found.astype(np.float64)
        others = [each.astype(np.float64) for each in near]
        if exact is not None and exact.shape == expected.shape:
            others.append(exact.astype(np.float64))
        references = [want, others[-1]] if exact is not None and exact.shape == expected.shape else [want]
        kind, kinds = _kinds(got), [_kinds(each) for each in (want, *others)]
        odd = np.logical_and.reduce([kind != each for each in kinds])
        if half and not on_purpose and exact is None:
            odd = np.zeros(odd.shape, bool)
        if odd.any():
            return f"is {_first(found, odd)}, not {_first(expected, odd)}"
        base = np.where(np.isfinite(want), want, references[-1])
        turns_nan = np.logical_or.reduce([np.isnan(each) for each in (np.zeros_like(want), *others)])
        finite = np.isfinite(got) & np.isfinite(base) & ~turns_nan  # a sum that rounds to no number tells nothing
        sizes = np.where(finite, np.abs(base), 0.0)
        moves = [np.where(finite & np.isfinite(each), np.abs(each - base), 0.0) for each in (want, *others)]
        errors = [np.where(np.isfinite(each), np.abs(got - each), np.inf) for each in references]
        error, moved = np.where(finite, np.min(errors, axis=0), 0.0), np.max(moves, axis=0)
        coarse = RELATIVE[half] if half else RELATIVE["float32"]
        rounding, noise = sizes + _typical(sizes, finite), np.maximum(moved, _typical(moved, finite))
        allowed = coarse * rounding + NOISE[half] * noise + (SMALLEST_FLOAT16 if half == "float16" else 1e-30)
        if half:  # where rounding may change half of a value, a few draws do not show how far it goes
            allowed = np.where(NOISE[half] * noise > sizes / 2, 4 * allowed, allowed)
        wrong = error > allowed
        smooth = coarse * rounding + NOISE[half] * _typical(moved, finite) + SMALLEST_FLOAT16
        steps = max([int((each > smooth).sum()) for each in moves], default=0)
        is_step = error.max(initial=0.0) <= 2 * moved.max(initial=0.0)
        if steps and is_step and wrong.sum() <= MAX_STEPS * steps + MAX_ROUNDED_OTHERWISE * wrong.size:
            wrong = np.zeros(error.shape, bool)  # a quantizer takes as many values to another step in the original
        if on_purpose and not wrong.any():
            tight = RELATIVE["float32"] * rounding + NOISE[""] * noise + 1e-30
            many = (error > tight).sum()
            wrong = error > tight if many > 1 + MAX_ROUNDED_OTHERWISE * error.size else wrong
        if wrong.any():
            worst = np.unravel_index(np.argmax(np.where(wrong, error, 0.0)), error.shape)
            values = f"is {found[worst]}, not {expected[worst]}"
            count = f"{int(wrong.sum())} of {wrong.size} values"
            return f"{values}: off by {error[worst]:.3g}, allowed {allowed[worst]:.3g}, {count}"
    return None


def is_wrong(want: Any, exact: Any) -> Any:
    """Return which values of an original are themselves not what they are in float64, by a hundredth or in kind."""
    if not isinstance(exact, np.ndarray) or exact.shape != want.shape or want.dtype.kind not in "fV":
        return np.zeros(np.shape(want), bool)
    with np.errstate(all="ignore"):
        one, other = want.astype(np.float64), exact.astype(np.float64)
        return (_kinds(one) != _kinds(other)) | (np.abs(one - other) > np.abs(other) / 100)


def _kinds(values: Any) -> Any:
    """Return what kind of number each is: finite, NaN, or infinite with either sign."""
    return np.where(np.isfinite(values), 0, np.where(np.isnan(values), 1, 2 + (values > 0)))


def _typical(values: Any, where: Any) -> float:
    """Return the median of some values: a few large ones must not hide what others are off."""
    return float(np.median(values[where])) if where.any() else 0.0


def _first(array: Any, where: Any) -> Any:
    return array[where].reshape(-1)[0]
