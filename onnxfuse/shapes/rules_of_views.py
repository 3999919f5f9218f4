"""Shape rules of operators that move, cut, join or regroup elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxfuse.model.graph import Node
from onnxfuse.shapes.bounds import lower_bound, maximum, minimum, upper_bound
from onnxfuse.shapes.dims import Size, divide, product
from onnxfuse.shapes.rules import (
    Partial,
    Shape,
    Undecided,
    axes_in,
    axis_of,
    numbers,
    rank_only,
    rule,
    shape_in,
)

if TYPE_CHECKING:
    from onnxfuse.shapes.inference import Shapes

END = 2**31 - 1  # exporters write this, or the largest int64, for "to the end"


@rule("Transpose")
def _transpose(s: Shapes, n: Node) -> Shape:
    shape = shape_in(s, n)
    return tuple(shape[axis] for axis in n.attrs.get("perm", range(len(shape) - 1, -1, -1)))


@rule("Reshape")
def _reshape(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    try:
        target = numbers(s, n, "shape")
    except Undecided:
        return rank_only(s, n, 1)
    if target is None:
        raise Undecided
    source = s.shape(n.inputs[0])
    if not n.attrs.get("allowzero"):
        target = [_copied(source, i) if size == 0 else size for i, size in enumerate(target)]
    if -1 not in target:
        return tuple(target)
    others = [size for size in target if size != -1]
    known = source is not None and None not in others
    missing = _quotient(source or (), others) if known else None
    return tuple(missing if size == -1 else size for size in target)


def _copied(source: Shape | None, axis: int) -> Size | None:
    return None if source is None else source[axis]


def _quotient(whole: Shape, parts: list[Size]) -> Size | None:
    """What is left of a shape's element count; equal dimensions cancel first, be they what they may."""
    rest = list(whole)
    divisors = [size for size in parts if not (size in rest and rest.remove(size) is None)]  # type: ignore[func-returns-value]
    if 0 in divisors:
        return None
    return divide(product(rest), product(divisors))


