"""Detect outputs that would hide errors, because they are all NaN, empty, masked or constant."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxfuse.ir.dtypes import FLOAT_NAMES, Array
from onnxfuse.verify.difference import MASK_MAGNITUDE, MASK_MAGNITUDES, TOLERANCES

SAMPLE = 1 << 20  # elements of a large output that are checked first: checking all takes a float64 copy
# Changes of the floating-point inputs that are tried in turn while an output hides errors.
REDRAWS: Mapping[str, tuple[float, float]] = {  # values become abs(x) * factor + addend
    "positive": (1.0, 0.1),
    "small": (0.01, 0.0),
    "large": (30.0, 1.0),
}


@dataclass(frozen=True)
class NotCompared:
    """An output or a fused node that was not compared, and why."""

    name: str
    reason: str


def what_hides(values: Sequence[object]) -> str:
    """Return why the values of an output in several runs would hide errors; "" if they can be compared."""
    arrays = [array for value in values for array in _arrays(value)]
    if not arrays or any(a.dtype == object for a in arrays):
        return ""  # maps and strings are compared exactly
    if not any(a.size for a in arrays):
        return "it is empty"
    size = sum(a.size for a in arrays)
    if size > SAMPLE and not _hidden([a.ravel()[:: size // SAMPLE] for a in arrays]):
        return ""  # if a sample of its values can be compared, the output can be
    return _hidden(arrays)


def _hidden(arrays: Sequence[Array]) -> str:
    dtype = arrays[0].dtype.name
    if dtype not in FLOAT_NAMES:
        flat = np.concatenate([a.ravel() for a in arrays])
        many = flat.size > 1 and (flat == flat[0]).all()
        return f"it is {flat[0]} for all inputs tried" if many else ""
    flat = np.concatenate([a.astype(np.float64).ravel() for a in arrays])
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return "it is NaN everywhere" if np.isnan(flat).all() else "it is infinite or NaN everywhere"
    kept = finite[np.abs(finite) < MASK_MAGNITUDES.get(dtype, MASK_MAGNITUDE)]
    if not kept.size:
        return f"it is masked everywhere, by values such as {finite[0]:.3g}"
    low, high = float(kept.min()), float(kept.max())
    scale = max(abs(low), abs(high))
    if kept.size == 1 or high - low > 2 * TOLERANCES[dtype] * scale:
        return ""
    if low == high:
        return f"it is {low:.7g} for all inputs tried"
    return f"it varies by {high - low:.1e} about {low:.7g} for all inputs tried, which is as much as rounding"


def redrawn(feeds: Mapping[str, Array], kind: str, given: Collection[str]) -> dict[str, Array]:
    """Return the floating-point inputs that are not `given`, with values changed by the entry `kind` of REDRAWS."""
    factor, offset = REDRAWS[kind]
    floats = {n: v for n, v in feeds.items() if n not in given and v.dtype.name in FLOAT_NAMES}
    return {n: (np.abs(v.astype(np.float64)) * factor + offset).astype(v.dtype) for n, v in floats.items()}


def inverted_flags(feeds: Mapping[str, Array], given: Collection[str]) -> dict[str, Array]:
    """Return the one-element boolean inputs that are not `given`, inverted: such a flag can select an If's branch."""
    return {n: np.asarray(~v) for n, v in feeds.items() if n not in given and v.dtype == np.bool_ and v.size == 1}


def _arrays(value: object) -> Iterator[Array]:
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _arrays(each)
