"""Tensors that hold one number where a condition is true and another elsewhere: triangles of ones, masks of -inf.

The condition is a formula over the tensor's indices.  Exporters write a causal mask as numbers: they make a triangle
with Trilu, or store one and slice it to the sequence's length; then they compare, cast or multiply it.  The condition
is followed through all of these operators.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol, TypeAlias

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.algebra.operators import VIEWS
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.index_formulas import (
    AtMostZero,
    Value,
    axis_index,
    less_or_equal,
    negated,
    triangular_mask_value,
)
from onnxfuse.analysis.rules import apply_rule
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import flag_attribute
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer

MAX_ELEMENTS: Final = 2**22  # larger constants are not read
MAX_STEPS: Final = 16  # maximum number of nodes that are followed back from a tensor, as from a mask to its Trilu


@dataclass(frozen=True)
class TwoNumbers:
    """A tensor that is `here` where the condition `where` is true, and `elsewhere` where it is false.

    If the condition is a bool, it applies to all elements.
    """

    where: bool | AtMostZero
    here: float
    elsewhere: float


class Formulas(Protocol):
    """The part of `IndexAnalysis` that this module uses: formulas for a graph's tensors."""

    graph: Graph
    shapes: ShapeInfo
    numbers: dict[str, TwoNumbers | None]  # cached results, by tensor name

    def note(self, step: str, error: Exception) -> None:
        """Record an error of a rule."""
        ...

    def value(self, tensor: Tensor) -> Value | None:
        """Return the contents of an integer or boolean tensor; None if they are not known."""
        ...

    def fill_value(self, tensor: Tensor) -> bool | int | float | None:
        """Return the number that all elements of a tensor equal; None if no such number is known."""
        ...

    def moved(self, node: Node, value: Value) -> Value | None:
        """Return the contents of a view or a Slice whose input has the contents `value`; None if they are not known."""
        ...


Rule: TypeAlias = Callable[[Formulas, Node, int], TwoNumbers | None]


def two_numbers(analysis: Formulas, tensor: Tensor, steps: int = MAX_STEPS) -> TwoNumbers | None:
    """Return the two numbers of a tensor and their condition; None if the tensor is not known to hold two numbers."""
    known = analysis.numbers
    if tensor.name not in known:
        known[tensor.name] = _constant(analysis, tensor) if is_constant(tensor) else _computed(analysis, tensor, steps)
    return known[tensor.name]


def _computed(analysis: Formulas, tensor: Tensor, steps: int) -> TwoNumbers | None:
    node = producer(tensor)
    rule = RULES.get(op_of(node)) if node is not None and steps and len(node.outputs) == 1 else None
    if node is None or rule is None:
        return None
    found = apply_rule(lambda known, each: rule(known, each, steps - 1), analysis, node)
    return None if found is None or math.isnan(found.here) or math.isnan(found.elsewhere) else _in_one_form(found)


def _in_one_form(numbers: TwoNumbers) -> TwoNumbers:
    """Return the same tensor, described by a condition whose formula gives the last axis no negative factor.

    If the last axis has a negative factor in the given condition, the condition is negated, if possible, and the two
    numbers are swapped.
    """
    if isinstance(numbers.where, bool):
        return numbers
    last = numbers.where.index.factor("-1")
    where = negated(numbers.where) if isinstance(last, int) and last < 0 else None
    return TwoNumbers(where, numbers.elsewhere, numbers.here) if isinstance(where, AtMostZero) else numbers


def _constant(analysis: Formulas, tensor: Constant) -> TwoNumbers | None:
    """Return the two numbers of a constant that holds one of them up to a diagonal, and the other above the diagonal.

    The diagonal lies in the last two axes.  Returns None for any other constant.
    """
    size = math.prod(tensor.shape)
    if len(tensor.shape) < 2 or size != math.prod(tensor.shape[-2:]) or not 1 < size <= MAX_ELEMENTS:
        return None
    try:
        values = constant_value(analysis.graph, tensor)
    except ModelError:  # the file with the constant's data cannot be read
        return None
    if values.dtype.kind not in "biuf":
        return None
    rows = values.reshape(values.shape[-2:])
    here, elsewhere = rows[-1, 0], rows[0, -1]
    if not np.all((rows == here) | (rows == elsewhere)):
        return None
    where = triangular_mask_value(values == here)  # a bool if all elements are equal
    return TwoNumbers(where, float(here), float(elsewhere)) if isinstance(where, bool | AtMostZero) else None


def compared(analysis: Formulas, node: Node) -> Value | None:
    """Return the formula of a comparison of a tensor of two numbers with one number; None for other comparisons."""
    compare = COMPARISONS[op_of(node)]
    for i in (0, 1):
        numbers, number = two_numbers(analysis, node.inputs[i]), analysis.fill_value(node.inputs[1 - i])
        if numbers is not None and number is not None:
            pair = [(each, number) if i == 0 else (number, each) for each in (numbers.here, numbers.elsewhere)]
            return chosen(numbers.where, *(bool(compare(*each)) for each in pair))
    return None


