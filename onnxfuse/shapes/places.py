"""What index and boolean tensors hold at each place, told from how they are computed: indices, entries of others.

Exporters compute masks from ranges: position against position, and a padding mask gathered by the ranges of its own
axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from onnx import TensorProto

from onnxfuse.errors import ModelError
from onnxfuse.model.graph import Graph, Node, Tensor, constant_value, is_constant, op_of, producer
from onnxfuse.shapes.dims import Size, product
from onnxfuse.shapes.indices import AtMostZero, Entry, Index, Value, along, ordered, triangle
from onnxfuse.shapes.inference import Shapes

LARGEST = 2**16  # elements of a constant that is looked at
LARGEST_MASK = 2**22  # where it may be a mask
READ = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})
VIEWS = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
Rule: TypeAlias = Callable[["Places", Node], "Value | None"]


class Places:
    """The values of a sorted graph's integer and boolean tensors, by name; what is missing is not known."""

    def __init__(self, graph: Graph, shapes: Shapes) -> None:
        """Visit the nodes in order."""
        self.graph, self.shapes = graph, shapes
        self.values: dict[str, Value | None] = {}
        self.columns: dict[str, tuple[Value | None, ...]] = {}  # of tensors that are made of them
        for node in graph.nodes:
            rule, out = RULES.get(op_of(node)), node.outputs[0] if len(node.outputs) == 1 else None
            if rule is not None and out is not None and shapes.dtype(out) in READ:
                size = self._size(out)
                self.values[out.name] = self._held(rule(self, node), out) if size is None else size

    def _held(self, value: Value | None, tensor: Tensor) -> Value | None:
        """None where the sum might leave the integers of its type: sizes are below 2**31."""
        if not isinstance(value, Index):
            return value
        wide = self.shapes.dtype(tensor) == TensorProto.INT64
        parts = [value.offset, *(factor for _, _, factor in value.terms)]
        factor, offset = (2**31, 2**62) if wide else (1, 2**30)
        fits = all(abs(p) <= (factor if i else offset) for i, p in enumerate(parts) if isinstance(p, int))
        return value if fits else None

    def of(self, tensor: Tensor) -> Value | None:
        """What the tensor holds at a place."""
        if tensor.name not in self.values:
            self.values[tensor.name] = self._constant(tensor) if is_constant(tensor) else self._size(tensor)
        return self.values[tensor.name]

    def _size(self, tensor: Tensor) -> Value | None:
        """A single size."""
        found = self.shapes.value(tensor)
        if found is None or found.size != 1:
            return None
        value = found.item()
        return value if isinstance(value, bool) else Index(offset=value)

    def _constant(self, tensor: Tensor) -> Value | None:
        """A constant that is one number throughout, counts along one axis, or is true up to a diagonal."""
        dtype = self.shapes.dtype(tensor)
        largest = LARGEST_MASK if dtype == TensorProto.BOOL else LARGEST
        if dtype not in READ or not 0 < math.prod(tensor.shape) <= largest:
            return None
        try:
            value = constant_value(self.graph, tensor)
        except ModelError:  # its file is out of reach
            return None
        first = value.reshape(-1)[0].item()
        if np.all(value == first):
            return first if isinstance(first, bool) else Index(offset=first)
        longer = [axis for axis, size in enumerate(value.shape) if size > 1]
        if value.dtype == np.bool_:
            return triangle(value)
        if len(longer) > 1 or np.any(np.diff(value.reshape(-1)) != 1):
            return None
        return Index(((longer[0] - value.ndim, value.size, 1),), first)

    def number(self, tensor: Tensor) -> bool | int | float | None:
        """The value of all elements of what is filled with one number, of any dtype."""
        while (node := producer(tensor)) is not None and op_of(node) in {*VIEWS, "Expand", "Identity", "Transpose"}:
            tensor = node.inputs[0]
        if node is not None and op_of(node) == "ConstantOfShape":
            fill = self.shapes.constant(node.attrs["value"]) if "value" in node.attrs else np.zeros(1)
        else:
            fill = self.shapes.constant(tensor) if is_constant(tensor) and math.prod(tensor.shape) == 1 else None
        found: bool | int | float | None = None if fill is None else fill.item()
        return found

    def index(self, node: Node, place: int = 0) -> Index | None:
        """An input that is a sum of indices."""
        found = self.of(node.inputs[place])
        return found if isinstance(found, Index) else None

    def entry(self, tensor: Tensor, indices: Sequence[Index]) -> Entry | None:
        """An element of a tensor, or rather of what the tensor is a view of."""
        if any((low := index.bounds()[0]) is None or low < 0 for index in indices):
            return None  # which counts from the end
        while (node := producer(tensor)) is not None and op_of(node) in VIEWS:
            source, shape = self.shapes.shape(node.inputs[0]), self.shapes.shape(tensor)
            found = None if source is None or shape is None else _unraveled(_raveled(indices, shape), source)
            if found is None:
                break
            tensor, indices = node.inputs[0], found
        return Entry(tensor.name, tuple(indices), tensor)


