"""The shapes of all values of a region, from those of its operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.region.program import Operation, Program
from onnxfuse.kernels.region.sizes import ONE, ZERO, Shape, Size, Sizes, as_size, product
from onnxfuse.region_operators import ELEMENTWISE, EXTREMES, SUMS

OF_SOME: Final = (*EXTREMES, "ReduceMax", "ReduceMin")  # their result is not defined for no elements


@dataclass(frozen=True)
class Shapes:
    """The shape of each value, and what is known of sizes."""

    sizes: Sizes
    of: Mapping[str, Shape]


def infer(program: Program, operands: Mapping[str, Shape], sizes: Sizes) -> Shapes:
    """Return the shapes of all values.  Raises ValueError if operands do not fit together."""
    found = dict(operands)
    for operation in program.operations:
        shapes = [found[name] for name in operation.inputs]
        for i, name in enumerate(operation.outputs):
            found[name] = _output(operation, shapes, sizes, i)
    return Shapes(sizes, found)


def _output(operation: Operation, shapes: list[Shape], sizes: Sizes, output: int) -> Shape:
    """Return the shape of one of an operation's outputs."""
    name = operation.name
    if name == "Constant":
        return ()
    x = shapes[0]
    if name in ELEMENTWISE:
        return broadcast(shapes, sizes)
    if name == "Transpose":
        return tuple(x[axis] for axis in operation.integers("perm"))
    if name == "Reshape":
        return _reshaped(x, operation.integers("shape"), sizes)
    if name == "Unsqueeze":
        rank, dims = len(x) + len(operation.integers("axes")), iter(x)
        return tuple(ONE if axis in operation.integers("axes") else next(dims) for axis in range(rank))
    if name == "Squeeze":
        return tuple(dim for axis, dim in enumerate(x) if axis not in operation.integers("axes"))
    if name == "Expand":
        return broadcast([x, tuple(as_size(dim) for dim in operation.integers("shape"))], sizes)
    if name == "Slice":
        return _sliced(x, operation, sizes)
    if name in ("Concat", "Split", "Gather"):
        return _of_parts(operation, shapes, sizes, output)
    if name == "GatherElements":
        return _taken(name, x[axis_of(operation)], shapes[1])
    if name == "Pad":
        return _padded(x, operation)
    if name == "Tile":
        return tuple(dim * repeat for dim, repeat in zip(x, operation.integers("repeats"), strict=True))
    if name in SUMS or name in EXTREMES:
        axes, keeps = reduced_axes(operation), operation.attributes.get("keepdims", 1)
        if name in OF_SOME and any(x[axis] == ZERO for axis in axes):
            raise ValueError(f"region: {name} reduces no elements; required is at least one")
        return tuple(ONE if i in axes else dim for i, dim in enumerate(x) if keeps or i not in axes)
    return x  # Softmax and LogSoftmax


def reduced_axes(operation: Operation) -> tuple[int, ...]:
    """Return the axes over which an operation reduces, in order."""
    return tuple(sorted(operation.integers("axes"))) if "axes" in operation.attributes else (axis_of(operation),)


def axis_of(operation: Operation) -> int:
    """Return the one axis of an operation."""
    return int(operation.attributes["axis"])


def broadcast(shapes: list[Shape], sizes: Sizes) -> Shape:
    """Return the shape to which all are broadcast.  Raises ValueError if they cannot be."""
    rank = max(map(len, shapes))
    found = [ONE] * rank
    for shape in shapes:
        for i, dim in enumerate(shape, rank - len(shape)):
            found[i] = _common(found[i], dim, sizes)
    return tuple(found)


def _common(a: Size, b: Size, sizes: Sizes) -> Size:
    if ONE in (a, b):
        return b if a == ONE else a
    if sizes.equal(a, b):
        return a if a.constant is not None or b.constant is None else b
    if sizes.equal(a, ONE):
        return b
    if sizes.equal(b, ONE):
        return a
    raise ValueError(f"region: dims of {sizes.value(a)} and {sizes.value(b)} elements cannot be broadcast")


