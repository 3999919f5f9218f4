"""A Rearrange as ONNX nodes: Slice to a part, Reshape to split axes, Transpose, Expand, Reshape to merged ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from onnx import TensorProto

from onnxfuse.errors import PatternError
from onnxfuse.language.terms import Part, Rearrange
from onnxfuse.shapes.dims import product
from onnxfuse.shapes.layout import Arrangement, parse_arrangement

if TYPE_CHECKING:
    from onnxfuse.rewrite.build import Builder, Value

KEPT: Final = "as it is"
SPACE: Final = None  # an axis of size 1 that is squeezed away again
Target: TypeAlias = list[int | None] | str | None  # of a Reshape; None where two sizes are unknown


def rearranged(builder: Builder, term: Rearrange) -> Value:
    """The value of a Rearrange."""
    value = builder.value(term.inner)
    if isinstance(term.inner, Part):
        value = _taken(builder, value, term.inner.name, _arrangement(builder, term))
    arrangement, split = _read(builder, term)
    first, last = targets(builder, term)
    value = _reshaped(builder, value, first, term)
    order = [name for names in arrangement.result for name in names]
    kept = [name for name in order if name in split]
    if kept != split:
        value = builder.node("Transpose", [value], value.dtype, perm=[split.index(name) for name in kept])
    repeated = _repeated(builder, order, split)
    if repeated:
        value = _repeat(builder, value, order, repeated)
    return _reshaped(builder, value, last, term)


def targets(builder: Builder, term: Rearrange) -> tuple[Target, Target]:
    """The shapes of the Reshapes that split and that merge axes."""
    arrangement, split = _read(builder, term)
    order = [name for names in arrangement.result for name in names]
    repeated = _repeated(builder, order, split)
    if split == [name for name in order if name in split] and not repeated:  # nothing moves: one Reshape does it
        return KEPT, _target(builder, arrangement.result, arrangement.source)
    present = [name for i, name in enumerate(order) if name in split or i in repeated]
    return (
        _target(builder, [(n,) for n in split], arrangement.source),
        _target(builder, arrangement.result, [(n,) for n in present]),
    )


def _arrangement(builder: Builder, term: Rearrange) -> Arrangement:
    """The pattern for the variant's rank."""
    return parse_arrangement(term.pattern, len(builder.variant.dims.get("...", ())))


def _read(builder: Builder, term: Rearrange) -> tuple[Arrangement, list[str]]:
    """The pattern as it stands once a part is taken, and the names on its left."""
    arrangement = _arrangement(builder, term)
    if isinstance(term.inner, Part) and f"{term.inner.name}_pitch" in builder.variant.values:
        *others, last = arrangement.source
        arrangement = replace(arrangement, source=(*others, *((name,) for name in last)))
    return arrangement, [name for names in arrangement.source for name in names]


# --- a part ----------------------------------------------------------------------------------------------------------


def _taken(builder: Builder, value: Value, name: str, arrangement: Arrangement) -> Value:
    """The part of the last axis that is arranged: a run, or runs a pitch apart, which get an axis for each name."""
    offset, pitch = (builder.variant.values.get(f"{name}_{word}") for word in ("offset", "pitch"))
    *others, last = arrangement.source
    sizes = [builder.size(each) for each in last]
    if offset is None:
        return value
    if pitch is None:
        return _slice(builder, value, {len(others): (offset, product(sizes))})
    blocks = builder.size(f"{name}_blocks")  # not -1: the other axes may be empty
    apart = builder.constant([*(0 for _ in others), blocks, pitch], TensorProto.INT64)
    value = builder.node("Reshape", [value, apart], value.dtype)
    axis = len(others)
    runs = {axis: (offset // pitch, product(sizes[:-1])), axis + 1: (offset % pitch, sizes[-1])}
    value = _slice(builder, value, runs)
    if len(last) == 2:
        return value
    outer = builder.constant([*(0 for _ in others), *sizes], TensorProto.INT64)
    return builder.node("Reshape", [value, outer], value.dtype)


def _slice(builder: Builder, value: Value, taken: dict[int, tuple[int, Any]]) -> Value:
    """By axis the first element and how many."""
    starts, ends = [first for first, _ in taken.values()], [first + count for first, count in taken.values()]
    bounds = {"starts": starts, "ends": ends, "axes": list(taken)}
    if builder.variant.opset < 10:
        return builder.node("Slice", [value], value.dtype, **bounds)
    inputs = [builder.constant(numbers, TensorProto.INT64) for numbers in bounds.values()]
    return builder.node("Slice", [value, *inputs], value.dtype)


# --- moves -----------------------------------------------------------------------------------------------------------


def _repeated(builder: Builder, order: Sequence[str], split: Sequence[str]) -> list[int]:
    return [i for i, name in enumerate(order) if name not in split and builder.size(name) != 1]


def _repeat(builder: Builder, value: Value, order: Sequence[str], repeated: Sequence[int]) -> Value:
    value = _with_axes(builder, "Unsqueeze", value, repeated)
    shape = [builder.size(name) if i in repeated else 1 for i, name in enumerate(order)]
    return builder.node("Expand", [value, builder.constant(shape, TensorProto.INT64)], value.dtype)


def _with_axes(builder: Builder, op: str, value: Value, axes: Sequence[int]) -> Value:
    """Squeeze or Unsqueeze."""
    if builder.variant.opset < 13:
        return builder.node(op, [value], value.dtype, axes=list(axes))
    return builder.node(op, [value, builder.constant(list(axes), TensorProto.INT64)], value.dtype)


def _target(builder: Builder, wanted: Sequence[tuple[str, ...]], present: Sequence[tuple[str, ...]]) -> Target:
    """The shape that makes axes of the names `wanted` from axes of the names `present`."""
    wanted, present = (
        [tuple(n for n in names if builder.size(n) != 1) for names in axes] for axes in (wanted, present)
    )
    if wanted == present:
        return KEPT
    target: list[int | None] = []
    for i, names in enumerate(wanted):
        size: Any = product([builder.size(name) for name in names])
        known = isinstance(size, int) and size != 0
        same = i < len(present) and tuple(present[i]) == tuple(names)
        target.append(size if known else 0 if same else -1)
    if target.count(-1) > 1:
        return None
    return (_spaced(target, wanted, present) if {0, -1} <= set(target) else None) or target


def _spaced(
    target: Sequence[int | None], wanted: Sequence[tuple[str, ...]], present: Sequence[tuple[str, ...]]
) -> list[int | None] | None:
    """The target with -1 replaced by 0, which copies the size at its place, and spaces in front that bring it there.

    Beside a size that is 0 when the model runs, -1 could be any number, and runtimes refuse it.
    """
    result: list[int | None] = []
    for size, names in zip(target, wanted, strict=True):
        if size in (0, -1):
            if names not in present or present.index(names) < len(result):
                return None
            result += [SPACE] * (present.index(names) - len(result))
        result.append(0 if size == -1 else size)
    return result


def _reshaped(builder: Builder, value: Value, target: Target, term: Rearrange) -> Value:
    if target is None:
        raise PatternError(f"{term.span}: a Reshape with two unknown sizes cannot be written")
    if target is KEPT:
        return value
    spaces = [i for i, size in enumerate(target) if size is SPACE]
    sizes = builder.constant([1 if size is SPACE else size for size in target], TensorProto.INT64)
    value = builder.node("Reshape", [value, sizes], value.dtype)
    return _with_axes(builder, "Squeeze", value, spaces) if spaces else value
