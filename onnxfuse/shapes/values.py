"""The values of small integer tensors, sizes included: what the shape arithmetic in a graph comes to.

A rule gets what is known so far and a node, and returns the value of its output (a list: of each output) as an array of
objects: int, bool, Dim.  Nothing is guessed: where an answer depends on a symbol (`s == 1`) it raises `Undecided`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from onnxfuse.model.graph import Array, Node
from onnxfuse.shapes.dims import product
from onnxfuse.shapes.rules import (
    Undecided,
    axis_of,
    numbers,
    range_length,
    shape_in,
    value_in,
)
from onnxfuse.shapes.rules_of_views import slices, split_sizes

if TYPE_CHECKING:
    from onnxfuse.shapes.inference import Shapes

ValueRule: TypeAlias = Callable[["Shapes", Node], "Array | list[Array]"]

VALUE_RULES: dict[str, ValueRule] = {}
LIMIT = 64  # elements; longer tensors are data, not shapes
EXACT = 2**24  # the integers up to here are exact in float32


def objects(value: Any) -> Array:
    """An array of Python objects of what may be a scalar."""
    return np.asarray(value, dtype=object)


def rule(*ops: str) -> Callable[[ValueRule], ValueRule]:
    """Enter a rule for these operators."""

    def enter(function: ValueRule) -> ValueRule:
        VALUE_RULES.update(dict.fromkeys(ops, function))
        return function

    return enter


def apply(function: Callable[..., Any], *values: Array) -> Array:
    """The function of every element, with broadcasting."""
    if math.prod(np.broadcast_shapes(*(value.shape for value in values))) > LIMIT:
        raise Undecided
    return objects(np.frompyfunc(function, len(values), 1)(*values))


@rule("Identity", "Floor", "Ceil", "Round")
def _same(s: Shapes, n: Node) -> Array:
    return value_in(s, n)


@rule("Shape")
def _shape(s: Shapes, n: Node) -> Array:
    return objects(list(shape_in(s, n)[slice(n.attrs.get("start", 0), n.attrs.get("end"))]))


@rule("Size")
def _size(s: Shapes, n: Node) -> Array:
    return objects(product(shape_in(s, n)))


@rule("Constant")
def _constant(s: Shapes, n: Node) -> Array:
    if "value" in n.attrs:
        found = s.constant(n.attrs["value"])
    else:
        (value,) = n.attrs.values()
        found = exact(np.asarray(value)) if not isinstance(value, str) else None
    if found is None:
        raise Undecided
    return found


def exact(value: Array) -> Array | None:
    """A number array as objects; None where it is long, or has anything but integers."""
    if value.size > LIMIT or value.dtype.kind not in "biuf":
        return None
    if value.dtype.kind == "f":
        whole = value.astype(np.float64)
        if not np.all(np.isfinite(whole)) or np.any(whole != np.floor(whole)) or np.any(np.abs(whole) > EXACT):
            return None
        value = whole.astype(np.int64)
    return objects(value.tolist())


@rule("ConstantOfShape")
def _filled(s: Shapes, n: Node) -> Array:
    fill = s.constant(n.attrs["value"]) if "value" in n.attrs else objects([0])
    if fill is None:
        raise Undecided
    return np.broadcast_to(fill.reshape(()), plain(value_in(s, n)))


@rule("Expand")
def _expand(s: Shapes, n: Node) -> Array:
    value = value_in(s, n)
    return np.broadcast_to(value, np.broadcast_shapes(value.shape, plain(value_in(s, n, 1))))


def plain(shape: Array) -> tuple[int, ...]:
    """A shape that is all numbers, and small."""
    sizes: list[int] = shape.tolist()
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > LIMIT:
        raise Undecided
    return tuple(sizes)


@rule("Reshape")
def _reshape(s: Shapes, n: Node) -> Array:
    target = plain(objects(numbers(s, n, "shape")))
    value = value_in(s, n)
    if not n.attrs.get("allowzero"):
        target = tuple(value.shape[i] if size == 0 else size for i, size in enumerate(target))
    return value.reshape(target)


@rule("Flatten", "Squeeze", "Unsqueeze")
def _regroup(s: Shapes, n: Node) -> Array:
    shape = s.shape(n.outputs[0])
    if shape is None:
        raise Undecided
    return value_in(s, n).reshape(plain(objects(list(shape))))


@rule("Transpose")
def _transpose(s: Shapes, n: Node) -> Array:
    return value_in(s, n).transpose(n.attrs.get("perm"))


@rule("Concat")
def _concat(s: Shapes, n: Node) -> Array:
    return np.concatenate([value_in(s, n, i) for i in range(len(n.inputs))], axis=n.attrs.get("axis", 1))


@rule("Gather")
def _gather(s: Shapes, n: Node) -> Array:
    indices = value_in(s, n, 1)
    if not all(isinstance(index, int) for index in indices.reshape(-1)):
        raise Undecided
    return objects(value_in(s, n).take(indices.astype(np.int64), axis=n.attrs.get("axis", 0)))


@rule("Slice")
def _slice(s: Shapes, n: Node) -> Array:
    value = value_in(s, n)
    cut = [slice(None)] * value.ndim
    for axis, bounds in slices(s, n, value.shape).items():
        if not all(isinstance(bound, int) for bound in bounds):
            raise Undecided
        start, end, step = bounds
        cut[axis] = slice(start, None if step < 0 and end < -value.shape[axis] else end, step)
    return value[tuple(cut)]


@rule("Split")
def _split(s: Shapes, n: Node) -> list[Array]:
    value = value_in(s, n)
    axis = axis_of(n.attrs.get("axis", 0), value.ndim)
    ends = np.cumsum(plain(objects(split_sizes(s, n, value.shape[axis]))))
    return np.split(value, ends[:-1], axis=axis)


@rule("Tile")
def _tile(s: Shapes, n: Node) -> Array:
    value, repeats = value_in(s, n), plain(value_in(s, n, 1))
    if value.size * math.prod(repeats) > LIMIT:
        raise Undecided
    return np.tile(value, repeats)


@rule("Range")
def _range(s: Shapes, n: Node) -> Array:
    start, limit, delta = (value_in(s, n, i).item() for i in range(3))
    count = range_length(start, limit, delta)
    if not isinstance(count, int) or count > LIMIT:
        raise Undecided
    return objects([start + i * delta for i in range(count)])