def _reshaped(x: Shape, target: tuple[int, ...], sizes: Sizes) -> Shape:
    """Return the shape that a Reshape gives, where 0 copies a dim and -1 stands for what is left."""
    left = list(x)
    known = [x[i] if dim == 0 else as_size(dim) for i, dim in enumerate(target) if dim != -1]
    others = []
    for dim in known:
        if dim in left:
            left.remove(dim)
        else:
            others.append(dim)
    if -1 not in target:
        is_empty = ZERO in x and ZERO in known
        if not is_empty and not sizes.equal(product(left), product(others)):
            raise ValueError(f"region: Reshape to {list(target)} does not keep the number of elements")
        free = ONE
    elif product(others) == ZERO:
        raise ValueError(f"region: Reshape to {list(target)} has no size for -1")
    else:
        free = sizes.quotient(product(left), product(others))
    dims = iter(known)
    return tuple(free if dim == -1 else next(dims) for dim in target)


def _sliced(x: Shape, operation: Operation, sizes: Sizes) -> Shape:
    found = list(x)
    for axis in operation.integers("axes"):
        found[axis] = slice_of(operation, axis, x[axis], sizes)[2]
    return tuple(found)


def slice_of(operation: Operation, axis: int, dim: Size, sizes: Sizes) -> tuple[Size, int, Size]:
    """Return first place, step and number of places of a Slice along one of its axes."""
    at = operation.integers("axes").index(axis)
    start, end = operation.integers("starts")[at], operation.integers("ends")[at]
    step = operation.integers("steps")[at] if operation.attributes.get("steps") else 1
    low, high = (ZERO, dim) if step > 0 else (as_size(-1), dim - 1)
    first, last = (_clamped(place, dim, low, high, sizes) for place in (start, end))
    span = last - first if step > 0 else first - last
    if not sizes.at_least(span, ONE):
        return ZERO, step, ZERO
    return first, step, sizes.ceiling(span, abs(step))


def _clamped(place: int, dim: Size, low: Size, high: Size, sizes: Sizes) -> Size:
    if place < -(1 << 31):
        return low
    if place >= (1 << 31) - 1:
        return high
    at = dim + place if place < 0 else as_size(place)
    if not sizes.at_least(at, low):
        return low
    return at if sizes.at_least(high, at) else high


def _padded(x: Shape, operation: Operation) -> Shape:
    pads, mode = operation.integers("pads"), operation.attributes.get("mode", "constant")
    found = tuple(dim + pads[i] + pads[i + len(x)] for i, dim in enumerate(x))
    for dim, padded in zip(x, found, strict=True):
        if mode != "constant" and padded != dim:
            _taken("Pad", dim, found)
    return found


def _taken(name: str, dim: Size, found: Shape) -> Shape:
    """Return the shape of what is taken along a dim.  Raises ValueError if there is nothing to take."""
    if dim == ZERO and ZERO not in found:
        raise ValueError(f"region: {name} takes elements of an axis that has none")
    return found


def _of_parts(operation: Operation, shapes: list[Shape], sizes: Sizes, output: int) -> Shape:
    """Return the shape of what Concat, Split or Gather gives."""
    x, axis = shapes[0], axis_of(operation)
    if operation.name == "Gather":
        return _taken("Gather", x[axis], (*x[:axis], *shapes[1], *x[axis + 1 :]))
    if operation.name == "Split":
        parts = operation.integers("sizes")
        if not sizes.equal(x[axis], as_size(sum(parts))):
            raise ValueError(f"region: Split makes {sum(parts)} elements of {sizes.value(x[axis])}")
        return (*x[:axis], as_size(parts[output]), *x[axis + 1 :])
    found = list(x)
    for shape in shapes[1:]:
        if len(shape) != len(x):
            raise ValueError("region: Concat has tensors of several ranks")
        for i, dim in enumerate(shape):
            if i == axis:
                found[i] = found[i] + dim
            elif not sizes.equal(found[i], dim):
                raise ValueError(f"region: Concat has dims of {sizes.value(found[i])} and {sizes.value(dim)} elements")
    return tuple(found)
