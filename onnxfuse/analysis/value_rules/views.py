"""Value rules of operators that create, move or select elements without computing new numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onnxfuse.algebra.sizes import product
from onnxfuse.analysis.rules import RuleTable, ValueRule, input_shape, input_value, integers, normalize_axis
from onnxfuse.analysis.shape_info import MAX_VALUE_ELEMENTS, CannotInfer, ShapeInfo, exact_elements
from onnxfuse.analysis.shape_rules.fills import range_length
from onnxfuse.analysis.shape_rules.slices import slice_bounds, split_sizes
from onnxfuse.ir.attributes import flag_attribute, int_attribute, ints_attribute, tensor_attribute
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.node import Node
from onnxfuse.ir.slices import is_ambiguous_end

RULES = RuleTable[ValueRule]()


def object_array(value: object) -> Array:
    """Return an array of Python objects from a list, an array, or a single object."""
    return np.asarray(value, dtype=object)


def static_shape(shape: Array) -> tuple[int, ...]:
    """Return a shape as a tuple of ints.  Raises CannotInfer if it has symbols or too many elements."""
    sizes: list[int] = shape.tolist()
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > MAX_VALUE_ELEMENTS:
        raise CannotInfer
    return tuple(sizes)


@RULES.rule("Identity", "Floor", "Ceil", "Round")
def _same(shapes: ShapeInfo, node: Node) -> Array:
    return input_value(shapes, node)


@RULES.rule("Shape")
def _shape(shapes: ShapeInfo, node: Node) -> Array:
    axes = slice(int_attribute(node, "start", 0), int_attribute(node, "end"))
    return object_array(list(input_shape(shapes, node)[axes]))


@RULES.rule("Size")
def _size(shapes: ShapeInfo, node: Node) -> Array:
    return object_array(product(input_shape(shapes, node)))


@RULES.rule("Constant")
def _constant(shapes: ShapeInfo, node: Node) -> Array:
    tensor = tensor_attribute(node, "value")
    if tensor is not None:
        found = shapes.exact_constant(tensor)
    elif len(node.attrs) == 1:
        (value,) = node.attrs.values()
        found = exact_elements(np.asarray(value)) if not isinstance(value, str) else None
    else:  # the node has a sparse value, which graphsurgeon leaves out
        found = None
    if found is None:
        raise CannotInfer
    return found


@RULES.rule("ConstantOfShape")
def _constant_of_shape(shapes: ShapeInfo, node: Node) -> Array:
    tensor = tensor_attribute(node, "value")
    fill = object_array([0]) if tensor is None else shapes.exact_constant(tensor)
    if fill is None:
        raise CannotInfer
    return np.broadcast_to(fill.reshape(()), static_shape(input_value(shapes, node)))


@RULES.rule("Expand")
def _expand(shapes: ShapeInfo, node: Node) -> Array:
    value = input_value(shapes, node)
    return np.broadcast_to(
        value, np.broadcast_shapes(value.shape, static_shape(input_value(shapes, node, 1).reshape(-1)))
    )


@RULES.rule("Reshape")
def _reshape(shapes: ShapeInfo, node: Node) -> Array:
    target = static_shape(object_array(integers(shapes, node, "shape")))
    value = input_value(shapes, node)
    if not flag_attribute(node, "allowzero", False):
        target = tuple(value.shape[i] if size == 0 else size for i, size in enumerate(target))
    return _reshaped(value, target)


def _reshaped(value: Array, shape: Sequence[int]) -> Array:
    """Return a value in another shape.  Raises CannotInfer for a shape of another number of elements."""
    try:
        return value.reshape(shape)
    except ValueError:
        raise CannotInfer from None


@RULES.rule("Flatten", "Squeeze", "Unsqueeze")
def _regroup(shapes: ShapeInfo, node: Node) -> Array:
    shape = shapes.shape(node.outputs[0])
    if shape is None:
        raise CannotInfer
    return _reshaped(input_value(shapes, node), static_shape(object_array(list(shape))))


@RULES.rule("Transpose")
def _transpose(shapes: ShapeInfo, node: Node) -> Array:
    return input_value(shapes, node).transpose(ints_attribute(node, "perm"))


@RULES.rule("Concat")
def _concat(shapes: ShapeInfo, node: Node) -> Array:
    values = [input_value(shapes, node, i) for i in range(len(node.inputs))]
    return np.concatenate(values, axis=int_attribute(node, "axis", 1))


@RULES.rule("Gather")
def _gather(shapes: ShapeInfo, node: Node) -> Array:
    indices = input_value(shapes, node, 1)
    if not all(isinstance(index, int) for index in indices.reshape(-1)):
        raise CannotInfer
    try:
        taken = input_value(shapes, node).take(indices.astype(np.int64), axis=int_attribute(node, "axis", 0))
    except IndexError:  # onnxruntime refuses such an index, too
        raise CannotInfer from None
    return object_array(taken)


@RULES.rule("Slice")
def _slice(shapes: ShapeInfo, node: Node) -> Array:
    value = input_value(shapes, node)
    slices = [slice(None)] * value.ndim
    for axis, (start, end, step) in slice_bounds(shapes, node, value.shape).items():
        if not isinstance(start, int) or not isinstance(end, int) or not isinstance(step, int):
            raise CannotInfer
        if is_ambiguous_end(end, step):
            raise CannotInfer
        slices[axis] = slice(start, None if step < 0 and end < -value.shape[axis] else end, step)
    return value[tuple(slices)]


@RULES.rule("Split")
def _split(shapes: ShapeInfo, node: Node) -> list[Array]:
    value = input_value(shapes, node)
    axis = normalize_axis(int_attribute(node, "axis", 0), value.ndim)
    ends = np.cumsum(static_shape(object_array(split_sizes(shapes, node, value.shape[axis]))))
    return np.split(value, ends[:-1], axis=axis)


@RULES.rule("Tile")
def _tile(shapes: ShapeInfo, node: Node) -> Array:
    value, repeats = input_value(shapes, node), static_shape(input_value(shapes, node, 1))
    if value.size * math.prod(repeats) > MAX_VALUE_ELEMENTS:
        raise CannotInfer
    return np.tile(value, repeats)


@RULES.rule("OneHot")
def _one_hot(shapes: ShapeInfo, node: Node) -> Array:
    indices, depths, values = (input_value(shapes, node, i) for i in range(3))
    is_known = all(isinstance(number, int) for number in (*indices.flat, *depths.flat))
    if not is_known or depths.size != 1 or values.shape != (2,) or int_attribute(node, "axis", -1) != -1:
        raise CannotInfer
    depth: int = depths.reshape(-1)[0]
    if not 0 <= indices.size * depth <= MAX_VALUE_ELEMENTS:
        raise CannotInfer
    off, on = values
    found = [on if n in (i, i - depth) else off for n in indices.flat for i in range(depth)]
    return object_array(found).reshape(*indices.shape, depth)


@RULES.rule("Range")
def _range(shapes: ShapeInfo, node: Node) -> Array:
    start, limit, delta = (input_value(shapes, node, i).item() for i in range(3))
    count = range_length(start, limit, delta)
    if not isinstance(count, int) or count > MAX_VALUE_ELEMENTS:
        raise CannotInfer
    return object_array([start + i * delta for i in range(count)])
