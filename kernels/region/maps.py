"""Index maps: which element of its input an element of a map's output is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from onnxfuse.algebra.sizes import Shape, Size, is_nonnegative, product
from onnxfuse.kernels.region.indices import NOTHING, Index, divided, flat, function
from onnxfuse.kernels.region.program import Operation
from onnxfuse.kernels.region.shapes import Shapes, axis_of, sizes_of, slice_of
from onnxfuse.kernels.region.sizes import Sizes

Place: TypeAlias = tuple[Index, ...]  # of an element: an index for each axis


def source(operation: Operation, output: str, place: Place, shapes: Shapes) -> Place:
    """Return the place in an operation's only input of an element of its output.

    Of the maps it takes all but Concat and those that gather; for a Pad with a constant, the place may lie outside.
    """
    given, name = [shapes.of[each] for each in operation.inputs], operation.name
    x = given[0]
    if name == "Transpose":
        perm = operation.integers("perm")
        return tuple(place[perm.index(axis)] for axis in range(len(x)))
    if name == "Reshape":
        return reshaped(place, shapes.of[output], x)
    if name == "Unsqueeze":
        return tuple(each for axis, each in enumerate(place) if axis not in operation.integers("axes"))
    if name == "Squeeze":
        left = iter(place)
        return tuple(NOTHING if axis in operation.integers("axes") else next(left) for axis in range(len(x)))
    if name == "Expand":
        return broadcast(place, shapes.of[output], x, shapes)
    if name == "Slice":
        return _sliced(operation, place, given, shapes.sizes)
    if name == "Split":
        axis, which = axis_of(operation), operation.outputs.index(output)
        return _moved(place, axis, sum(sizes_of(operation, "sizes", given, shapes.sizes)[:which], 0))
    if name == "Tile":
        return tuple(divided(each, dim)[1] for each, dim in zip(place, x, strict=True))
    return _padded(operation, place, given, shapes.sizes)


def _moved(place: Place, axis: int, by: Size) -> Place:
    return (*place[:axis], place[axis] + by, *place[axis + 1 :])


def before(place: Place, axis: int, by: Size) -> Place:
    """Return a place `by` elements before another along an axis."""
    return _moved(place, axis, -by)


def broadcast(place: Place, shape: Shape, x: Shape, shapes: Shapes) -> Place:
    """Return the place in `x`, which is broadcast to `shape`."""
    skipped = len(shape) - len(x)
    return tuple(
        NOTHING if dim == 1 or not shapes.sizes.equal(dim, whole) else each
        for each, whole, dim in zip(place[skipped:], shape[skipped:], x, strict=True)
    )


def reshaped(place: Place, shape: Shape, x: Shape) -> Place:
    """Return the place of the same element in a tensor of another shape.

    Dims are taken from the last on until as many elements are on both sides, so that only such blocks are divided.
    """
    found: list[Index] = []
    own, other = list(range(len(shape))), list(range(len(x)))
    while own or other:
        left, right = [own.pop()] if own else [], [other.pop()] if other else []
        a, b = product(shape[i] for i in left), product(x[i] for i in right)
        while a != b and (own or other):
            take_own = bool(own) and (not other or is_nonnegative(b - a))
            if take_own:
                left.insert(0, own.pop())
            else:
                right.insert(0, other.pop())
            a, b = product(shape[i] for i in left), product(x[i] for i in right)
        whole = flat([place[i] for i in left], [shape[i] for i in left])
        for i in reversed(right[1:]):
            whole, rest = divided(whole, x[i])
            found.append(rest)
        if right:
            found.append(whole)
    return tuple(reversed(found))


def _sliced(operation: Operation, place: Place, given: Sequence[Shape], sizes: Sizes) -> Place:
    found = list(place)
    for axis in operation.integers("axes"):
        first, step, _ = slice_of(operation, axis, given, sizes)
        found[axis] = place[axis] * step + first
    return tuple(found)


def _padded(operation: Operation, place: Place, given: Sequence[Shape], sizes: Sizes) -> Place:
    mode, found = operation.attributes.get("mode", "constant"), list(place)
    pads, x = sizes_of(operation, "pads", given, sizes), given[0]
    for axis, dim in enumerate(x):
        begin, end = pads[axis], pads[axis + len(x)]
        if begin != 0 or end != 0:
            moved = place[axis] + -begin
            takes_away = is_nonnegative(-begin) and is_nonnegative(-end)
            found[axis] = moved if mode == "constant" or takes_away else function(mode, moved, dim)
    return tuple(found)


def is_inside(place: Place, shape: Shape) -> bool:
    """Return whether ranges of indices prove that a tensor has the place; one that is gathered of may be empty."""
    limits = [index.range for index in place]
    known = all(each is not None and is_nonnegative(each[0]) for each in limits)
    gathered = (atom.extent for index in place for atom in index.atoms() if atom.kind == "value")
    is_full = all(is_nonnegative(extent - 1) for extent in gathered)
    return known and is_full and all(index.is_below(dim) is True for index, dim in zip(place, shape, strict=True))
