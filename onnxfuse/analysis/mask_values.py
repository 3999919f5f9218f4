"""What integer and boolean tensors hold, as formulas over the indices of their own elements.

Exporters compute attention masks from ranges: they compare the position of a key with the position of a query, and
gather a padding mask at positions that are ranges of its own axes.  `IndexAnalysis` follows these computations.

Axes are counted from the last, -1, so that broadcasting leaves a formula as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from onnx import TensorProto

from onnxfuse.analysis.bounds import lower_bound, upper_bound
from onnxfuse.analysis.dims import Size, product
from onnxfuse.analysis.rules import apply_rule
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.slices import slice_bounds
from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import int_attribute, ints_attribute, tensor_attribute
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer

MAX_INDEX_ELEMENTS = 2**16  # of an integer constant that is read
MAX_STEP = 64  # in which an integer constant counts
MAX_MASK_ELEMENTS = 2**22  # of a boolean constant that is read
ANALYZED_DTYPES = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})
REGROUPING = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})  # they keep the elements in memory order


# --- formulas --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Index:
    """A linear expression in the indices of an element: the sum of `index[axis] * factor`, plus `offset`.

    Each of `terms` is (axis, size of the axis, factor).
    """

    terms: tuple[tuple[int, Size, Size], ...] = ()
    offset: Size = 0

    def plus(self, other: Index) -> Index:
        """Return the sum of both expressions."""
        factors: dict[tuple[int, Size], Size] = {}
        for axis, size, factor in sorted(self.terms + other.terms, key=lambda term: term[0]):
            factors[axis, size] = factors.get((axis, size), 0) + factor
        return Index(tuple((*key, factor) for key, factor in factors.items() if factor != 0),
                     self.offset + other.offset)  # fmt: skip

    def times(self, factor: Size) -> Index:
        """Return the expression multiplied by a size."""
        return Index(tuple((axis, size, each * factor) for axis, size, each in self.terms if factor != 0),
                     self.offset * factor)  # fmt: skip

    def renumbered(self, axes: Mapping[int, int]) -> Index:
        """Return the expression with each axis replaced by the one that `axes` maps it to."""
        return Index(tuple((axes[axis], size, factor) for axis, size, factor in self.terms), self.offset)

    def bounds(self) -> tuple[int | None, int | None]:
        """Return a lower and an upper bound of the expression; None for one that is not known."""
        low: Size = self.offset
        high: Size = self.offset
        for _, size, factor in self.terms:
            if (least := lower_bound(factor)) is None or (least < 0 and not isinstance(factor, int)):
                return None, None
            low, high = (low, high + (size - 1) * factor) if least >= 0 else (low + (size - 1) * factor, high)
        return lower_bound(low), upper_bound(high)


@dataclass(frozen=True)
class AtMostZero:
    """A boolean that is true where the expression is 0 or less."""

    index: Index


@dataclass(frozen=True)
class Element:
    """The element of another tensor at these indices, one expression for each of its axes."""

    name: str
    indices: tuple[Index, ...]
    tensor: Tensor = field(compare=False, repr=False)


Value: TypeAlias = bool | Index | AtMostZero | Element  # a bool or an Index without terms: all elements are equal


def axis_index(axis: int, size: Size) -> Index:
    """Return the index along an axis, which is 0 for an axis of size 1."""
    return Index() if size == 1 else Index(((axis, size, 1),))


def less_or_equal(left: Index, right: Index, margin: Size = 0) -> Value:
    """Return the boolean `left + margin <= right`."""
    excess = left.plus(right.times(-1)).plus(Index(offset=margin))
    low, high = excess.bounds()
    if high is not None and high <= 0:
        return True
    return False if low is not None and low > 0 else AtMostZero(excess)


def causal_mask_value(queries: Size, keys: Size) -> Value:
    """Return what a causal mask [..., queries, keys] holds: true up to the diagonal that ends in its last corner."""
    return less_or_equal(axis_index(-1, keys), axis_index(-2, queries), queries - keys)


def triangular_mask_value(mask: Array) -> Value | None:
    """Return what a boolean array holds that is true up to a diagonal of its last two axes; None for any other array.

    Its other axes have size 1.
    """
    rows, columns = (1, 1, *mask.shape)[-2:]
    if mask.size != rows * columns:
        return None
    true_per_row = np.count_nonzero(mask.reshape(rows, columns), axis=1)
    for diagonal in (int(true_per_row[-1]) - rows, int(true_per_row[0]) - 1):
        if np.array_equal(mask.reshape(rows, columns), np.tri(rows, columns, diagonal)):
            return less_or_equal(axis_index(-1, columns), axis_index(-2, rows).plus(Index(offset=diagonal)))
    return None


# --- analysis --------------------------------------------------------------------------------------------------------


class IndexAnalysis:
    """The values of a sorted graph's integer and boolean tensors, by tensor name; None or absent where unknown."""

    def __init__(self, graph: Graph, shapes: ShapeInfo) -> None:
        """Visit the nodes in order."""
        self.graph, self.shapes, self.strict = graph, shapes, shapes.strict
        self.values: dict[str, Value | None] = {}
        self.index_columns: dict[str, tuple[Value | None, ...]] = {}  # of a Concat of columns, as GatherND reads it
        for node in graph.nodes:
            rule, output = RULES.get(op_of(node)), node.outputs[0] if len(node.outputs) == 1 else None
            if rule is not None and output is not None and shapes.dtype(output) in ANALYZED_DTYPES:
                scalar = self._known_scalar(output)
                if scalar is None:
                    scalar = self._if_no_overflow(apply_rule(rule, self, node), output)
                self.values[output.name] = scalar

    def value(self, tensor: Tensor) -> Value | None:
        """Return what the tensor's elements hold; None if that is not known."""
        if tensor.name not in self.values:
            found = self._read_constant(tensor) if is_constant(tensor) else self._known_scalar(tensor)
            self.values[tensor.name] = found
        return self.values[tensor.name]

    def _if_no_overflow(self, value: Value | None, tensor: Tensor) -> Value | None:
        """Return None if the expression might leave the range of the tensor's dtype; sizes are below 2**31."""
        if not isinstance(value, Index):
            return value
        is_int64 = self.shapes.dtype(tensor) == TensorProto.INT64
        max_factor, max_offset = (2**31, 2**62) if is_int64 else (1, 2**30)
        factors = [factor for _, _, factor in value.terms if isinstance(factor, int)]
        if isinstance(value.offset, int) and abs(value.offset) > max_offset:
            return None
        return value if all(abs(factor) <= max_factor for factor in factors) else None

    def _known_scalar(self, tensor: Tensor) -> Value | None:
        """Return the value of a tensor of one element, where shape inference knows it."""
        found = self.shapes.value(tensor)
        if found is None or found.size != 1:
            return None
        value = found.item()
        return value if isinstance(value, bool) else Index(offset=value)

    def _read_constant(self, tensor: Constant) -> Value | None:
        """Read a constant that is the same everywhere, counts up along one axis, or is true up to a diagonal.

        It may count in steps, as the places of every other element do.
        """
        dtype = self.shapes.dtype(tensor)
        max_elements = MAX_MASK_ELEMENTS if dtype == TensorProto.BOOL else MAX_INDEX_ELEMENTS
        if dtype not in ANALYZED_DTYPES or not 0 < math.prod(tensor.shape) <= max_elements:
            return None
        try:
            value = constant_value(self.graph, tensor)
        except ModelError:  # the file with its data cannot be read
            return None
        first = value.reshape(-1)[0].item()
        if np.all(value == first):
            return first if isinstance(first, bool) else Index(offset=first)
        long_axes = [axis for axis, size in enumerate(value.shape) if size > 1]
        if value.dtype == np.bool_:
            return triangular_mask_value(value)
        steps = np.unique(np.diff(value.reshape(-1)))
        if len(long_axes) > 1 or len(steps) > 1 or not 0 < steps[0] <= MAX_STEP:
            return None
        return Index(((long_axes[0] - value.ndim, value.size, steps.item()),), first)

    def fill_value(self, tensor: Tensor) -> bool | int | float | None:
        """Return the one number that all elements of a tensor of any dtype equal; None if no such number is known."""
        same_values = {*REGROUPING, "Expand", "Identity", "Transpose"}
        while (node := producer(tensor)) is not None and op_of(node) in same_values:
            tensor = node.inputs[0]
        if node is not None and op_of(node) == "ConstantOfShape":
            stored = tensor_attribute(node, "value")
            fill = np.zeros(1) if stored is None else self.shapes.exact_constant(stored)
        else:
            fill = self.shapes.exact_constant(tensor) if is_constant(tensor) and math.prod(tensor.shape) == 1 else None
        found: bool | int | float | None = None if fill is None else fill.item()
        return found

    def index(self, node: Node, input_index: int = 0) -> Index | None:
        """Return the value of an input if it is a linear expression in indices."""
        found = self.value(node.inputs[input_index])
        return found if isinstance(found, Index) else None

    def element(self, tensor: Tensor, indices: Sequence[Index]) -> Element | None:
        """Return the element of a tensor at `indices`, seen through regroupings as an element of their source."""
        if any((low := index.bounds()[0]) is None or low < 0 for index in indices):
            return None  # a negative index counts from the end
        while (node := producer(tensor)) is not None and op_of(node) in REGROUPING:
            source, shape = self.shapes.shape(node.inputs[0]), self.shapes.shape(tensor)
            found = None if source is None or shape is None else _unravel(_ravel(indices, shape), source)
            if found is None:
                break
            tensor, indices = node.inputs[0], found
        return Element(tensor.name, tuple(indices), tensor)


