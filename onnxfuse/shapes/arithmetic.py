"""The values of shape arithmetic proper: sums, products, comparisons and casts of sizes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto

from onnxfuse.model.graph import Array, Node, op_of
from onnxfuse.shapes.bounds import lower_bound, maximum, minimum, upper_bound
from onnxfuse.shapes.dims import Size, divide, product
from onnxfuse.shapes.rules import Undecided, axes_in, has, number, shape_in, value_in
from onnxfuse.shapes.values import EXACT, apply, objects, plain, rule

if TYPE_CHECKING:
    from onnxfuse.shapes.inference import Shapes

FLOATS = frozenset((TensorProto.FLOAT, TensorProto.DOUBLE))


def _divided(a: Size, b: Size) -> Size:
    """Integer division, which in ONNX rounds towards zero."""
    low, low_divisor = lower_bound(a), lower_bound(b)
    if b == 0:
        raise Undecided
    if low is not None and low >= 0 and low_divisor is not None and low_divisor >= 0:
        return a // b
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return _quotient(a, b)


def _quotient(a: Size, b: Size) -> Size:
    exact = divide(a, b)
    if exact is None:
        raise Undecided
    return exact


def _less(a: Size, b: Size) -> bool:
    low, high = lower_bound(a - b), upper_bound(a - b)
    if (high is None or high >= 0) and (low is None or low < 0):
        raise Undecided
    return high is not None and high < 0


def _equal(a: Size, b: Size) -> bool:
    if a == b:
        return True
    low, high = lower_bound(a - b), upper_bound(a - b)
    if (low is not None and low > 0) or (high is not None and high < 0):
        return False
    raise Undecided


def _power(a: Size, b: Size) -> Size:
    if not isinstance(b, int) or not 0 <= b <= 4:
        raise Undecided
    return product([a] * b)


def _modulo(a: Size, b: Size) -> Size:
    if b == 0:
        raise Undecided
    return a % b


def _absolute(a: Size) -> Size:
    low, high = lower_bound(a), upper_bound(a)
    if low is not None and low >= 0:
        return a
    if high is None or high > 0:
        raise Undecided
    return -a


def _sign(a: Size) -> int:
    return 0 if _equal(a, 0) else -1 if _less(a, 0) else 1


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divided, "Mod": _modulo, "Pow": _power,
    "Max": maximum, "Min": minimum, "Neg": operator.neg, "Abs": _absolute, "Sign": _sign,
    "Equal": _equal, "Less": _less, "Greater": lambda a, b: _less(b, a), "Not": operator.not_,
    "LessOrEqual": lambda a, b: not _less(b, a), "GreaterOrEqual": lambda a, b: not _less(a, b),
    "And": lambda a, b: a and b, "Or": lambda a, b: a or b, "Xor": operator.ne,
    "Where": lambda condition, a, b: a if condition else b, "Sum": lambda *sizes: sum(sizes),
}  # fmt: skip


@rule(*_ELEMENTWISE)
def _elementwise(s: Shapes, n: Node) -> Array:
    op = op_of(n)
    function = _ELEMENTWISE[op]
    if op == "Where":
        return _where(s, n)
    if (op == "Div" and s.dtype(n.inputs[0]) in FLOATS) or (op == "Mod" and n.attrs.get("fmod")):
        function = _quotient if op == "Div" else _undecided
    return apply(function, *(value_in(s, n, i) for i in range(len(n.inputs))))


def _undecided(*_: Size) -> Size:
    raise Undecided


def _where(s: Shapes, n: Node) -> Array:
    """A branch that is taken nowhere need not be known."""
    condition = value_in(s, n)
    taken = set(condition.reshape(-1).tolist())
    if len(taken) == 1:
        place, other = (1, 2) if taken == {True} else (2, 1)
        shape, value = plain(objects(list(shape_in(s, n, other)))), value_in(s, n, place)
        return np.broadcast_to(value, np.broadcast_shapes(condition.shape, shape, value.shape))
    return apply(_ELEMENTWISE["Where"], condition, value_in(s, n, 1), value_in(s, n, 2))


@rule("Cast", "CastLike")
def _cast(s: Shapes, n: Node) -> Array:
    value = value_in(s, n)
    to = n.attrs["to"] if "to" in n.attrs else s.dtype(n.inputs[1])
    if to == TensorProto.BOOL:
        return apply(lambda size: not _equal(size, 0), value)
    value = apply(lambda size: int(size) if isinstance(size, int) else size, value)
    if to in (TensorProto.INT64, TensorProto.INT32):
        return value
    if to in FLOATS and all(abs(size) <= EXACT for size in value.reshape(-1) if isinstance(size, int)):
        return value
    raise Undecided


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "ReduceProd": operator.mul, "ReduceSum": operator.add, "ReduceMax": maximum, "ReduceMin": minimum,
}  # fmt: skip


@rule(*_REDUCTIONS)
def _reduce(s: Shapes, n: Node) -> Array:
    value = value_in(s, n)
    axes = axes_in(s, n, value.ndim)
    if not axes and n.attrs.get("noop_with_empty_axes"):
        return value
    step, keep = np.frompyfunc(_REDUCTIONS[op_of(n)], 2, 1), bool(n.attrs.get("keepdims", 1))
    for axis in sorted(axes or range(value.ndim), reverse=True):
        if value.shape[axis] == 0:
            raise Undecided
        value = objects(step.reduce(value, axis=axis, keepdims=keep))
    return value


@rule("CumSum")
def _cumsum(s: Shapes, n: Node) -> Array:
    value = value_in(s, n)
    if n.attrs.get("exclusive") or n.attrs.get("reverse"):
        raise Undecided
    axis = number(s, n, "axis")
    return objects(np.add.accumulate(value, axis=axis[0] if isinstance(axis, list) else axis))


@rule("Clip")
def _clip(s: Shapes, n: Node) -> Array:
    value = value_in(s, n)
    if s.graph.opset < 11:
        raise Undecided
    value = apply(maximum, value, value_in(s, n, 1)) if has(n, 1) else value
    return apply(minimum, value, value_in(s, n, 2)) if has(n, 2) else value