def _raveled(indices: Sequence[Index], shape: Sequence[Size]) -> Index:
    """How far in memory the element is from the first."""
    total = Index()
    for axis, index in enumerate(indices):
        total = total.plus(index.times(product(shape[axis + 1 :])))
    return total


def _unraveled(place: Index, shape: Sequence[Size]) -> tuple[Index, ...] | None:
    """The indices of an element; None where they are not known to be indices that run along whole axes."""
    found = [Index()] * len(shape)
    if place.offset != 0:
        return None
    for axis, size, factor in place.terms:
        strides = [product(shape[i + 1 :]) for i in range(len(shape))]
        fits = [i for i, stride in enumerate(strides) if stride == factor and shape[i] == size]
        if len(fits) != 1 or found[fits[0]].terms:
            return None
        found[fits[0]] = along(axis, size)
    return tuple(found)


# --- rules -----------------------------------------------------------------------------------------------------------


def _range(p: Places, n: Node) -> Value | None:
    start, _, delta = (p.shapes.exact_value(t) for t in n.inputs)
    shape = p.shapes.shape(n.outputs[0])
    if start is None or delta is None or delta.item() != 1 or shape is None:
        return None
    return along(-1, shape[0]).plus(Index(offset=start.item()))


def _view(p: Places, n: Node) -> Value | None:
    """A move of axes of one element leaves the others in order."""
    value = p.of(n.inputs[0])
    before, after = p.shapes.shape(n.inputs[0]), p.shapes.shape(n.outputs[0])
    if isinstance(value, bool) or value is None or before is None or after is None:
        return value
    old, new = ([i - len(s) for i, size in enumerate(s) if size != 1] for s in (before, after))
    own = value.indices if isinstance(value, Entry) else (value.index if isinstance(value, AtMostZero) else value,)
    if [before[i] for i in old] != [after[i] for i in new] or {t[0] for i in own for t in i.terms} - {*old}:
        return None
    return _moved(value, dict(zip(old, new, strict=True)))


def _transpose(p: Places, n: Node) -> Value | None:
    value, shape = p.of(n.inputs[0]), p.shapes.shape(n.inputs[0])
    if isinstance(value, bool) or value is None or shape is None:
        return value
    rank = len(shape)
    perm = n.attrs.get("perm") or range(rank)[::-1]
    return _moved(value, {axis - rank: place - rank for place, axis in enumerate(perm)})


def _moved(value: Index | AtMostZero | Entry, axes: Mapping[int, int]) -> Index | AtMostZero | Entry:
    if isinstance(value, Index):
        return value.moved(axes)
    if isinstance(value, AtMostZero):
        return AtMostZero(value.index.moved(axes))
    return replace(value, indices=tuple(index.moved(axes) for index in value.indices))


def _same(p: Places, n: Node) -> Value | None:
    return p.of(n.inputs[0])


def _cast(p: Places, n: Node) -> Value | None:
    """Between integers that hold an index, and between booleans; other values are those of a new tensor."""
    to = p.shapes.dtype(n.outputs[0])
    if p.shapes.dtype(n.inputs[0]) not in READ:
        number = p.number(n.inputs[0])
        return None if number is None or to != TensorProto.BOOL else number != 0
    value = p.of(n.inputs[0])
    if to == TensorProto.BOOL:
        return (value.offset != 0 if isinstance(value, Index) and not value.terms and isinstance(value.offset, int)
                else value if isinstance(value, bool | AtMostZero) else None)  # fmt: skip
    if isinstance(value, bool):
        return Index(offset=int(value))
    return value if isinstance(value, Index) and to in (TensorProto.INT64, TensorProto.INT32) else None


