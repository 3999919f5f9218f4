"""The contents of integer and boolean tensors, as formulas over the indices of their own elements.

Exporters compute attention masks from ranges: they compare the position of a key with the position of a query, and
gather the elements of a padding mask at indices that are ranges over its axes.  tf2onnx sums up ones to count elements,
and divides the count by the number of columns.  `IndexAnalysis` follows these computations.

Axes are counted from the last, -1, so that broadcasting does not change a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from onnx import TensorProto

from onnxfuse.algebra.bounds import lower_bound
from onnxfuse.algebra.index_maps import Place, inverse, reshaped, sliced, transposed
from onnxfuse.algebra.indices import Index, divided
from onnxfuse.algebra.operators import COMPARISONS, REGROUPING, VIEWS
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.index_formulas import (
    AtMostZero,
    GatheredElement,
    Value,
    at_source,
    axis_index,
    bounds,
    less_or_equal,
    negated,
    place_in,
    shifted,
    triangular_mask_value,
)
from onnxfuse.analysis.rules import apply_rule, normalize_axis
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.slices import slice_bounds
from onnxfuse.analysis.two_numbers import TwoNumbers, chosen, compared, triangle, two_numbers
from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import int_attribute, perm_of, tensor_attribute
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer, tensor_before

MAX_INDEX_ELEMENTS = 2**16  # larger integer constants are not read
MAX_STEP = 64  # the largest step of a constant that counts up
MAX_MASK_ELEMENTS = 2**22  # larger boolean constants are not read
ANALYZED_DTYPES = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})


class IndexAnalysis:
    """The contents of a sorted graph's integer and boolean tensors, by tensor name; None or absent where unknown."""

    def __init__(self, graph: Graph, shapes: ShapeInfo) -> None:
        """Analyze the nodes of the graph in order."""
        self.graph, self.shapes, self.note = graph, shapes, shapes.note
        self.values: dict[str, Value | None] = {}
        self.numbers: dict[str, TwoNumbers | None] = {}  # results of `two_numbers`, by tensor name
        # By the name of a Concat's result: the columns that it joins, which a GatherND may read as indices.
        self.index_columns: dict[str, tuple[Value | None, ...]] = {}
        for node in graph.nodes:
            rule, output = RULES.get(op_of(node)), node.outputs[0] if len(node.outputs) == 1 else None
            if rule is not None and output is not None and shapes.dtype(output) in ANALYZED_DTYPES:
                scalar = self._known_scalar(output)
                if scalar is None:
                    scalar = self._if_no_overflow(apply_rule(rule, self, node), output)
                self.values[output.name] = scalar

    def value(self, tensor: Tensor) -> Value | None:
        """Return the contents of the tensor; None if they are not known."""
        if tensor.name not in self.values:
            found = self._read_constant(tensor) if is_constant(tensor) else self._known_scalar(tensor)
            self.values[tensor.name] = found
        return self.values[tensor.name]

    def _if_no_overflow(self, value: Value | None, tensor: Tensor) -> Value | None:
        """Return the value; None if it might leave the range of the tensor's dtype, assuming sizes below 2**31."""
        if not isinstance(value, Index):
            return value
        is_int64 = self.shapes.dtype(tensor) == TensorProto.INT64
        max_factor, max_offset = (2**31, 2**62) if is_int64 else (1, 2**30)
        factors = [factor for _, factor in value.terms if isinstance(factor, int)]
        if isinstance(value.constant, int) and abs(value.constant) > max_offset:
            return None
        return value if all(abs(factor) <= max_factor for factor in factors) else None

    def _known_scalar(self, tensor: Tensor) -> Value | None:
        """Return the value of a one-element tensor if shape inference knows it; otherwise None."""
        found = self.shapes.value(tensor)
        if found is None or found.size != 1:
            return None
        value = found.item()
        return value if isinstance(value, bool) else Index(value)

    def _read_constant(self, tensor: Constant) -> Value | None:
        """Return the contents of a constant that is uniform, counts up along one axis, or is true up to a diagonal.

        A constant may count up in steps greater than 1, like the indices of every second element.  Returns None for any
        other constant.
        """
        dtype = self.shapes.dtype(tensor)
        max_elements = MAX_MASK_ELEMENTS if dtype == TensorProto.BOOL else MAX_INDEX_ELEMENTS
        if dtype not in ANALYZED_DTYPES or not 0 < math.prod(tensor.shape) <= max_elements:
            return None
        try:
            value = constant_value(self.graph, tensor)
        except ModelError:  # the file with the constant's data cannot be read
            return None
        if value.dtype == np.bool_ and not np.all(value == value.reshape(-1)[0]):
            below, above = triangular_mask_value(value), triangular_mask_value(~value)
            return negated(above) if below is None and above is not None else below
        return _contents(value)

    def columns(self, tensor: Tensor) -> tuple[Value | None, ...]:
        """Return the contents of columns of indices, which a Concat joins or a constant holds; none if not known.

        A column has a last axis of size 1.  Those of a constant may repeat along all axes but one.
        """
        if not is_constant(tensor) or not 0 < math.prod(tensor.shape) <= MAX_INDEX_ELEMENTS:
            return self.index_columns.get(tensor.name, ())
        value, columns = constant_value(self.graph, tensor), list[Value | None]()
        for column in np.split(value, value.shape[-1], axis=-1):
            for axis in range(column.ndim):
                first = column.take([0], axis)
                column = first if np.all(column == first) else column
            columns.append(_contents(column))
        return tuple(columns)

    def fill_value(self, tensor: Tensor) -> bool | int | float | None:
        """Return the one number that fills a tensor of any dtype; None if no such number is known."""
        stored = tensor_before(tensor, VIEWS)
        node = producer(stored)
        if node is not None and op_of(node) == "ConstantOfShape":
            value = tensor_attribute(node, "value")
            if value is None:
                return 0
            stored = value
        if not is_constant(stored) or math.prod(stored.shape) != 1:
            return None
        try:
            number = constant_value(self.graph, stored)
        except ModelError:  # the file with the constant's data cannot be read
            return None
        found: bool | int | float | None = None if number.dtype == object else number.reshape(()).item()
        return found

    def moved(self, node: Node, value: Value) -> Value | None:
        """Return the contents of a view or a Slice whose input has the contents `value`; None if they are not known."""
        if isinstance(value, bool) or (isinstance(value, Index) and not value.terms) or op_of(node) in UNMOVED:
            return value
        before, after = self.shapes.shape(node.inputs[0]), self.shapes.shape(node.outputs[0])
        place = None if before is None or after is None else SOURCES[op_of(node)](self, node, before, after)
        return None if place is None else at_source(value, place)

    def index(self, node: Node, input_index: int = 0) -> Index | None:
        """Return the value of an input if it is a linear formula in the indices; otherwise None."""
        found = self.value(node.inputs[input_index])
        return found if isinstance(found, Index) else None

    def element(self, tensor: Tensor, indices: Sequence[Index]) -> GatheredElement | None:
        """Return the element of a tensor at `indices`; for a result of views, return the element of the views' source.

        None if an index could be negative.
        """
        if any((low := bounds(index)[0]) is None or low < 0 for index in indices):
            return None  # a negative index would count from the end
        while (node := producer(tensor)) is not None and op_of(node) in REGROUPING:
            source, shape = self.shapes.shape(node.inputs[0]), self.shapes.shape(tensor)
            found = () if source is None or shape is None else reshaped(tuple(indices), shape, source)
            if source is None or any(atom.kind != "variable" for index in found for atom, _ in index.terms):
                break
            tensor, indices = node.inputs[0], found
        return GatheredElement(tensor.name, tuple(indices), tensor)


