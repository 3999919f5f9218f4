"""Estimates of the bytes of tensors, with assumed sizes for dynamic dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import helper

from onnxfuse.algebra.sizes import Size, evaluate, symbols
from onnxfuse.analysis.shape_info import ShapeInfo

ASSUMED_BATCH, ASSUMED_SIZE = 1, 128  # assumed for dynamic dims whose names contain "batch", and for all others
MAX_INT64 = 2**63 - 1  # ONNX's largest size; larger integers could overflow in divisions


def tensor_bytes(shapes: ShapeInfo, shape: Sequence[Size] | None, dtype: int, first_axis: int = 0) -> int:
    """Return the bytes of a tensor of this shape, not counting the axes before `first_axis`.

    `dtype` is an onnx.TensorProto.DataType.  A tensor of unknown rank or dtype counts as 0 bytes.  For a named dynamic
    dim, `assumed_size` is used; an unknown dim is estimated by the sizes that it was computed from.
    """
    if shape is None or not dtype:
        return 0
    count = math.prod(assumed_number(shapes, size) for size in shape[first_axis:])
    return min(count * item_bytes(dtype), MAX_INT64)


def assumed_number(shapes: ShapeInfo, size: Size) -> int:
    """Return a size with assumed values for its symbols; 0 if the value is negative, or divides by 0."""
    assumed = {name: shapes.related.get(name, assumed_size(name)) for name in symbols(size)}
    try:
        return min(max(0, evaluate(size, assumed)), MAX_INT64)
    except ZeroDivisionError:
        return 0


def assumed_size(name: str) -> int:
    """Return the size that estimates assume for a dynamic dim with this name."""
    return ASSUMED_BATCH if "batch" in name.lower() else ASSUMED_SIZE


def item_bytes(dtype: int) -> int:
    """Return the bytes of one element of a dtype, given as an onnx.TensorProto.DataType."""
    return int(helper.tensor_dtype_to_np_dtype(dtype).itemsize)
