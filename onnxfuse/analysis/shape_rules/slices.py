"""Shape rules of operators that slice, concatenate or gather elements along axes."""

from __future__ import annotations

from typing import TypeAlias

from onnx import TensorProto

from onnxfuse.algebra.bounds import lower_bound, maximum, minimum, upper_bound
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.rules import (
    RuleTable,
    ShapeRule,
    axes_parameter,
    input_shape,
    integers,
    normalize_axis,
    operands_of,
)
from onnxfuse.analysis.shape_info import CannotInfer, PartialShape, ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.node import Node
from onnxfuse.ir.slices import TO_THE_END, is_ambiguous_end

RULES = RuleTable[ShapeRule]()
SliceBounds: TypeAlias = "tuple[Size | None, Size | None, Size]"  # (start, end, step); None: not known


@RULES.rule("Concat", "com.microsoft::QLinearConcat")
def _concat(shapes: ShapeInfo, node: Node) -> Shape:
    rank = len(input_shape(shapes, node, operands_of(node)[0]))
    operands = [input_shape(shapes, node, i, rank) for i in operands_of(node)]
    axis = normalize_axis(int_attribute(node, "axis", 1), rank)
    total: Size = 0
    for shape in operands:
        total = total + shape[axis]
    return tuple(total if i == axis else _best_known([shape[i] for shape in operands]) for i in range(rank))


def _best_known(sizes: list[Size]) -> Size:
    """Return the most specific of sizes that must be equal: a number, else a named size, else an unknown one."""
    return min(sizes, key=lambda size: (not isinstance(size, int), str(size).startswith("?")))


@RULES.rule("Split")
def _split(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    shape = input_shape(shapes, node)
    axis = normalize_axis(int_attribute(node, "axis", 0), len(shape))
    try:
        sizes: PartialShape = split_sizes(shapes, node, shape[axis])
    except CannotInfer:
        sizes = [None] * len(node.outputs)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def split_sizes(shapes: ShapeInfo, node: Node, size: Size) -> list[Size]:
    """Return the sizes of the parts into which a `Split` divides an axis of this size."""
    given = integers(shapes, node, "split")
    if given is not None:
        return given
    count = int_attribute(node, "num_outputs", len(node.outputs))
    if count < 1:
        raise CannotInfer
    chunk = (size + count - 1) // count
    return [chunk] * (count - 1) + [size - chunk * (count - 1)]


@RULES.rule("Slice")
def _slice(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    source = input_shape(shapes, node)
    try:
        bounds = slice_bounds(shapes, node, source)
    except CannotInfer:
        axes = axes_parameter(shapes, node, len(source)) or range(len(source))
        return tuple(None if i in axes else size for i, size in enumerate(source))
    result: list[Size | None] = list(source)
    for axis, (start, end, step) in bounds.items():
        if is_ambiguous_end(end, step):
            result[axis] = shapes.unknown(node.outputs[0].name, axis)
        else:
            result[axis] = _slice_size(source[axis], start, end, step)
    return tuple(result)


def slice_bounds(shapes: ShapeInfo, node: Node, shape: Shape) -> dict[int, SliceBounds]:
    """Return the start, end and step of a `Slice`, by axis."""
    starts, ends = _integers_if_known(shapes, node, "starts"), _integers_if_known(shapes, node, "ends")
    if starts is None and ends is None:
        raise CannotInfer
    count = len(starts or ends or ())
    axes = axes_parameter(shapes, node, len(shape)) or list(range(count))
    steps = integers(shapes, node, "steps") or [1] * count
    unknown: list[Size | None] = [None] * count
    if not count == len(axes) == len(steps) == len(starts or unknown) == len(ends or unknown):
        raise CannotInfer
    bounds = zip(axes, starts or unknown, ends or unknown, steps, strict=True)
    return {axis: (_clamped_start(start, shape[axis], step), end, step) for axis, start, end, step in bounds}


def _integers_if_known(shapes: ShapeInfo, node: Node, name: str) -> list[Size] | None:
    try:
        return integers(shapes, node, name)
    except CannotInfer:
        return None


def _clamped_start(start: Size | None, size: Size, step: Size) -> Size | None:
    """Return the start of a Slice; if the step is negative, at least `-size`.

    ONNX clamps a smaller start to the first element; Python would return an empty slice for it.
    """
    if isinstance(start, int) and isinstance(size, int) and isinstance(step, int) and step < 0:
        return max(start, -size)
    return start


def _slice_size(size: Size, start: Size | None, end: Size | None, step: Size) -> Size | None:
    if start is None or end is None or not isinstance(step, int):
        return None
    if isinstance(size, int) and isinstance(start, int) and isinstance(end, int):
        return len(range(size)[start:end:step])
    if step < 0:
        is_from_end = isinstance(start, int) and (start == -1 or start >= TO_THE_END)
        is_to_start = isinstance(end, int) and end <= -TO_THE_END
        return size if step == -1 and is_from_end and is_to_start else None
    first, last = _position(start, size), _position(end, size)
    if first is None or last is None:
        return None
    if (start, end) == (0, 1) or (start == -1 and last == size):
        return minimum(1, size)  # `minimum` instead of 1: an empty axis gives no element
    length, low = last - first, lower_bound(last - first)
    # If x has s elements, x[1:] is assumed to have s - 1 elements.  This number is wrong (-1) only for s = 0, which is
    # assumed not to occur.
    return ((length if low is not None and low >= -1 else maximum(0, length)) + step - 1) // step


def _position(bound: Size, size: Size) -> Size | None:
    """Return a nonnegative slice bound, clamped to the axis's size; None where the sign of `bound` is not known."""
    low, high = lower_bound(bound), upper_bound(bound)
    if low is not None and low >= 0:
        return size if low >= TO_THE_END or bound == size else bound if bound == 1 else minimum(bound, size)
    if high is not None and high <= 0:
        return size + bound if bound == -1 or (lower_bound(size + bound) or 0) >= 0 else maximum(0, size + bound)
    return None


@RULES.rule("Gather")
def _gather(shapes: ShapeInfo, node: Node) -> Shape:
    data, indices = input_shape(shapes, node), input_shape(shapes, node, 1)
    axis = normalize_axis(int_attribute(node, "axis", 0), len(data))
    return (*data[:axis], *indices, *data[axis + 1 :])


@RULES.rule("com.microsoft::GatherBlockQuantized")
def _gather_block_quantized(shapes: ShapeInfo, node: Node) -> Shape:
    data, indices = input_shape(shapes, node), input_shape(shapes, node, 1)
    axis = normalize_axis(int_attribute(node, "gather_axis", 0), len(data))
    if shapes.dtype(node.inputs[0]) == TensorProto.UINT8:  # a byte holds several elements of the last axis
        bits = int_attribute(node, "bits", 4)
        if bits not in (2, 4, 8):
            raise CannotInfer
        data = (*data[:-1], data[-1] * (8 // bits))
    return (*data[:axis], *indices, *data[axis + 1 :])


@RULES.rule("GatherElements")
def _gather_elements(shapes: ShapeInfo, node: Node) -> Shape:
    return input_shape(shapes, node, 1)


@RULES.rule("GatherND")
def _gather_nd(shapes: ShapeInfo, node: Node) -> Shape:
    data, indices = input_shape(shapes, node), input_shape(shapes, node, 1)
    depth = indices[-1]
    if not isinstance(depth, int):
        raise CannotInfer
    return (*indices[:-1], *data[int_attribute(node, "batch_dims", 0) + depth :])