# --- rules: each returns the value of a node's output -----------------------------------------------------------------

Rule: TypeAlias = Callable[[IndexAnalysis, Node], Value | None]


def _range(analysis: IndexAnalysis, node: Node) -> Value | None:
    start, _, delta = (analysis.shapes.exact_value(t) for t in node.inputs)
    shape = analysis.shapes.shape(node.outputs[0])
    if start is None or delta is None or delta.item() != 1 or shape is None:
        return None
    first: Size = start.item()
    return axis_index(-1, shape[0]) + first


def _move(analysis: IndexAnalysis, node: Node) -> Value | None:
    value = analysis.value(node.inputs[0])
    return None if value is None else analysis.moved(node, value)


def _regrouped(analysis: IndexAnalysis, node: Node, before: Shape, after: Shape) -> Place:
    return reshaped(place_in(after), after, before)


def _transposed(analysis: IndexAnalysis, node: Node, before: Shape, after: Shape) -> Place:
    return transposed(place_in(after), inverse(perm_of(node, len(before))))


def _sliced(analysis: IndexAnalysis, node: Node, before: Shape, after: Shape) -> Place | None:
    """Return the index that a Slice reads along each axis, as formulas; None where a start may count from the end."""
    ranges: dict[int, tuple[Size, int]] = {}
    for axis, (start, _, step) in slice_bounds(analysis.shapes, node, before).items():
        least = None if start is None else lower_bound(start)
        if start is None or least is None or least < 0 or not isinstance(step, int) or step < 1:
            return None  # the start may count from the end
        ranges[axis] = start, step
    return sliced(place_in(after), ranges)


