"""Slice, Split and Gather, described by the range of elements that they take along each axis of a tensor."""

from __future__ import annotations

from typing import TypeAlias

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.rules import input_value, normalize_axis
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.slices import slice_bounds, split_sizes
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.node import Node, Tensor, op_of

AxisRanges: TypeAlias = dict[int, tuple[int, int]]  # axis -> (index of the first element, number of elements)


def slice_ranges(shapes: ShapeInfo, node: Node, output: Tensor) -> AxisRanges:
    """Return the ranges, by axis, that `output` of a Slice, Split or Gather takes from the node's first input.

    Raises CannotInfer unless `output` is known to hold a nonempty range of adjacent elements along each axis.
    """
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        raise CannotInfer
    op = op_of(node)
    if op == "Slice":
        bounds = slice_bounds(shapes, node, shape).items()
        return {axis: _slice_range(shape[axis], start, end, step) for axis, (start, end, step) in bounds}
    axis = normalize_axis(int_attribute(node, "axis", 0), len(shape))
    if op == "Split":
        sizes = split_sizes(shapes, node, shape[axis])
        index = next(i for i, other in enumerate(node.outputs) if other is output)
        counts = [size for size in sizes[: index + 1] if isinstance(size, int) and size]
        if len(counts) <= index:
            raise CannotInfer
        return {axis: (sum(counts[:-1]), counts[-1])}
    index_value, size = input_value(shapes, node, 1), shape[axis]
    if index_value.size != 1 or not isinstance(size, int) or not size:
        raise CannotInfer
    index = index_value.reshape(()).item()
    if not isinstance(index, int):
        raise CannotInfer
    return {axis: (index % size, 1)}


def _slice_range(size: Size, start: Size | None, end: Size | None, step: Size) -> tuple[int, int]:
    if not isinstance(size, int) or not isinstance(start, int) or not isinstance(end, int) or step != 1:
        raise CannotInfer
    indices = range(size)[start:end]
    if not indices:
        raise CannotInfer
    return indices.start, len(indices)
