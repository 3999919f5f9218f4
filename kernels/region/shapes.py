"""Infers the shapes of all values of a region from the shapes of its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from onnxfuse.algebra.index_maps import squeezed, transposed, unsqueezed
from onnxfuse.algebra.operators import EXTREMES
from onnxfuse.algebra.sizes import Shape, Size, cancelled, product
from onnxfuse.kernels.region.program import Operation, Program
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.region_operators import ELEMENTWISE, SUMS

# Reductions whose result is undefined for empty inputs.  But ReduceMax and ReduceMin with the attribute `may_be_empty`
# reduce an empty input to an infinity.
OF_SOME: Final = (*EXTREMES, "ReduceMax", "ReduceMin")


@dataclass(frozen=True)
class Shapes:
    """The shape of each value; `sizes` has the values of symbols in shapes, and adds guards (conditions) on them."""

    sizes: Sizes
    of: Mapping[str, Shape]


def infer(program: Program, operands: Mapping[str, Shape], sizes: Sizes) -> Shapes:
    """Return the shapes of all values.  Raises ValueError if the operands' shapes are incompatible."""
    found = dict(operands)
    for operation in program.operations:
        shapes = [found[name] for name in operation.inputs]
        for i, name in enumerate(operation.outputs):
            found[name] = _output(operation, shapes, sizes, i)
    return Shapes(sizes, found)


def require_elements(program: Program, shapes: Shapes) -> None:
    """Raise ValueError if a reduction that needs at least one element has none."""
    for operation in program.operations:
        if operation.name in OF_SOME and not operation.attributes.get("may_be_empty", 0):
            x = shapes.of[operation.inputs[0]]
            if any(x[axis] == 0 for axis in reduced_axes(operation)):
                raise ValueError(f"region: {operation.name} reduces no elements; required is at least one")


def _output(operation: Operation, shapes: list[Shape], sizes: Sizes, output: int) -> Shape:
    """Return the shape of one of an operation's outputs."""
    name = operation.name
    if name == "Constant":
        return ()
    x = shapes[0]
    if name in ELEMENTWISE:
        return broadcast(shapes, sizes)
    if name == "Transpose":
        return transposed(x, operation.integers("perm"))
    if name == "Reshape":
        return _reshaped(operation, shapes, sizes)
    if name == "Unsqueeze":
        return unsqueezed(x, operation.integers("axes"), 1)
    if name == "Squeeze":
        return squeezed(x, operation.integers("axes"))
    if name == "Expand":
        return broadcast([x, sizes_of(operation, "shape", shapes, sizes)], sizes)
    if name == "Slice":
        return _sliced(operation, shapes, sizes)
    if name in ("Concat", "Split", "Gather"):
        return _of_parts(operation, shapes, sizes, output)
    if name == "GatherElements":
        return _taken(name, x[axis_of(operation)], shapes[1])
    if name == "Pad":
        return _padded(operation, x, sizes_of(operation, "pads", shapes, sizes))
    if name == "Tile":
        return tuple(dim * repeat for dim, repeat in zip(x, sizes_of(operation, "repeats", shapes, sizes), strict=True))
    if name in SUMS or name in EXTREMES:
        axes, keeps = reduced_axes(operation), operation.attributes.get("keepdims", 1)
        return tuple(1 if i in axes else dim for i, dim in enumerate(x) if keeps or i not in axes)
    return x  # Softmax and LogSoftmax


def sizes_of(operation: Operation, name: str, shapes: Sequence[Shape], sizes: Sizes) -> tuple[Size, ...]:
    """Return the values of a list attribute; its elements are integers, or expressions over dims of the inputs."""
    return tuple(_size_of(each, shapes, sizes) for each in operation.attributes[name])


def _size_of(expression: Any, shapes: Sequence[Shape], sizes: Sizes) -> Size:
    if not isinstance(expression, list):
        return int(expression)
    operator, *operands = expression
    if operator == "dim":
        return shapes[operands[0]][operands[1]]
    a, b = (_size_of(each, shapes, sizes) for each in operands)
    return a + b if operator == "+" else a * b if operator == "*" else sizes.computed(operator, a, b)


def reduced_axes(operation: Operation) -> tuple[int, ...]:
    """Return the axes over which an operation reduces, in order."""
    return tuple(sorted(operation.integers("axes"))) if "axes" in operation.attributes else (axis_of(operation),)


def axis_of(operation: Operation) -> int:
    """Return an operation's attribute `axis`."""
    return int(operation.attributes["axis"])