def chosen(where: bool | AtMostZero, here: bool, elsewhere: bool) -> Value | None:
    """Return the formula of a boolean that is `here` where the condition is true, and `elsewhere` where it is false."""
    if isinstance(where, bool):
        return here if where else elsewhere
    if here == elsewhere:
        return here
    return where if here else negated(where)


def triangle(analysis: Formulas, node: Node) -> tuple[Value, bool] | None:
    """Return a Trilu's condition, and whether it keeps its input where the condition is true (else it writes 0 there).

    None where the sizes or the diagonal are unknown.
    """
    shape = analysis.shapes.shape(node.outputs[0])
    diagonal: Size | None = 0
    if len(node.inputs) > 1 and node.inputs[1].name:
        value = analysis.shapes.exact_value(node.inputs[1])
        diagonal = None if value is None or value.size != 1 else value.item()
    if shape is None or diagonal is None:
        return None
    upper = flag_attribute(node, "upper", True)
    rows = axis_index(-2, shape[-2]) + (diagonal - 1 if upper else diagonal)
    return less_or_equal(axis_index(-1, shape[-1]), rows), not upper


# --- rules: each returns the two numbers of a node's output -----------------------------------------------------------


def _trilu(analysis: Formulas, node: Node, steps: int) -> TwoNumbers | None:
    number = analysis.fill_value(node.inputs[0])
    where, keeps = triangle(analysis, node) or (None, False)
    if number is None or not isinstance(where, bool | AtMostZero):
        return None
    here, elsewhere = (float(number), 0.0) if keeps else (0.0, float(number))
    return TwoNumbers(where, here, elsewhere)


def _where(analysis: Formulas, node: Node, steps: int) -> TwoNumbers | None:
    where = analysis.value(node.inputs[0])
    here, elsewhere = (analysis.fill_value(each) for each in node.inputs[1:])
    if not isinstance(where, bool | AtMostZero) or here is None or elsewhere is None:
        return None
    return TwoNumbers(where, float(here), float(elsewhere))


def _cast(analysis: Formulas, node: Node, steps: int) -> TwoNumbers | None:
    where = analysis.value(node.inputs[0])
    if isinstance(where, AtMostZero):
        return TwoNumbers(where, 1.0, 0.0)
    return _mapped(analysis, node, two_numbers(analysis, node.inputs[0], steps), lambda x: x)


def _viewed(analysis: Formulas, node: Node, steps: int) -> TwoNumbers | None:
    numbers = two_numbers(analysis, node.inputs[0], steps)
    where = None if numbers is None else analysis.moved(node, numbers.where)
    return replace(numbers, where=where) if numbers is not None and isinstance(where, bool | AtMostZero) else None


def _arithmetic(analysis: Formulas, node: Node, steps: int) -> TwoNumbers | None:
    """Return the two numbers after an arithmetic operation whose other operand is filled with one number."""
    if len(node.inputs) != 2:
        return None
    function = ARITHMETIC[op_of(node)]
    for i in (0, 1):
        number = analysis.fill_value(node.inputs[1 - i])
        numbers = None if number is None else two_numbers(analysis, node.inputs[i], steps)
        if (
            number is not None
            and numbers is not None
            and analysis.shapes.rank(node.inputs[i]) == analysis.shapes.rank(node.outputs[0])
        ):
            return _mapped(analysis, node, numbers, partial(_computed_with, function, number, i))
    return None


def _computed_with(function: Callable[..., float], number: float, place: int, x: float) -> float:
    return function(x, number) if place == 0 else function(number, x)


def _negative(analysis: Formulas, node: Node, steps: int) -> TwoNumbers | None:
    return _mapped(analysis, node, two_numbers(analysis, node.inputs[0], steps), operator.neg)


def _mapped(
    analysis: Formulas, node: Node, numbers: TwoNumbers | None, function: Callable[..., float]
) -> TwoNumbers | None:
    """Return the results of a function for both numbers, in the dtype of the node's output."""
    dtypes = [analysis.shapes.dtype(each) for each in (node.inputs[0], node.outputs[0])]
    if numbers is None or 0 in dtypes:
        return None
    before, after = map(tensor_dtype_to_np_dtype, dtypes)
    with np.errstate(all="ignore"):
        made = [np.asarray(function(before.type(x))) for x in (numbers.here, numbers.elsewhere)]
        if after.kind in "iu" and not all(np.iinfo(after).min <= float(x) <= np.iinfo(after).max for x in made):
            return None  # runtimes convert numbers out of range to different integers
        here, elsewhere = (float(x.astype(after)) for x in made)
    return TwoNumbers(numbers.where, here, elsewhere)


ARITHMETIC: Final[Mapping[str, Callable[..., float]]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Max": max, "Min": min,
}  # fmt: skip
COMPARISONS: Final[Mapping[str, Callable[..., bool]]] = {
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
}  # fmt: skip
RULES: Final[Mapping[str, Rule]] = {
    "Trilu": _trilu, "Where": _where, "Cast": _cast, "Neg": _negative,
    **dict.fromkeys((*VIEWS, "Slice"), _viewed),
    **dict.fromkeys(ARITHMETIC, _arithmetic),
}  # fmt: skip