@rule("Flatten")
def _flatten(s: Shapes, n: Node) -> Shape:
    shape = shape_in(s, n)
    axis = n.attrs.get("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return (product(shape[:axis]), product(shape[axis:]))


@rule("Squeeze")
def _squeeze(s: Shapes, n: Node) -> Shape:
    shape = shape_in(s, n)
    axes = axes_in(s, n, len(shape))
    if axes is None:
        if not all(isinstance(size, int) for size in shape):
            raise Undecided
        axes = [i for i, size in enumerate(shape) if size == 1]
    return tuple(size for i, size in enumerate(shape) if i not in axes)


@rule("Unsqueeze")
def _unsqueeze(s: Shapes, n: Node) -> Shape:
    shape = shape_in(s, n)
    rank = len(shape) + len(numbers(s, n, "axes") or ())
    axes = axes_in(s, n, rank) or []
    rest = iter(shape)
    return tuple(1 if i in axes else next(rest) for i in range(rank))


@rule("Concat")
def _concat(s: Shapes, n: Node) -> Shape:
    shapes = [shape_in(s, n, i) for i in range(len(n.inputs))]
    axis = axis_of(n.attrs.get("axis", 1), len(shapes[0]))
    total: Size = 0
    for shape in shapes:
        total = total + shape[axis]
    return tuple(total if i == axis else _agreed([shape[i] for shape in shapes]) for i in range(len(shapes[0])))


def _agreed(sizes: list[Size]) -> Size:
    """The best known of sizes that must be equal."""
    return min(sizes, key=lambda size: (not isinstance(size, int), str(size).startswith("?")))


@rule("Split")
def _split(s: Shapes, n: Node) -> list[Partial | None]:
    shape = shape_in(s, n)
    axis = axis_of(n.attrs.get("axis", 0), len(shape))
    try:
        sizes: Partial = split_sizes(s, n, shape[axis])
    except Undecided:
        sizes = [None] * len(n.outputs)
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def split_sizes(s: Shapes, n: Node, whole: Size) -> list[Size]:
    """How `Split` divides a dimension."""
    given = numbers(s, n, "split")
    if given is not None:
        return given
    count = n.attrs.get("num_outputs", len(n.outputs))
    chunk = (whole + count - 1) // count
    return [chunk] * (count - 1) + [whole - chunk * (count - 1)]


@rule("Slice")
def _slice(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    shape: list[Size | None] = list(shape_in(s, n))
    try:
        parts = slices(s, n, shape_in(s, n))
    except Undecided:
        axes = axes_in(s, n, len(shape)) or range(len(shape))
        return tuple(None if i in axes else size for i, size in enumerate(shape))
    for axis, (start, end, step) in parts.items():
        shape[axis] = _slice_size(shape[axis], start, end, step)
    return tuple(shape)


def slices(s: Shapes, n: Node, shape: Shape) -> dict[int, tuple[Any, Any, int]]:
    """Per axis the start, end and step of a `Slice`; a bound that is not known is None."""
    starts, ends = _bounds(s, n, "starts"), _bounds(s, n, "ends")
    if starts is None and ends is None:
        raise Undecided
    count = len(starts or ends or ())
    axes = axes_in(s, n, len(shape)) or list(range(count))
    steps = numbers(s, n, "steps") or [1] * count
    bounds = zip(axes, starts or [None] * count, ends or [None] * count, steps, strict=True)
    return {axis: (_first(start, shape[axis], step), end, step) for axis, start, end, step in bounds}


def _first(start: Any, size: Size, step: Any) -> Any:
    """Going back from in front of the first element begins with it, where Python takes none."""
    known = isinstance(start, int) and isinstance(size, int) and isinstance(step, int)
    return max(start, -size) if known and step < 0 else start


def _bounds(s: Shapes, n: Node, name: str) -> list[Any] | None:
    try:
        return numbers(s, n, name)
    except Undecided:
        return None


def _slice_size(size: Any, start: Any, end: Any, step: Any) -> Size | None:
    if start is None or end is None or not isinstance(step, int):
        return None
    if all(isinstance(x, int) for x in (size, start, end)):
        return len(range(size)[start:end:step])
    if step < 0:
        whole = isinstance(start, int) and (start == -1 or start >= END) and isinstance(end, int) and end <= -END
        return size if step == -1 and whole else None
    first, last = _within(start, size), _within(end, size)
    if first is None or last is None:
        return None
    length, low = last - first, lower_bound(last - first)
    # x[1:] of `s` elements has s - 1: dimensions so short that a slice of theirs would be limited to 0 do not count.
    return ((length if low is not None and low >= -1 else maximum(0, length)) + step - 1) // step


def _within(bound: Size, size: Size) -> Size | None:
    """A slice's bound, counted from the front and limited to the dimension; None where its sign is not known."""
    low, high = lower_bound(bound), upper_bound(bound)
    if low is not None and low >= 0:
        return size if low >= END or bound == size else bound if bound == 1 else minimum(bound, size)
    if high is not None and high <= 0:
        return size + bound if bound == -1 or (lower_bound(size + bound) or 0) >= 0 else maximum(0, size + bound)
    return None


@rule("Gather")
def _gather(s: Shapes, n: Node) -> Shape:
    data, indices = shape_in(s, n), shape_in(s, n, 1)
    axis = axis_of(n.attrs.get("axis", 0), len(data))
    return (*data[:axis], *indices, *data[axis + 1 :])


@rule("GatherElements")
def _gather_elements(s: Shapes, n: Node) -> Shape:
    return shape_in(s, n, 1)


@rule("GatherND")
def _gather_nd(s: Shapes, n: Node) -> Shape:
    data, indices = shape_in(s, n), shape_in(s, n, 1)
    depth = indices[-1]
    if not isinstance(depth, int):
        raise Undecided
    return (*indices[:-1], *data[n.attrs.get("batch_dims", 0) + depth :])
