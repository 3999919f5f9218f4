"""Value rules of shape arithmetic: they compute sums, products, comparisons, casts and reductions of sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import numpy as np
from onnx import TensorProto

from onnxfuse.algebra.bounds import lower_bound, maximum, minimum, upper_bound
from onnxfuse.algebra.sizes import Size, divide, product
from onnxfuse.analysis.rules import (
    RuleTable,
    ValueRule,
    axes_parameter,
    has_input,
    input_shape,
    input_value,
    integers,
    normalize_axis,
)
from onnxfuse.analysis.shape_info import MAX_VALUE_ELEMENTS, CannotInfer, ShapeInfo
from onnxfuse.analysis.value_rules.views import object_array, static_shape
from onnxfuse.ir.attributes import flag_attribute, int_attribute
from onnxfuse.ir.dtypes import EXACT_INTEGERS, INTEGER_RANGES, Array
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Node, is_constant, op_of, producer

RULES = RuleTable[ValueRule]()
# Dtypes in which shape arithmetic is followed.  Sizes in float32 are assumed to be below 2**24.
SHAPE_DTYPES = frozenset({TensorProto.INT64, TensorProto.INT32, TensorProto.FLOAT, TensorProto.DOUBLE})
_DECIDED_BY = {"And": False, "Or": True}  # operator -> the operand that decides its result


def _divide_toward_zero(a: Size, b: Size) -> Size:
    """Return the quotient of two integers rounded toward zero, as in ONNX."""
    low, low_divisor = lower_bound(a), lower_bound(b)
    if b == 0:
        raise CannotInfer
    if low is not None and low >= 0 and low_divisor is not None and low_divisor >= 0:
        return a // b
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return _divide_exactly(a, b)


def _divide_exactly(a: Size, b: Size) -> Size:
    quotient = divide(a, b)
    if quotient is None:
        raise CannotInfer
    return quotient


def _is_less(a: Size, b: Size) -> bool:
    low, high = lower_bound(a - b), upper_bound(a - b)
    if (high is None or high >= 0) and (low is None or low < 0):
        raise CannotInfer
    return high is not None and high < 0


def _is_equal(a: Size, b: Size) -> bool:
    if a == b:
        return True
    low, high = lower_bound(a - b), upper_bound(a - b)
    if (low is not None and low > 0) or (high is not None and high < 0):
        return False
    raise CannotInfer


def _power(a: Size, b: Size) -> Size:
    if not isinstance(b, int) or not 0 <= b <= 4:
        raise CannotInfer
    return product([a] * b)


def _modulo(a: Size, b: Size) -> Size:
    if b == 0:
        raise CannotInfer
    return a % b


def _absolute(a: Size) -> Size:
    low, high = lower_bound(a), upper_bound(a)
    if low is not None and low >= 0:
        return a
    if high is None or high > 0:
        raise CannotInfer
    return -a


def _sign(a: Size) -> int:
    return 0 if _is_equal(a, 0) else -1 if _is_less(a, 0) else 1


_ELEMENTWISE: dict[str, Callable[..., object]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divide_toward_zero, "Mod": _modulo,
    "Pow": _power, "Max": maximum, "Min": minimum, "Neg": operator.neg, "Abs": _absolute, "Sign": _sign,
    "Equal": _is_equal, "Less": _is_less, "Greater": lambda a, b: _is_less(b, a), "Not": operator.not_,
    "LessOrEqual": lambda a, b: not _is_less(b, a), "GreaterOrEqual": lambda a, b: not _is_less(a, b),
    "And": lambda a, b: a and b, "Or": lambda a, b: a or b, "Xor": operator.ne,
    "Where": lambda condition, a, b: a if condition else b, "Sum": lambda *sizes: sum(sizes),
}  # fmt: skip


@RULES.rule(*_ELEMENTWISE)
def _elementwise(shapes: ShapeInfo, node: Node) -> Array:
    op = op_of(node)
    function = _ELEMENTWISE[op]
    if op == "Where":
        return _where(shapes, node)
    if op in _DECIDED_BY and (decided := _decided(shapes, node)) is not None:
        return decided
    if op == "Mod" and int_attribute(node, "fmod", 0):
        raise CannotInfer
    if op == "Div" and shapes.dtype(node.outputs[0]) not in INTEGER_RANGES:
        function = _divide_exactly
    values = [input_value(shapes, node, i) for i in range(len(node.inputs))]
    if op == "Sum":
        _require_exact_in_any_order(shapes, node, sum(_map(abs, _numbers(value)) for value in values))
    return _map(function, *values)


def _decided(shapes: ShapeInfo, node: Node) -> Array | None:
    """Return the value of an And with an operand that is false everywhere, or of an Or with one that is true."""
    number, shape = _DECIDED_BY[op_of(node)], shapes.shape(node.outputs[0])
    values = [shapes.value(each) for each in node.inputs]
    if shape is None or not any(value is not None and value.size and np.all(value == number) for value in values):
        return None
    return object_array(np.full(static_shape(object_array(list(shape))), number))


def _numbers(value: Array) -> Array:
    """Return the elements, with each element that is not a number replaced by 0."""
    return _map(lambda size: size if isinstance(size, int) else 0, value)


def _require_exact_in_any_order(shapes: ShapeInfo, node: Node, largest: object) -> None:
    """Raise CannotInfer if floating point could round an intermediate result, whose magnitude is at most `largest`.

    Integers need no such check: a final result that fits is correct even if intermediate results wrapped around.
    """
    limit = EXACT_INTEGERS.get(shapes.dtype(node.outputs[0]))
    if limit is not None and np.any(object_array(largest) > limit):
        raise CannotInfer


def _map(function: Callable[..., object], *values: Array) -> Array:
    """Return an array with a function's result for each element of the broadcast arrays."""
    if math.prod(np.broadcast_shapes(*(value.shape for value in values))) > MAX_VALUE_ELEMENTS:
        raise CannotInfer
    return object_array(np.frompyfunc(function, len(values), 1)(*values))