def _part(p: Places, n: Node) -> Value | None:
    """A part of what is the same everywhere."""
    value = p.of(n.inputs[0])
    return value if isinstance(value, bool) or (isinstance(value, Index) and not value.terms) else None


def _filled(p: Places, n: Node) -> Value | None:
    number = p.number(n.outputs[0])
    if number is None:
        return None
    return number != 0 if p.shapes.dtype(n.outputs[0]) == TensorProto.BOOL else Index(offset=int(number))


def _sum(p: Places, n: Node) -> Value | None:
    left, right = p.index(n), p.index(n, 1)
    if left is None or right is None:
        return None
    return left.plus(right.times(-1 if op_of(n) == "Sub" else 1))


def _product(p: Places, n: Node) -> Value | None:
    for left, right in ((p.index(n), n.inputs[1]), (p.index(n, 1), n.inputs[0])):
        factor = p.shapes.exact_value(right)
        if left is not None and factor is not None and factor.size == 1:
            return left.times(factor.item())
    return None


def _concat(p: Places, n: Node) -> Value | None:
    """Columns side by side, as GatherND wants its indices."""
    shapes = [p.shapes.shape(t) for t in n.inputs]
    if all(shape is not None and shape[-1:] == (1,) and n.attrs["axis"] in (-1, len(shape) - 1) for shape in shapes):
        p.columns[n.outputs[0].name] = tuple(p.of(t) for t in n.inputs)
    return None


def _gather_nd(p: Places, n: Node) -> Value | None:
    columns, rank = p.columns.get(n.inputs[1].name, ()), p.shapes.rank(n.inputs[0])
    if n.attrs.get("batch_dims", 0) or not columns or len(columns) != rank:
        return None
    whole = [each.moved({axis: axis + 1 for axis, _, _ in each.terms}) for each in columns if isinstance(each, Index)]
    return p.entry(n.inputs[0], whole) if len(whole) == rank else None


def _gather(p: Places, n: Node) -> Value | None:
    shape, rank, index = p.shapes.shape(n.inputs[0]), p.shapes.rank(n.inputs[1]), p.index(n, 1)
    if shape is None or rank is None or index is None or n.attrs.get("axis", 0) != 0:
        return None
    rest = len(shape) - 1
    first = index.moved({axis: axis - rest for axis, _, _ in index.terms})
    return p.entry(n.inputs[0], [first, *(along(i - rest, size) for i, size in enumerate(shape[1:]))])


def _gather_elements(p: Places, n: Node) -> Value | None:
    """Of a tensor that holds one number everywhere."""
    index = p.index(n)
    return index if index is not None and not index.terms else None


def _compared(p: Places, n: Node) -> Value | None:
    """True or false where it is that everywhere."""
    left, right = p.index(n), p.index(n, 1)
    if left is None or right is None:
        return None
    if op_of(n) == "Equal":
        same = [ordered(left, right), ordered(right, left)]
        return False if False in same else True if same == [True, True] else None
    if op_of(n).startswith("Greater"):
        left, right = right, left
    return ordered(left, right, 0 if op_of(n).endswith("OrEqual") else 1)


def _joined(p: Places, n: Node) -> Value | None:
    values, settles = [p.of(t) for t in n.inputs], op_of(n) == "Or"
    if any(value is settles for value in values):
        return settles
    left = [value for value in values if value is not (not settles)]
    return left[0] if len(left) == 1 else None if left else not settles


def _not(p: Places, n: Node) -> Value | None:
    value = p.of(n.inputs[0])
    if isinstance(value, AtMostZero):
        return ordered(Index(offset=1), value.index)
    return not value if isinstance(value, bool) else None


RULES: dict[str, Rule] = {
    "Range": _range, **dict.fromkeys(VIEWS, _view), "Transpose": _transpose, "Expand": _same, "Identity": _same,
    "Cast": _cast, "ConstantOfShape": _filled, "Add": _sum, "Sub": _sum, "Mul": _product, "Concat": _concat,
    "GatherND": _gather_nd, "Gather": _gather, "GatherElements": _gather_elements,
    "And": _joined, "Or": _joined, "Not": _not, "Slice": _part,
    **dict.fromkeys(("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"), _compared),
}  # fmt: skip