def _ravel(indices: Sequence[Index], shape: Sequence[Size]) -> Index:
    """Return an element's offset in memory, in elements, as numpy.ravel_multi_index does."""
    total = Index()
    for axis, index in enumerate(indices):
        total = total.plus(index.times(product(shape[axis + 1 :])))
    return total


def _unravel(offset: Index, shape: Sequence[Size]) -> tuple[Index, ...] | None:
    """Return an element's indices from its offset in memory; None unless each of them runs along a whole axis."""
    found = [Index()] * len(shape)
    if offset.offset != 0:
        return None
    for axis, size, factor in offset.terms:
        strides = [product(shape[i + 1 :]) for i in range(len(shape))]
        fits = [i for i, stride in enumerate(strides) if stride == factor and shape[i] == size]
        if len(fits) != 1 or found[fits[0]].terms:
            return None
        found[fits[0]] = axis_index(axis, size)
    return tuple(found)


# --- rules: the value of a node's output -----------------------------------------------------------------------------

Rule: TypeAlias = Callable[[IndexAnalysis, Node], Value | None]


def _range(analysis: IndexAnalysis, node: Node) -> Value | None:
    start, _, delta = (analysis.shapes.exact_value(t) for t in node.inputs)
    shape = analysis.shapes.shape(node.outputs[0])
    if start is None or delta is None or delta.item() != 1 or shape is None:
        return None
    return axis_index(-1, shape[0]).plus(Index(offset=start.item()))