def _where(shapes: ShapeInfo, node: Node) -> Array:
    """Return the value of a `Where`; if the condition is uniform, only the selected branch needs a known value."""
    condition = input_value(shapes, node)
    outcomes = set(condition.reshape(-1).tolist())
    if len(outcomes) == 1:
        chosen, other = (1, 2) if outcomes == {True} else (2, 1)
        shape = static_shape(object_array(list(input_shape(shapes, node, other))))
        value = input_value(shapes, node, chosen)
        return np.broadcast_to(value, np.broadcast_shapes(condition.shape, shape, value.shape))
    return _map(_ELEMENTWISE["Where"], condition, input_value(shapes, node, 1), input_value(shapes, node, 2))


@RULES.rule("Cast", "CastLike")
def _cast(shapes: ShapeInfo, node: Node) -> Array:
    to = int_attribute(node, "to")
    if to is None:
        to = shapes.dtype(node.inputs[1])
    value = _limited(shapes, node) if to in INTEGER_RANGES else None
    if value is None:
        value = input_value(shapes, node)
    if to == TensorProto.BOOL:
        return _map(lambda size: not _is_equal(size, 0), value)
    if to not in SHAPE_DTYPES:
        raise CannotInfer
    return _map(lambda size: int(size) if isinstance(size, int) else size, value)


def _limited(shapes: ShapeInfo, cast: Node) -> Array | None:
    """Return the value of `Cast(Max(Cast(sizes), limits))` with limits in float32, as tf2onnx writes ends of Slices.

    The limits are whole numbers such as 1e9, and the sizes are assumed to be below 2**24, as all sizes in float32.
    """
    node = producer(cast.inputs[0])
    if node is None or op_of(node) not in ("Max", "Min") or len(node.inputs) != 2:
        return None
    made, limits = producer(node.inputs[0]), node.inputs[1]
    if made is None or op_of(made) != "Cast" or not is_constant(limits):
        return None
    numbers, sizes = constant_value(shapes.graph, limits), shapes.value(made.inputs[0])
    is_whole = numbers.size <= MAX_VALUE_ELEMENTS and bool(np.all(np.abs(numbers) < 2**31) and np.all(numbers % 1 == 0))
    if sizes is None or not is_whole:
        return None
    return _map(_ELEMENTWISE[op_of(node)], sizes, numbers.astype(np.int64).astype(object))


_REDUCTIONS: dict[str, Callable[..., object]] = {
    "ReduceProd": operator.mul, "ReduceSum": operator.add, "ReduceMax": maximum, "ReduceMin": minimum,
}  # fmt: skip


@RULES.rule(*_REDUCTIONS)
def _reduce(shapes: ShapeInfo, node: Node) -> Array:
    value = input_value(shapes, node)
    axes = axes_parameter(shapes, node, value.ndim)
    if not axes and flag_attribute(node, "noop_with_empty_axes", False):
        return value
    op = op_of(node)
    if op in ("ReduceProd", "ReduceSum"):
        magnitudes = [abs(number) for number in _numbers(value).flat]
        _require_exact_in_any_order(
            shapes, node, sum(magnitudes) if op == "ReduceSum" else math.prod(max(1, each) for each in magnitudes)
        )
    reduction, keepdims = np.frompyfunc(_REDUCTIONS[op], 2, 1), flag_attribute(node, "keepdims", True)
    for axis in sorted(axes or range(value.ndim), reverse=True):
        if value.shape[axis] == 0:
            raise CannotInfer
        value = object_array(reduction.reduce(value, axis=axis, keepdims=keepdims))
    return value


@RULES.rule("CumSum")
def _cumsum(shapes: ShapeInfo, node: Node) -> Array:
    value = input_value(shapes, node)
    axis = integers(shapes, node, "axis")
    if axis is None or int_attribute(node, "exclusive", 0) or int_attribute(node, "reverse", 0):
        raise CannotInfer
    return object_array(np.add.accumulate(value, axis=normalize_axis(axis[0], value.ndim)))


@RULES.rule("Clip")
def _clip(shapes: ShapeInfo, node: Node) -> Array:
    value = input_value(shapes, node)
    if shapes.graph.opset < 11:
        raise CannotInfer
    value = _map(maximum, value, input_value(shapes, node, 1)) if has_input(node, 1) else value
    return _map(minimum, value, input_value(shapes, node, 2)) if has_input(node, 2) else value
