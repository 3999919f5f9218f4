"""Shape rules of operators that take their output shape from values: constants, fills, ranges, repeats and indices."""

from __future__ import annotations

from onnxfuse.algebra.bounds import maximum
from onnxfuse.algebra.sizes import Shape, Size, product
from onnxfuse.analysis.rules import (
    RuleTable,
    ShapeRule,
    input_shape,
    input_value,
    input_vector,
    normalize_axis,
    required,
    shape_of_known_rank,
)
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.attributes import int_attribute, ints_attribute, tensor_attribute
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Node, op_of, producer

RULES = RuleTable[ShapeRule]()


@RULES.rule("Shape")
def _shape(shapes: ShapeInfo, node: Node) -> Shape:
    rank = len(input_shape(shapes, node))
    return (len(range(rank)[slice(int_attribute(node, "start", 0), int_attribute(node, "end"))]),)


@RULES.rule("Size")
def _size(shapes: ShapeInfo, node: Node) -> Shape:
    return ()


@RULES.rule("Constant")
def _constant(shapes: ShapeInfo, node: Node) -> Shape:
    tensor = tensor_attribute(node, "value")
    if tensor is not None:
        return tensor.shape
    if len(node.attrs) != 1:  # the node has a sparse value, which graphsurgeon leaves out
        raise CannotInfer
    (value,) = node.attrs.values()
    return (len(value),) if isinstance(value, list) else ()


@RULES.rule("ConstantOfShape")
def _constant_of_shape(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    try:
        return tuple(input_vector(shapes, node))
    except CannotInfer:
        return shape_of_known_rank(shapes, node, 0)


@RULES.rule("Expand")
def _expand(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    try:
        target = tuple(input_value(shapes, node, 1).reshape(-1).tolist())  # onnxruntime accepts a target of any rank
    except CannotInfer:
        return shape_of_known_rank(shapes, node, 1)
    return broadcast(shapes, input_shape(shapes, node), target)


@RULES.rule("Tile")
def _tile(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    if shapes.graph.opset < 6:
        raise CannotInfer
    try:
        repeats = input_vector(shapes, node, 1)
    except CannotInfer:
        return shape_of_known_rank(shapes, node, 1)
    return tuple(size * count for size, count in zip(input_shape(shapes, node), repeats, strict=True))


@RULES.rule("RandomNormal", "RandomUniform")
def _random(shapes: ShapeInfo, node: Node) -> Shape:
    return tuple(required(ints_attribute(node, "shape")))


@RULES.rule("Range")
def _range(shapes: ShapeInfo, node: Node) -> Shape:
    start, limit, delta = (input_value(shapes, node, i).item() for i in range(3))
    return (range_length(start, limit, delta),)


def range_length(start: Size, limit: Size, delta: Size) -> Size:
    """Return the number of elements that `Range` computes."""
    if not isinstance(delta, int) or delta == 0:
        raise CannotInfer
    span = (limit - start) * (1 if delta > 0 else -1)
    return maximum(0, (span + abs(delta) - 1) // abs(delta))


@RULES.rule("NonZero")
def _non_zero(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    """Return the shape [rank, count]; the count is known if the input is filled with a nonzero number."""
    shape = input_shape(shapes, node)
    fill = producer(node.inputs[0])
    is_nonzero = False
    if fill is not None and op_of(fill) == "ConstantOfShape":
        value = tensor_attribute(fill, "value")
        is_nonzero = value is not None and bool(constant_value(shapes.graph, value).all())
    return (len(shape), product(shape) if is_nonzero else None)


@RULES.rule("OneHot")
def _one_hot(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    shape: list[Size | None] = list(input_shape(shapes, node))
    axis = normalize_axis(int_attribute(node, "axis", -1), len(shape) + 1)
    depth = shapes.exact_value(node.inputs[1])
    shape.insert(axis, None if depth is None else depth.reshape(-1)[0])
    return tuple(shape)