def _regroup(analysis: IndexAnalysis, node: Node) -> Value | None:
    """A regrouping that only adds and removes axes of size 1 keeps the order of the other axes."""
    value = analysis.value(node.inputs[0])
    before, after = analysis.shapes.shape(node.inputs[0]), analysis.shapes.shape(node.outputs[0])
    if isinstance(value, bool) or value is None or before is None or after is None:
        return value
    old, new = ([i - len(shape) for i, size in enumerate(shape) if size != 1] for shape in (before, after))
    if isinstance(value, Element):
        indices = value.indices
    else:
        indices = (value.index if isinstance(value, AtMostZero) else value,)
    used = {axis for index in indices for axis, _, _ in index.terms}
    if [before[i] for i in old] != [after[i] for i in new] or used - {*old}:
        return None
    return _renumber(value, dict(zip(old, new, strict=True)))


def _transpose(analysis: IndexAnalysis, node: Node) -> Value | None:
    value, shape = analysis.value(node.inputs[0]), analysis.shapes.shape(node.inputs[0])
    if isinstance(value, bool) or value is None or shape is None:
        return value
    rank = len(shape)
    perm = ints_attribute(node, "perm") or range(rank)[::-1]
    return _renumber(value, {old - rank: new - rank for new, old in enumerate(perm)})


def _renumber(value: Index | AtMostZero | Element, axes: Mapping[int, int]) -> Index | AtMostZero | Element:
    if isinstance(value, Index):
        return value.renumbered(axes)
    if isinstance(value, AtMostZero):
        return AtMostZero(value.index.renumbered(axes))
    return replace(value, indices=tuple(index.renumbered(axes) for index in value.indices))


def _first_input(analysis: IndexAnalysis, node: Node) -> Value | None:
    return analysis.value(node.inputs[0])


def _cast(analysis: IndexAnalysis, node: Node) -> Value | None:
    """A cast keeps an index among integers and a mask among booleans; it makes a new tensor of an `Element`."""
    to = analysis.shapes.dtype(node.outputs[0])
    if analysis.shapes.dtype(node.inputs[0]) not in ANALYZED_DTYPES:
        number = analysis.fill_value(node.inputs[0])
        return None if number is None or to != TensorProto.BOOL else number != 0
    value = analysis.value(node.inputs[0])
    if to == TensorProto.BOOL:
        if isinstance(value, Index) and not value.terms and isinstance(value.offset, int):
            return value.offset != 0
        return value if isinstance(value, bool | AtMostZero) else None
    if isinstance(value, bool):
        return Index(offset=int(value))
    return value if isinstance(value, Index) and to in (TensorProto.INT64, TensorProto.INT32) else None


def _slice(analysis: IndexAnalysis, node: Node) -> Value | None:
    """A slice of equal elements holds their value; one of a linear expression starts later and may count in steps."""
    value, shape = analysis.value(node.inputs[0]), analysis.shapes.shape(node.inputs[0])
    if isinstance(value, bool) or (isinstance(value, Index) and not value.terms):
        return value
    result = analysis.shapes.shape(node.outputs[0])
    if not isinstance(value, Index) or shape is None or result is None:
        return None
    found = Index(offset=value.offset)
    bounds = slice_bounds(analysis.shapes, node, shape)
    for axis, _, factor in value.terms:
        start, _, step = bounds.get(axis + len(shape), (0, None, 1))
        if not isinstance(start, int) or not isinstance(step, int) or start < 0 or step < 1:
            return None
        found = found.plus(axis_index(axis, result[axis]).times(step * factor)).plus(Index(offset=factor * start))
    return found