def _cast(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Return the contents of a Cast's output; None where they are not known.

    They are known for integers cast to integers, and for booleans cast to booleans or integers.  For casts of other
    tensors to booleans, they are known if all elements are equal, or if each is one of two numbers (see `two_numbers`).
    """
    to = analysis.shapes.dtype(node.outputs[0])
    if analysis.shapes.dtype(node.inputs[0]) not in ANALYZED_DTYPES:
        number = analysis.fill_value(node.inputs[0])
        if number is None and to == TensorProto.BOOL:
            return _nonzero(analysis, node.inputs[0])
        return None if number is None or to != TensorProto.BOOL else number != 0
    value = analysis.value(node.inputs[0])
    if to == TensorProto.BOOL:
        if value is None:
            return _nonzero(analysis, node.inputs[0])
        if isinstance(value, Index) and not value.terms and isinstance(value.constant, int):
            return value.constant != 0
        return value if isinstance(value, bool | AtMostZero) else None
    if isinstance(value, bool):
        return Index(int(value))
    return value if isinstance(value, Index) and to in (TensorProto.INT64, TensorProto.INT32) else None


def _nonzero(analysis: IndexAnalysis, tensor: Tensor) -> Value | None:
    numbers = two_numbers(analysis, tensor)
    return None if numbers is None else chosen(numbers.where, numbers.here != 0, numbers.elsewhere != 0)


def _trilu(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Return the contents of a Trilu of a boolean tensor whose elements are all equal."""
    value, found = analysis.value(node.inputs[0]), triangle(analysis, node)
    if value is False:
        return False
    if value is not True or found is None:
        return None
    where, keeps = found
    if isinstance(where, AtMostZero):
        return where if keeps else negated(where)
    return where is keeps if isinstance(where, bool) else None


def _constant_of_shape(analysis: IndexAnalysis, node: Node) -> Value | None:
    number = analysis.fill_value(node.outputs[0])
    if number is None:
        return None
    return number != 0 if analysis.shapes.dtype(node.outputs[0]) == TensorProto.BOOL else Index(int(number))


def _add_or_sub(analysis: IndexAnalysis, node: Node) -> Value | None:
    left, right = analysis.index(node), analysis.index(node, 1)
    if left is None or right is None:
        return None
    return left + right * (-1 if op_of(node) == "Sub" else 1)


def _mul(analysis: IndexAnalysis, node: Node) -> Value | None:
    for left, right in ((analysis.index(node), node.inputs[1]), (analysis.index(node, 1), node.inputs[0])):
        factor = analysis.shapes.exact_value(right)
        if left is not None and factor is not None and factor.size == 1:
            number: Size = factor.item()
            return left * number
    return None


def _divide(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Return the quotient or remainder of a nonnegative index by a size; None if it is not linear in the indices."""
    index, by = analysis.index(node), analysis.shapes.exact_value(node.inputs[1])
    least = None if index is None else bounds(index)[0]
    if index is None or by is None or by.size != 1 or least is None or least < 0:
        return None
    size: Size = by.item()
    if (lower_bound(size) or 0) < 0 or size == 0:
        return None
    found = divided(index, size)[op_of(node) == "Mod"]
    return found if all(atom.kind == "variable" for atom, _ in found.terms) else None


def _contents(value: Array) -> Value | None:
    """Return the contents of an array that is uniform or counts up along one axis; None for any other."""
    first = value.reshape(-1)[0].item()
    if np.all(value == first):
        return first if isinstance(first, bool) else Index(first)
    long_axes, steps = (
        [axis for axis, size in enumerate(value.shape) if size > 1],
        np.unique(np.diff(value.reshape(-1))),
    )
    if len(long_axes) > 1 or len(steps) > 1 or not 0 < steps[0] <= MAX_STEP:
        return None
    return axis_index(long_axes[0] - value.ndim, value.size) * int(steps[0]) + int(first)


def _cum_sum(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Return the contents of a CumSum of a tensor whose elements are all equal: they count up along its axis."""
    index, axis = analysis.index(node), analysis.shapes.exact_value(node.inputs[1])
    shape = analysis.shapes.shape(node.outputs[0])
    if index is None or index.terms or axis is None or not shape or int_attribute(node, "reverse", 0):
        return None
    place = normalize_axis(int(axis.item()), len(shape))
    counted = axis_index(place - len(shape), shape[place]) + (0 if int_attribute(node, "exclusive", 0) else 1)
    return counted * index.constant


def _concat(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Store the columns that a Concat joins, for a GatherND that reads them as indices; return None."""
    shapes = [analysis.shapes.shape(t) for t in node.inputs]
    axis = node.attrs["axis"]
    if all(shape is not None and shape[-1:] == (1,) and axis in (-1, len(shape) - 1) for shape in shapes):
        analysis.index_columns[node.outputs[0].name] = tuple(analysis.value(t) for t in node.inputs)
    return None


def _gather_nd(analysis: IndexAnalysis, node: Node) -> Value | None:
    columns, rank = analysis.index_columns.get(node.inputs[1].name, ()), analysis.shapes.rank(node.inputs[0])
    if int_attribute(node, "batch_dims", 0) or not columns or len(columns) != rank:
        return None
    # The columns have a last axis of size 1, which the result lacks, so axis -2 of a column is axis -1 of the result.
    indices = [shifted(column, 1) for column in columns if isinstance(column, Index)]
    return analysis.element(node.inputs[0], indices) if len(indices) == rank else None


def _gather(analysis: IndexAnalysis, node: Node) -> Value | None:
    shape, rank = analysis.shapes.shape(node.inputs[0]), analysis.shapes.rank(node.inputs[1])
    index = analysis.index(node, 1)
    if shape is None or rank is None or index is None or int_attribute(node, "axis", 0) != 0:
        return None
    return analysis.element(node.inputs[0], [shifted(index, 1 - len(shape)), *place_in(shape[1:])])


def _gather_elements(analysis: IndexAnalysis, node: Node) -> Value | None:
    """Return the contents of a GatherElements if all elements of its data are equal; otherwise None."""
    index = analysis.index(node)
    return index if index is not None and not index.terms else None


def _compare(analysis: IndexAnalysis, node: Node) -> Value | None:
    left, right = analysis.index(node), analysis.index(node, 1)
    if left is None or right is None:
        return compared(analysis, node)
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
    return None if value is None else negated(value)


UNMOVED = ("Expand", "Identity")
SOURCES: dict[str, Callable[[IndexAnalysis, Node, Shape, Shape], Place | None]] = {
    **dict.fromkeys(REGROUPING, _regrouped), "Transpose": _transposed, "Slice": _sliced,
}  # fmt: skip
RULES: dict[str, Rule] = {
    "Range": _range, **dict.fromkeys((*UNMOVED, *SOURCES), _move), "Cast": _cast, "ConstantOfShape": _constant_of_shape,
    "Add": _add_or_sub, "Sub": _add_or_sub, "Mul": _mul, "Div": _divide, "Mod": _divide, "CumSum": _cum_sum,
    "Concat": _concat, "GatherND": _gather_nd, "Gather": _gather, "GatherElements": _gather_elements, "And": _and_or,
    "Or": _and_or, "Not": _not, "Trilu": _trilu, **dict.fromkeys(COMPARISONS, _compare),
}  # fmt: skip
