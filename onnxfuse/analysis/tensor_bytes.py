"""How many bytes a tensor has, with assumed sizes for dynamic dims."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import helper

from onnxfuse.analysis.dims import Size, evaluate, symbols

ASSUMED_BATCH, ASSUMED_SIZE = 1, 128  # of dynamic dims: of those whose name contains "batch", and of the others

FREE_OPS = {"Constant", "Shape", "Size", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}  # move no data


def tensor_bytes(shape: Sequence[Size] | None, dtype: int, first_axis: int = 0) -> int:
    """Return the bytes of a tensor of this shape, leaving out the axes before `first_axis`.

    `dtype` is an onnx.TensorProto.DataType.  A tensor of unknown rank or dtype counts as 0 bytes, dynamic dims as
    assumed.
    """
    if shape is None or not dtype:
        return 0
    count = 1
    for size in shape[first_axis:]:
        assumed = {name: assumed_size(name) for name in symbols(size)}
        count *= max(evaluate(size, assumed), 0)
    return count * item_bytes(dtype)


def assumed_size(name: str) -> int:
    """Return the size that estimates assume for a dynamic dim of this name."""
    return ASSUMED_BATCH if "batch" in name.lower() else ASSUMED_SIZE


def item_bytes(dtype: int) -> int:
    """Return the bytes of an element of an onnx.TensorProto.DataType."""
    return int(helper.tensor_dtype_to_np_dtype(dtype).itemsize)