def _constant_of_shape(analysis: IndexAnalysis, node: Node) -> Value | None:
    number = analysis.fill_value(node.outputs[0])
    if number is None:
        return None
    return number != 0 if analysis.shapes.dtype(node.outputs[0]) == TensorProto.BOOL else Index(offset=int(number))


def _add_or_sub(analysis: IndexAnalysis, node: Node) -> Value | None:
    left, right = analysis.index(node), analysis.index(node, 1)
    if left is None or right is None:
        return None
    return left.plus(right.times(-1 if op_of(node) == "Sub" else 1))


def _mul(analysis: IndexAnalysis, node: Node) -> Value | None:
    for left, right in ((analysis.index(node), node.inputs[1]), (analysis.index(node, 1), node.inputs[0])):
        factor = analysis.shapes.exact_value(right)
        if left is not None and factor is not None and factor.size == 1:
            return left.times(factor.item())
    return None


def _concat(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Remember the columns that are joined to the indices of a GatherND."""
    shapes = [analysis.shapes.shape(t) for t in node.inputs]
    axis = node.attrs["axis"]
    if all(shape is not None and shape[-1:] == (1,) and axis in (-1, len(shape) - 1) for shape in shapes):
        analysis.index_columns[node.outputs[0].name] = tuple(analysis.value(t) for t in node.inputs)
    return None


def _gather_nd(analysis: IndexAnalysis, node: Node) -> Value | None:
    columns, rank = analysis.index_columns.get(node.inputs[1].name, ()), analysis.shapes.rank(node.inputs[0])
    if int_attribute(node, "batch_dims", 0) or not columns or len(columns) != rank:
        return None
    # The columns have a last axis of size 1, which the result does not have.
    indices = [
        column.renumbered({axis: axis + 1 for axis, _, _ in column.terms})
        for column in columns
        if isinstance(column, Index)
    ]
    return analysis.element(node.inputs[0], indices) if len(indices) == rank else None


def _gather(analysis: IndexAnalysis, node: Node) -> Value | None:
    shape, rank = analysis.shapes.shape(node.inputs[0]), analysis.shapes.rank(node.inputs[1])
    index = analysis.index(node, 1)
    if shape is None or rank is None or index is None or int_attribute(node, "axis", 0) != 0:
        return None
    rest = len(shape) - 1
    first = index.renumbered({axis: axis - rest for axis, _, _ in index.terms})
    others = (axis_index(i - rest, size) for i, size in enumerate(shape[1:]))
    return analysis.element(node.inputs[0], [first, *others])


def _gather_elements(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Elements gathered from a tensor whose elements are all equal hold that same value."""
    index = analysis.index(node)
    return index if index is not None and not index.terms else None


def _compare(analysis: IndexAnalysis, node: Node) -> Value | None:
    left, right = analysis.index(node), analysis.index(node, 1)
    if left is None or right is None:
        return None
    if op_of(node) == "Equal":
        both = [less_or_equal(left, right), less_or_equal(right, left)]
        return False if False in both else True if both == [True, True] else None
    if op_of(node).startswith("Greater"):
        left, right = right, left
    return less_or_equal(left, right, 0 if op_of(node).endswith("OrEqual") else 1)


def _and_or(analysis: IndexAnalysis, node: Node) -> Value | None:
    values, absorbing = [analysis.value(t) for t in node.inputs], op_of(node) == "Or"
    if any(value is absorbing for value in values):
        return absorbing
    others = [value for value in values if value is not (not absorbing)]
    return others[0] if len(others) == 1 else None if others else not absorbing


def _not(analysis: IndexAnalysis, node: Node) -> Value | None:
    value = analysis.value(node.inputs[0])
    if isinstance(value, AtMostZero):
        return less_or_equal(Index(offset=1), value.index)
    return not value if isinstance(value, bool) else None


RULES: dict[str, Rule] = {
    "Range": _range, **dict.fromkeys(REGROUPING, _regroup), "Transpose": _transpose, "Expand": _first_input,
    "Identity": _first_input, "Cast": _cast, "ConstantOfShape": _constant_of_shape, "Add": _add_or_sub,
    "Sub": _add_or_sub, "Mul": _mul, "Concat": _concat, "GatherND": _gather_nd, "Gather": _gather,
    "GatherElements": _gather_elements, "And": _and_or, "Or": _and_or, "Not": _not, "Slice": _slice,
    **dict.fromkeys(("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"), _compare),
}  # fmt: skip
