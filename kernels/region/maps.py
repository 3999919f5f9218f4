"""The index maps of a region's operations: for a place in the output, the place in the input that is read.

A place is the position of an element in a tensor: an index along each axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.index_maps import Place, inverse, offset, reshaped, sliced, squeezed, transposed, unsqueezed
from onnxfuse.algebra.indices import NOTHING, divided, function
from onnxfuse.algebra.sizes import Shape
from onnxfuse.kernels.region.program import Operation
from onnxfuse.kernels.region.shapes import Shapes, axis_of, sizes_of, slice_of
from onnxfuse.kernels.region.sizes import Sizes


def source(operation: Operation, output: str, place: Place, shapes: Shapes) -> Place:
    """Return the place in an operation's only input from which the element at `place` of the output is copied.

    The operation is any that only moves elements, except Concat and gathers.  For a Pad with a constant, the result can
    lie outside the input.
    """
    given, name = [shapes.of[each] for each in operation.inputs], operation.name
    x = given[0]
    if name == "Transpose":
        return transposed(place, inverse(operation.integers("perm")))
    if name == "Reshape":
        return reshaped(place, shapes.of[output], x)
    if name == "Unsqueeze":
        return squeezed(place, operation.integers("axes"))
    if name == "Squeeze":
        return unsqueezed(place, operation.integers("axes"), NOTHING)
    if name == "Expand":
        return broadcast(place, shapes.of[output], x, shapes)
    if name == "Slice":
        ranges = {axis: slice_of(operation, axis, given, shapes.sizes)[:2] for axis in operation.integers("axes")}
        return sliced(place, ranges)
    if name == "Split":
        axis, which = axis_of(operation), operation.outputs.index(output)
        return offset(place, axis, sum(sizes_of(operation, "sizes", given, shapes.sizes)[:which], 0))
    if name == "Tile":
        return tuple(divided(each, dim)[1] for each, dim in zip(place, x, strict=True))
    return _padded(operation, place, given, shapes.sizes)


def broadcast(place: Place, shape: Shape, x: Shape, shapes: Shapes) -> Place:
    """Return the indices in `x` that the element at the indices `place` reads if `x` is broadcast to `shape`."""
    skipped = len(shape) - len(x)
    return tuple(
        NOTHING if dim == 1 or not shapes.sizes.equal(dim, whole) else each
        for each, whole, dim in zip(place[skipped:], shape[skipped:], x, strict=True)
    )


def _padded(operation: Operation, place: Place, given: Sequence[Shape], sizes: Sizes) -> Place:
    mode, found = operation.attributes.get("mode", "constant"), list(place)
    pads, x = sizes_of(operation, "pads", given, sizes), given[0]
    for axis, dim in enumerate(x):
        begin, end = pads[axis], pads[axis + len(x)]
        if begin != 0 or end != 0:
            inner = place[axis] + -begin
            takes_away = is_nonnegative(-begin) and is_nonnegative(-end)
            found[axis] = inner if mode == "constant" or takes_away else function(mode, inner, dim)
    return tuple(found)


def is_inside(place: Place, shape: Shape) -> bool:
    """Return whether the ranges of the indices in `place` prove that it lies inside a tensor of this shape.

    An axis that is indexed by loaded values must also be known to have elements.
    """
    limits = [index.range for index in place]
    known = all(each is not None and is_nonnegative(each[0]) for each in limits)
    gathered = (atom.extent for index in place for atom in index.atoms() if atom.kind == "value")
    is_full = all(is_nonnegative(extent - 1) for extent in gathered)
    return known and is_full and all(index.is_below(dim) is True for index, dim in zip(place, shape, strict=True))
