"""Draw masks again, with rows that leave nothing, the end, or all: no row of the first draws is empty.

Attention computes something else of a row without a key that counts than of any other one, and padding on the left
makes such rows under a causal mask.
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
# The numbers in added masks; masks of other dtypes have float32's.
LOWEST: Final[Mapping[str, float]] = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}
LOWEST_FLOAT32: Final = float(np.finfo(np.float32).min)
Mask: TypeAlias = Literal["flags", "added"]  # true or 1 where something is left, or the reverse; 0 there, or the lowest


def mask_inputs(model: onnx.ModelProto, given: Collection[str]) -> dict[str, Mask]:
    """Return the inputs of a model that are masks and are not given, by name."""
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
    """Yield inputs whose masks have rows of all kinds, as often as the mask with the fewest rows needs to have them."""
    sizes = {name: _rows(feeds[name].shape) for name in masks}
    known = {name: size for name, size in sizes.items() if size is not None}
    fewest = min((rows for rows, _ in known.values()), default=0)
    for draw in range(math.ceil(KINDS / fewest) if fewest else 0):
        yield dict(feeds) | {
            name: _drawn(feeds[name], masks[name], *size, draw * fewest) for name, size in known.items()
        }


def _rows(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return how many rows of how many elements a mask has; None for one without elements, and for a number.

    Where the last one of more than two axes has size 1, rows lie along the one before, as in (batch, length, 1).
    """
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return (math.prod(shape[:-1]), shape[-1]) if shape and 0 not in shape else None


def _drawn(value: Array, mask: Mask, rows: int, columns: int, first: int) -> Array:
    """Return a mask whose row i is of the kind first + i."""
    kept = np.array([0, (columns + 1) // 2, columns])[(first + np.arange(rows)) % KINDS]
    left = (np.arange(columns) >= columns - kept[:, None]).reshape(value.shape)
    if mask == "flags":
        return left.astype(value.dtype)
    lowest = LOWEST.get(value.dtype.name, LOWEST_FLOAT32)
    return np.where(left, 0.0, lowest).astype(value.dtype)
