"""Draw masks again, with rows that keep nothing, only their end, or everything.

In the masks that are drawn first, each row keeps its first element.  But a causal mask with left padding masks some
rows fully, and attention treats fully masked rows differently from all others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final, Literal, TypeAlias

import numpy as np
import onnx

from onnxfuse.ir.dtypes import FLOAT_NAMES, Array
from onnxfuse.verify.input_uses import added_to_scores, integer_uses
from onnxfuse.verify.inputs import is_mask, model_inputs

KINDS: Final = 3  # kinds of rows: fully masked, only the end kept, nothing masked
# The lowest finite number by dtype, used in additive masks; other dtypes use float32's.
LOWEST: Final[Mapping[str, float]] = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}
LOWEST_FLOAT32: Final = float(np.finfo(np.float32).min)
Mask: TypeAlias = Literal["flags", "added"]  # booleans, or numbers that are added to scores: 0 or the lowest number


def mask_inputs(model: onnx.ModelProto, given: Collection[str]) -> dict[str, Mask]:
    """Return the kind of mask of each input that is a mask, by the input's name; `given` inputs are left out."""
    uses, added = integer_uses(model), added_to_scores(model)
    found: dict[str, Mask] = {}
    for each in model_inputs(model):
        if each.name in given or not each.dims:
            continue
        if each.dtype.name in FLOAT_NAMES and each.name in added:
            found[each.name] = "added"
        elif each.dtype.kind == "b" or is_mask(each, uses):
            found[each.name] = "flags"
    return found


def with_mask_rows(feeds: Mapping[str, Array], masks: Mapping[str, Mask]) -> Iterator[dict[str, Array]]:
    """Yield inputs with new masks several times, until even the mask with the fewest rows has had each kind of row."""
    sizes = {name: _rows(feeds[name].shape) for name in masks}
    known = {name: size for name, size in sizes.items() if size is not None}
    fewest = min((rows for rows, _ in known.values()), default=0)
    for draw in range(math.ceil(KINDS / fewest) if fewest else 0):
        yield dict(feeds) | {
            name: _drawn(feeds[name], masks[name], *size, draw * fewest) for name, size in known.items()
        }


def _rows(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the number of rows of a mask and the elements per row; None for an empty mask, and for a scalar.

    Rows lie along the last axis, or along the axis before it if the last of three or more axes has size 1.
    """
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return (math.prod(shape[:-1]), shape[-1]) if shape and 0 not in shape else None


def _drawn(value: Array, mask: Mask, rows: int, columns: int, first: int) -> Array:
    """Return a mask whose row i has the kind (first + i) % KINDS: 0 is fully masked, 1 keeps its end, 2 keeps all."""
    kept = np.array([0, (columns + 1) // 2, columns])[(first + np.arange(rows)) % KINDS]
    left = (np.arange(columns) >= columns - kept[:, None]).reshape(value.shape)
    if mask == "flags":
        return left.astype(value.dtype)
    lowest = LOWEST.get(value.dtype.name, LOWEST_FLOAT32)
    return np.where(left, 0.0, lowest).astype(value.dtype)
