"""A Rearrange as ONNX nodes: Slice, Reshape to split axes, Transpose, Expand to repeat, Reshape to merge axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

from onnx import TensorProto

from onnxfuse.algebra.sizes import Size, product
from onnxfuse.algebra.view_layouts import Arrangement, parse_arrangement
from onnxfuse.dsl.terms import Rearrange, Term, Value
from onnxfuse.errors import PatternError

UNCHANGED: Final = "unchanged"
PLACEHOLDER: Final = None  # stands for an axis of size 1 that a Squeeze removes again


@dataclass(frozen=True)
class Ones:
    """Axes of size 1 to remove (their indices in the input), and to add (their indices in the result)."""

    squeezed: tuple[int, ...]
    new: tuple[int, ...]


# A Reshape's target; Ones if only axes of size 1 change; UNCHANGED if none does.
Target: TypeAlias = list[int | None] | Ones | str


class ViewBuilder(Protocol):
    """The function body that views are added to."""

    @property
    def opset(self) -> int:
        """The version of the ONNX operators."""
        ...

    @property
    def leading_rank(self) -> int:
        """The number of axes that "..." stands for."""
        ...

    def size(self, name: str) -> Size:
        """Return the size of a named dimension; "...0" is the first axis of "...", and a numeral is its own size."""
        ...

    def captured_number(self, name: str) -> int | None:
        """Return the integer that matching has captured under a name; None if there is none."""
        ...

    def value(self, term: Term) -> Value:
        """Return the value of a term."""
        ...

    def constant(self, value: Sequence[Size], dtype: int) -> Value:
        """Return the value of a new Constant node."""
        ...

    def node(self, op: str, inputs: Sequence[Value | None], dtype: int, **attributes: Any) -> Value:
        """Append a node with one output of dtype `dtype`, and return the output."""
        ...


def write_rearrange(builder: ViewBuilder, term: Rearrange) -> Value:
    """Return a value, or a slice of it, with its axes rearranged.

    Raises PatternError, which names the source line of the term, where a Reshape would have two unknown sizes.
    """
    first, last = reshape_targets(builder, term)
    if first is None or last is None:
        raise PatternError(f"{term.span}: a Reshape with two unknown sizes cannot be written")
    value = builder.value(term.inner)
    if term.slice_name is not None:
        value = _packed_slice(builder, value, term.slice_name, parse_arrangement(term.pattern, builder.leading_rank))
    arrangement, split = _arrangement(builder, term)
    value = _reshape(builder, value, first)
    order = [name for names in arrangement.result for name in names]
    kept = [name for name in order if name in split]
    if kept != split:
        value = builder.node("Transpose", [value], value.dtype, perm=[split.index(name) for name in kept])
    repeated = _repeated(builder, order, split)
    if repeated:
        value = _repeat(builder, value, order, repeated)
    return _reshape(builder, value, last)


def reshape_targets(builder: ViewBuilder, term: Rearrange) -> tuple[Target | None, Target | None]:
    """Return the targets of the Reshape that splits axes and of the Reshape that merges them.

    A target is None if it cannot be written, because two of its sizes are unknown.
    """
    arrangement, split = _arrangement(builder, term)
    order = [name for names in arrangement.result for name in names]
    repeated = _repeated(builder, order, split)
    if split == [name for name in order if name in split] and not repeated:  # no axis moves: one Reshape suffices
        return UNCHANGED, _target(builder, arrangement.result, arrangement.source)
    present = [name for i, name in enumerate(order) if name in split or i in repeated]
    return (
        _target(builder, [(n,) for n in split], arrangement.source),
        _target(builder, arrangement.result, [(n,) for n in present]),
    )


def _arrangement(builder: ViewBuilder, term: Rearrange) -> tuple[Arrangement, list[str]]:
    """Return the arrangement to apply to the result of `_packed_slice`, and the names of the arrangement's left side.

    A slice of several runs already has an axis for each name of the packed axis.
    """
    arrangement, name = parse_arrangement(term.pattern, builder.leading_rank), term.slice_name
    if name is not None and builder.captured_number(f"{name}_pitch") is not None:
        *others, last = arrangement.source
        arrangement = replace(arrangement, source=(*others, *((each,) for each in last)))
    return arrangement, [each for names in arrangement.source for each in names]


# --- a slice of a packed last axis -------------------------------------------------------------------------------


def _packed_slice(builder: ViewBuilder, value: Value, name: str, arrangement: Arrangement) -> Value:
    """Return the slice of the last axis whose offset and pitch were captured for `name`.

    If the slice is one run of elements, it stays one axis.  If it is several runs, it gets an axis for each name of the
    packed axis.
    """
    offset, pitch = builder.captured_number(f"{name}_offset"), builder.captured_number(f"{name}_pitch")
    *others, last = arrangement.source
    sizes = [builder.size(each) for each in last]
    if offset is None:
        return value
    if pitch is None:
        return _slice(builder, value, {len(others): (offset, product(sizes))})
    blocks = builder.size(f"{name}_blocks")  # a number instead of -1, which is undetermined if another axis is empty
    by_block = builder.constant([*(0 for _ in others), blocks, pitch], TensorProto.INT64)
    value = builder.node("Reshape", [value, by_block], value.dtype)
    axis = len(others)
    runs = {axis: (offset // pitch, product(sizes[:-1])), axis + 1: (offset % pitch, sizes[-1])}
    value = _slice(builder, value, runs)
    if len(last) == 2:
        return value
    by_name = builder.constant([*(0 for _ in others), *sizes], TensorProto.INT64)
    return builder.node("Reshape", [value, by_name], value.dtype)


def _slice(builder: ViewBuilder, value: Value, ranges: dict[int, tuple[int, Size]]) -> Value:
    """Slice by ranges: for each axis, the first element and the number of elements."""
    starts, ends = [first for first, _ in ranges.values()], [first + count for first, count in ranges.values()]
    bounds: dict[str, Sequence[Size]] = {"starts": starts, "ends": ends, "axes": list(ranges)}
    if builder.opset < 10:
        return builder.node("Slice", [value], value.dtype, **bounds)
    inputs = [builder.constant(numbers, TensorProto.INT64) for numbers in bounds.values()]
    return builder.node("Slice", [value, *inputs], value.dtype)


# --- views -------------------------------------------------------------------------------------------------------


def _repeated(builder: ViewBuilder, order: Sequence[str], split: Sequence[str]) -> list[int]:
    """Return the indices of names that only the right side has: the value is repeated along their axes."""
    return [i for i, name in enumerate(order) if name not in split and builder.size(name) != 1]


def _repeat(builder: ViewBuilder, value: Value, order: Sequence[str], repeated: Sequence[int]) -> Value:
    value = _with_axes(builder, "Unsqueeze", value, repeated)
    shape = [builder.size(name) if i in repeated else 1 for i, name in enumerate(order)]
    return builder.node("Expand", [value, builder.constant(shape, TensorProto.INT64)], value.dtype)


def _with_axes(builder: ViewBuilder, op: str, value: Value, axes: Sequence[int]) -> Value:
    """Append a Squeeze or an Unsqueeze (`op`) of these axes, and return its output."""
    if builder.opset < 13:
        return builder.node(op, [value], value.dtype, axes=list(axes))
    return builder.node(op, [value, builder.constant(list(axes), TensorProto.INT64)], value.dtype)


def _target(
    builder: ViewBuilder, wanted: Sequence[tuple[str, ...]], present: Sequence[tuple[str, ...]]
) -> Target | None:
    """Return the target of a Reshape from the axes `present` to `wanted`; None if two sizes are unknown."""
    wanted, present = (
        [tuple(n for n in names if builder.size(n) != 1) for names in axes] for axes in (wanted, present)
    )
    if wanted == present:
        return UNCHANGED
    target: list[int | None] = []
    for i, names in enumerate(wanted):
        size = product([builder.size(name) for name in names])
        same = i < len(present) and tuple(present[i]) == tuple(names)
        target.append(size if isinstance(size, int) and size != 0 else 0 if same else -1)
    if target.count(-1) > 1:
        return None
    if not {0, -1} <= set(target):
        return target
    return _with_placeholders(target, wanted, present) or _ones(wanted, present) or target


def _with_placeholders(
    target: Sequence[int | None], wanted: Sequence[tuple[str, ...]], present: Sequence[tuple[str, ...]]
) -> list[int | None] | None:
    """Return a target without -1: each unknown size is a 0, which copies the size of the input's axis of equal index.

    A 0 must be at the index of the axis that it copies, so placeholders are inserted before it if necessary.  Returns
    None if the input lacks this axis, or has it at a lower index.  A -1 is avoided because runtimes refuse it if
    another size is 0 at run time: the -1 could then be any number.
    """
    result: list[int | None] = []
    for size, names in zip(target, wanted, strict=True):
        if size in (0, -1):
            if names not in present or present.index(names) < len(result):
                return None
            result += [PLACEHOLDER] * (present.index(names) - len(result))
        result.append(0 if size == -1 else size)
    return result


def _ones(wanted: Sequence[tuple[str, ...]], present: Sequence[tuple[str, ...]]) -> Ones | None:
    """Return the axes of size 1 to remove and to add where two shapes differ only in such axes; else None.

    A Squeeze and an Unsqueeze then replace the Reshape.
    """
    if [names for names in wanted if names] != [names for names in present if names]:
        return None
    squeezed, new = (tuple(i for i, names in enumerate(axes) if not names) for axes in (present, wanted))
    return Ones(squeezed, new)


def _reshape(builder: ViewBuilder, value: Value, target: Target) -> Value:
    if isinstance(target, str):  # UNCHANGED
        return value
    if isinstance(target, Ones):
        value = _with_axes(builder, "Squeeze", value, target.squeezed) if target.squeezed else value
        return _with_axes(builder, "Unsqueeze", value, target.new) if target.new else value
    placeholders = [i for i, size in enumerate(target) if not isinstance(size, int)]
    sizes = builder.constant([size if isinstance(size, int) else 1 for size in target], TensorProto.INT64)
    value = builder.node("Reshape", [value, sizes], value.dtype)
    return _with_axes(builder, "Squeeze", value, placeholders) if placeholders else value
