"""Writes code that branches on an element's position: the parts of a Concat, and the inside of a Pad.

A lane is one element of the vector that a thread computes.  If all lanes of a vector are in the same part, the code is
a branch.  Otherwise each part is computed for the lanes that need it, and each lane selects among the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from onnxfuse.algebra.bounds import is_nonnegative
from onnxfuse.algebra.index_maps import Place, offset
from onnxfuse.algebra.indices import Index, flat
from onnxfuse.algebra.sizes import Size
from onnxfuse.kernels.region import maps
from onnxfuse.kernels.region.arguments import in_parentheses
from onnxfuse.kernels.region.operators import NUMBER, literal
from onnxfuse.kernels.region.program import Operation
from onnxfuse.kernels.region.references import Reference, ValueWriter
from onnxfuse.kernels.region.shapes import axis_of

VIEWS: Final = ("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Slice", "Split", "Tile")
Load: TypeAlias = tuple[str, Index]  # an operand, and an address in it
Part: TypeAlias = tuple[str, Size, Size]  # an input of a Concat, and its begin and end along the axis


@dataclass(frozen=True)
class Choice:
    """A value that is loaded from one of a Concat's parts: the first part whose end is greater than the index."""

    index: Index
    parts: Sequence[tuple[Moved, Size]]

    def loads(self) -> Iterator[Load]:
        """Yield the operands of all parts, each with the address at which it is read."""
        for part, _ in self.parts:
            if isinstance(part, Choice):
                yield from part.loads()
            else:
                yield part

    def splits(self) -> Iterator[tuple[Index, Size]]:
        """Yield each index that decides between parts, with a size that it is compared with."""
        for i, (part, end) in enumerate(self.parts):
            if i < len(self.parts) - 1:
                yield self.index, end
            if isinstance(part, Choice):
                yield from part.splits()


Moved: TypeAlias = Load | Choice


def joined(writer: ValueWriter, operation: Operation, name: str, place: Place) -> Reference:
    """Write the value of a Concat's element at a place (an index along each axis)."""
    index, parts = place[axis_of(operation)], _parts(writer, operation, place)
    ends = [end for _, _, end in parts[:-1]]
    if not parts[1:]:
        return _part(writer, operation, place, parts[0])
    moved = _moved(writer, name, place)
    if isinstance(moved, Choice) and len({writer.program.dtypes[each] for each, _ in moved.loads()}) == 1:
        return _loaded(writer, moved)
    writer.bounds += [(index, end) for end in ends]
    if not all(writer.lanes.are_on_one_side(index, end, writer.shapes.sizes) for end in ends):
        return _joined_by_lanes(writer, operation, name, place, parts)
    found, masked = writer.declared(name, writer.lanes.vary(*place) or bool(writer.masks)), False
    for i, each in enumerate(parts):
        condition = f"if ({writer.index(index)} < {writer.arguments.size(each[2])})"
        head = "else" if each is parts[-1] else f"{'else ' if i else ''}{condition}"
        with writer.branch(head):
            part = _part(writer, operation, place, each)
            writer.assign(found, part)
            masked = masked or part.masked
    return found.where(masked)


def _moved(writer: ValueWriter, name: str, place: Place) -> Moved | None:
    """Return the operand and address from which a value is copied, or a Choice of several; None if it is computed."""
    operation = writer.program.producers.get(name)
    if operation is None:
        return name, flat(place, writer.shapes.of[name])
    if operation.name == "Concat":
        parts, axis = _parts(writer, operation, place), axis_of(operation)
        found = [(_moved(writer, each, offset(place, axis, -begin)), end) for each, begin, end in parts]
        inner = [(each, end) for each, end in found if each]
        return None if len(inner) < len(parts) else inner[0][0] if not parts[1:] else Choice(place[axis], inner)
    if operation.name == "Identity":
        return _moved(writer, operation.inputs[0], place)
    if operation.name in VIEWS:
        return _moved(writer, operation.inputs[0], maps.source(operation, name, place, writer.shapes))
    return None


def _loaded(writer: ValueWriter, choice: Choice) -> Reference:
    """Write one load for a Choice; its address lies in the part (an input of a Concat) that contains the index."""
    lanes, loads, splits = writer.lanes, list(choice.loads()), list(choice.splits())
    writer.accesses += loads
    writer.bounds += splits
    kind = NUMBER[writer.program.dtypes[loads[0][0]]]
    varies = lanes.vary(*(index for index, _ in splits), *(address for _, address in loads))
    is_whole = not writer.masks and all(writer.is_contiguous(address) for _, address in loads)
    is_whole = is_whole and all(lanes.are_on_one_side(index, end, writer.shapes.sizes) for index, end in splits)
    text = _address(writer, choice, varies and not is_whole)
    if varies and is_whole:
        found = writer.declared(loads[0][0], True)
        writer.line(f"load({text}, {found.text});")
        return found
    if writer.masks:
        text = f"{writer.masks[-1]}[j] ? load_one({text}) : ({kind})1"
        return writer.declare(kind, text, True, masked=True, name=writer.name_of(loads[0][0]))
    return writer.declare(kind, f"load_one({text})", varies, name=writer.name_of(loads[0][0]))