def broadcast(shapes: list[Shape], sizes: Sizes) -> Shape:
    """Return the shape to which shapes are broadcast together.  Raises ValueError if they are incompatible."""
    rank = max(map(len, shapes))
    found: list[Size] = [1] * rank
    for shape in shapes:
        for i, dim in enumerate(shape, rank - len(shape)):
            found[i] = _common(found[i], dim, sizes)
    return tuple(found)


def _common(a: Size, b: Size, sizes: Sizes) -> Size:
    if 1 in (a, b):
        return b if a == 1 else a
    if sizes.equal(a, b):
        return a if isinstance(a, int) or not isinstance(b, int) else b
    if sizes.equal(a, 1):
        return b
    if sizes.equal(b, 1):
        return a
    raise ValueError(f"region: dims of {sizes.value(a)} and {sizes.value(b)} elements cannot be broadcast")


def _reshaped(operation: Operation, shapes: Sequence[Shape], sizes: Sizes) -> Shape:
    """Return the shape after a Reshape, where 0 copies a dim and -1 is the size that remains."""
    x, target = shapes[0], operation.attributes["shape"]
    literal = sizes_of(operation, "shape", shapes, sizes)
    known = [x[i] if dim == 0 else literal[i] for i, dim in enumerate(target) if dim != -1]
    left, others = map(product, cancelled(x, known))
    if -1 not in target:
        is_empty = 0 in x and 0 in known
        if not is_empty and not sizes.equal(left, others):
            raise ValueError(f"region: Reshape to {_text(literal)} does not keep the number of elements")
        free: Size = 1
    elif others == 0:
        raise ValueError(f"region: Reshape to {_text(literal)} has no size for -1")
    else:
        free = sizes.quotient(left, others)
    dims = iter(known)
    return tuple(free if dim == -1 else next(dims) for dim in target)


def _text(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _sliced(operation: Operation, shapes: Sequence[Shape], sizes: Sizes) -> Shape:
    found = list(shapes[0])
    for axis in operation.integers("axes"):
        found[axis] = slice_of(operation, axis, shapes, sizes)[2]
    return tuple(found)


def slice_of(operation: Operation, axis: int, shapes: Sequence[Shape], sizes: Sizes) -> tuple[Size, int, Size]:
    """Return the first index, the step and the number of indices of a Slice along an axis, given its inputs' shapes."""
    at, dim = operation.integers("axes").index(axis), shapes[0][axis]
    start, end = (sizes_of(operation, name, shapes, sizes)[at] for name in ("starts", "ends"))
    step = operation.integers("steps")[at] if operation.attributes.get("steps") else 1
    low, high = (0, dim) if step > 0 else (-1, dim - 1)
    first, last = (_clamped(place, dim, low, high, sizes) for place in (start, end))
    span = last - first if step > 0 else first - last
    if not sizes.at_least(span, 1):
        return 0, step, 0
    return first, step, sizes.ceiling(span, abs(step))


def _clamped(place: Size, dim: Size, low: Size, high: Size, sizes: Sizes) -> Size:
    if isinstance(place, int) and place < -(1 << 31):
        return low
    if isinstance(place, int) and place >= (1 << 31) - 1:
        return high
    at = place if sizes.at_least(place, 0) else dim + place
    if not sizes.at_least(at, low):
        return low
    return at if sizes.at_least(high, at) else high


def _padded(operation: Operation, x: Shape, pads: Sequence[Size]) -> Shape:
    mode = operation.attributes.get("mode", "constant")
    found = tuple(dim + pads[i] + pads[i + len(x)] for i, dim in enumerate(x))
    for dim, padded in zip(x, found, strict=True):
        if mode != "constant" and padded != dim:
            _taken("Pad", dim, found)
    return found


def _taken(name: str, dim: Size, found: Shape) -> Shape:
    """Return `found`, the shape of elements taken along a dim.  Raises ValueError if the dim is 0."""
    if dim == 0 and 0 not in found:
        raise ValueError(f"region: {name} takes elements of an axis that has none")
    return found


def _of_parts(operation: Operation, shapes: list[Shape], sizes: Sizes, output: int) -> Shape:
    """Return the shape of an output of Concat, Split or Gather."""
    x, axis = shapes[0], axis_of(operation)
    if operation.name == "Gather":
        return _taken("Gather", x[axis], (*x[:axis], *shapes[1], *x[axis + 1 :]))
    if operation.name == "Split":
        parts = sizes_of(operation, "sizes", shapes, sizes)
        if not sizes.equal(x[axis], sum(parts, 0)):
            raise ValueError(f"region: Split makes {sum(parts, 0)} elements of {sizes.value(x[axis])}")
        return (*x[:axis], parts[output], *x[axis + 1 :])
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
