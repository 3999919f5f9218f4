"""The text of what depends on where an element is: the parts of a Concat, and the inside of a Pad.

All lanes of a vector take the same branch, or there is none: then each part is computed for the lanes that need it, and
each lane chooses among the parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from onnxfuse.kernels.region import maps
from onnxfuse.kernels.region.maps import Place
from onnxfuse.kernels.region.operators import NUMBER, literal
from onnxfuse.kernels.region.program import Operation
from onnxfuse.kernels.region.shapes import axis_of
from onnxfuse.kernels.region.sizes import ZERO, Size

if TYPE_CHECKING:
    from onnxfuse.kernels.region.writer import Reference, Writer

Part: TypeAlias = tuple[str, Size, Size]  # a Concat's input, where it begins, and where it ends


def joined(writer: Writer, operation: Operation, name: str, place: Place) -> Reference:
    """Write the value of a Concat at a place."""
    index, parts = place[axis_of(operation)], _parts(writer, operation, place)
    ends = [end for _, _, end in parts[:-1]]
    writer.bounds += [(index, end) for end in ends]
    if not parts[1:]:
        return _part(writer, operation, place, parts[0])
    if not all(writer.lanes.are_on_one_side(index, end, writer.shapes.sizes) for end in ends):
        return _joined_by_lanes(writer, operation, name, place, parts)
    found, exact, masked = writer.declared(name, writer.lanes.vary(*place) or bool(writer.masks)), True, False
    for i, each in enumerate(parts):
        condition = f"if ({writer.index(index)} < {writer.arguments.size(each[2])})"
        head = "else" if each is parts[-1] else f"{'else ' if i else ''}{condition}"
        with writer.branch(head):
            part = _part(writer, operation, place, each)
            writer.assign(found, part)
            exact, masked = exact and part.exact, masked or part.masked
    return found.of(exact, masked)


def _parts(writer: Writer, operation: Operation, place: Place) -> list[Part]:
    """Return the inputs that may have the place."""
    axis, begin, parts = axis_of(operation), ZERO, list[Part]()
    for each in operation.inputs:
        end = begin + writer.shapes.of[each][axis]
        if begin != end and place[axis].is_below(begin) is not True:
            after_this = place[axis].is_below(end)
            if after_this is not False:
                parts.append((each, begin, end))
            if after_this:
                break
        begin = end
    return parts


def _part(writer: Writer, operation: Operation, place: Place, part: Part) -> Reference:
    each, begin, _ = part
    return writer.value(each, maps.before(place, axis_of(operation), begin))


def _joined_by_lanes(writer: Writer, operation: Operation, name: str, place: Place, parts: Sequence[Part]) -> Reference:
    index, size = writer.index(place[axis_of(operation)], in_lane=True), writer.arguments.size
    found: Reference | None = None
    for each in parts:
        _, begin, end = each
        conditions = [f"{index} >= {size(begin)}"] if found else []
        conditions += [f"{index} < {size(end)}"] if each is not parts[-1] else []
        with writer.mask(" && ".join(conditions)) as mask:
            part = _part(writer, operation, place, each)
        if found:
            text, exact = f"{mask}[j] ? {part.lane} : {found.lane}", found.exact and part.exact
            part = writer.declare(NUMBER[writer.program.dtypes[name]], text, True, exact)
        found = part
    assert found
    return found.of(found.exact, bool(writer.masks))


def padded(writer: Writer, operation: Operation, inner: Place) -> Reference:
    """Write the value of a Pad with a constant, whose input has the element at `inner` or no such place."""
    x, limits = operation.inputs[0], list[tuple[int, str, Size]]()
    for axis, (index, dim) in enumerate(zip(inner, writer.shapes.of[x], strict=True)):
        low_high = index.range
        if not (low_high and low_high[0].is_nonnegative):
            limits.append((axis, ">=", ZERO))
        if index.is_below(dim) is not True:
            limits.append((axis, "<", dim))
    if not limits:
        return writer.value(x, inner)
    writer.bounds += [(inner[axis], bound) for axis, _, bound in limits]
    by_lanes = not all(
        writer.lanes.are_on_one_side(inner[axis], bound, writer.shapes.sizes) for axis, _, bound in limits
    )
    condition = " && ".join(
        f"{writer.index(inner[axis], in_lane=by_lanes)} {operator} {writer.arguments.size(bound)}"
        for axis, operator, bound in limits
    )
    dtype = writer.program.dtypes[x]
    value = literal(operation.attributes.get("value", 0), dtype)
    if by_lanes:
        with writer.mask(condition) as mask:
            inside = writer.value(x, inner)
        text = f"{mask}[j] ? {inside.lane} : {value}"
        return writer.declare(NUMBER[dtype], text, True, inside.exact, bool(writer.masks))
    found = writer.declared(x, writer.lanes.vary(*inner) or bool(writer.masks))
    writer.assign(found, found.of_text(value))
    with writer.branch(f"if ({condition})"):
        inside = writer.value(x, inner)
        writer.assign(found, inside)
    return found.of(inside.exact, inside.masked)