def _address(writer: ValueWriter, choice: Choice, in_lane: bool) -> str:
    """Return a C++ expression for the address from which a Choice is loaded: in the part that contains the index.

    If the parts' addresses differ only by constants, the code selects the constant, not the whole address.
    """
    (operand, first), *others = choice.loads()
    if any(each[0] != operand or each[1].terms != first.terms for each in others):
        return _chosen(writer, choice, lambda load: writer.address(*load, in_lane), in_lane)
    text = _chosen(writer, choice, lambda load: writer.arguments.size(load[1].constant), in_lane)
    if not in_lane:
        text = writer.declare(writer.arguments.index_type, text, False, name=writer.new_name("begin")).text
    return f"{operand} + ({writer.index(Index(0, first.terms), in_lane)} + {in_parentheses(text)})"


def _chosen(writer: ValueWriter, moved: Moved, text_of: Callable[[Load], str], in_lane: bool) -> str:
    """Return an expression that selects, from the texts of all parts, the text of the part that contains the index."""
    if not isinstance(moved, Choice):
        return text_of(moved)
    *parts, (last, _) = moved.parts
    index, text = writer.index(moved.index, in_lane), _chosen(writer, last, text_of, in_lane)
    for each, end in reversed(parts):
        own = _chosen(writer, each, text_of, in_lane)
        own = f"({own})" if isinstance(each, Choice) else own
        text = f"{index} < {writer.arguments.size(end)} ? {own} : {text}"
    return text


def _parts(writer: ValueWriter, operation: Operation, place: Place) -> list[Part]:
    """Return the inputs of a Concat that can hold the element at `place`, with begin and end of each on the axis."""
    axis, parts = axis_of(operation), list[Part]()
    begin: Size = 0
    for each in operation.inputs:
        end = begin + writer.shapes.of[each][axis]
        if begin != end and writer.is_below(place[axis], begin) is not True:
            after_this = writer.is_below(place[axis], end)
            if after_this is not False:
                parts.append((each, begin, end))
            if after_this:
                break
        begin = end
    return parts


def _part(writer: ValueWriter, operation: Operation, place: Place, part: Part) -> Reference:
    each, begin, _ = part
    return writer.value(each, offset(place, axis_of(operation), -begin))


def _joined_by_lanes(
    writer: ValueWriter, operation: Operation, name: str, place: Place, parts: Sequence[Part]
) -> Reference:
    index, size = writer.index(place[axis_of(operation)], in_lane=True), writer.arguments.size
    found: Reference | None = None
    for each in parts:
        _, begin, end = each
        conditions = [f"{index} >= {size(begin)}"] if found else []
        conditions += [f"{index} < {size(end)}"] if each is not parts[-1] else []
        with writer.mask(" && ".join(conditions)) as mask:
            part = _part(writer, operation, place, each)
        if found:
            text = f"{mask}[j] ? {part.lane} : {found.lane}"
            part = writer.declare(NUMBER[writer.program.dtypes[name]], text, True)
        found = part
    assert found
    return found.where(bool(writer.masks))


def padded(writer: ValueWriter, operation: Operation, inner: Place) -> Reference:
    """Write the value of a Pad with a constant: the input's element at `inner`, or the constant outside the input."""
    x, limits = operation.inputs[0], list[tuple[int, str, Size]]()
    value = literal(operation.attributes.get("value", 0), writer.program.dtypes[x])
    for axis, (index, dim) in enumerate(zip(inner, writer.shapes.of[x], strict=True)):
        if index.is_below(0) or index.is_below(dim) is False:
            return Reference(value)  # all elements are padding, because a Slice kept only padding
        low_high = index.range
        if not (low_high and is_nonnegative(low_high[0])):
            limits.append((axis, ">=", 0))
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
    if by_lanes:
        with writer.mask(condition) as mask:
            inside = writer.value(x, inner)
        text = f"{mask}[j] ? {inside.lane} : {value}"
        return writer.declare(NUMBER[dtype], text, True, bool(writer.masks))
    found = writer.declared(x, writer.lanes.vary(*inner) or bool(writer.masks))
    writer.assign(found, found.of_text(value))
    with writer.branch(f"if ({condition})"):
        inside = writer.value(x, inner)
        writer.assign(found, inside)
    return found.where(inside.masked)
