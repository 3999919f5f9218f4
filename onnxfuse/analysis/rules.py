"""Inference rules: their types, and how they read the shapes, values and parameters of a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeAlias, TypeVar, cast

from onnxfuse.algebra.sizes import Dim, Shape, Size
from onnxfuse.analysis.shape_info import MAX_VALUE_ELEMENTS, CannotInfer, PartialShape, ShapeInfo
from onnxfuse.ir.attributes import AtRunTime, attribute_or_input
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.node import Node, op_of, producer

# A shape rule returns one shape for all outputs, or a list with one shape per output.  An unknown dimension or shape is
# None.
ShapeRule: TypeAlias = Callable[[ShapeInfo, Node], "tuple[Size | None, ...] | list[PartialShape | None]"]
# A value rule returns the output's value, or a list with one value per output: arrays of int, bool and Dim objects.
ValueRule: TypeAlias = Callable[[ShapeInfo, Node], "Array | list[Array]"]
# Rules of both kinds raise CannotInfer where the answer is unknown.  They do not guess: if an answer depends on the
# value of a symbol s, as `s == 1` does, it is unknown.


class _Known(Protocol):
    def note(self, step: str, error: Exception) -> None:
        """Record an error; see `ShapeInfo.note`."""


# By operator on 8-bit integers: the indices of the inputs that are tensors; other inputs are scales and zero points.
QUANTIZED_OPERANDS: Final[Mapping[str, Sequence[int]]] = {
    **dict.fromkeys(
        ("QLinearMatMul", "QLinearConv", "com.microsoft::QGemm", "com.microsoft::QLinearAdd",
         "com.microsoft::QLinearMul"), (0, 3),
    ),
    "com.microsoft::QLinearWhere": (0, 1, 4),
}  # fmt: skip

T = TypeVar("T")
Known = TypeVar("Known", bound=_Known)
Rule = TypeVar("Rule", bound=Callable[..., object])


class RuleTable(dict[str, Rule], Generic[Rule]):
    """Rules, by operator name as `op_of` returns it."""

    def rule(self, *ops: str) -> Callable[[Rule], Rule]:
        """Return a decorator that registers a function as the rule for these operators."""

        def enter(function: Rule) -> Rule:
            self.update(dict.fromkeys(ops, function))
            return function

        return enter


def apply_rule(rule: Callable[[Known, Node], T] | None, known: Known, node: Node) -> T | None:
    """Return a rule's answer; None if there is no rule, or the rule raises CannotInfer.

    Any other error of a rule is noted, and also gives None.
    """
    try:
        return rule(known, node) if rule else None
    except CannotInfer:
        return None
    except Exception as error:  # invalid models can raise any error; nodes with unknown facts are not fused
        known.note(f"inference of {op_of(node)}", error)
        return None


def has_input(node: Node, index: int) -> bool:
    """Return whether the node has this input; an optional input may be omitted."""
    return index < len(node.inputs) and bool(node.inputs[index].name)


def operands_of(node: Node) -> Sequence[int]:
    """Return the indices of a node's inputs, except those of scales and zero points of quantized tensors."""
    if op_of(node) == "com.microsoft::QLinearConcat":
        return range(2, len(node.inputs), 3)
    return QUANTIZED_OPERANDS.get(op_of(node)) or range(len(node.inputs))


def input_shape(shapes: ShapeInfo, node: Node, index: int = 0, *ranks: int) -> Shape:
    """Return the shape of an input.  Raises CannotInfer where its rank is not known, or not one of `ranks`."""
    found = shapes.shape(node.inputs[index]) if has_input(node, index) else None
    if found is None or (ranks and len(found) not in ranks):
        raise CannotInfer
    return found


def input_value(shapes: ShapeInfo, node: Node, index: int = 0) -> Array:
    """Return the value of an input.  Raises CannotInfer where it is not known."""
    found = shapes.exact_value(node.inputs[index]) if has_input(node, index) else None
    if found is None:
        raise CannotInfer
    return found


def input_vector(shapes: ShapeInfo, node: Node, index: int = 0) -> list[Size]:
    """Return the elements of an input.  Raises CannotInfer where they are not known, or it is not a vector."""
    value = input_value(shapes, node, index)
    if value.ndim != 1:
        raise CannotInfer
    return cast("list[Size]", value.tolist())


def integers(shapes: ShapeInfo, node: Node, name: str) -> list[Size] | None:
    """Return a parameter (an attribute or an input) as a list of integers and sizes; None where it is absent.

    Raises CannotInfer where it is an input whose value is not known.
    """
    found = attribute_or_input(shapes.graph, node, name)
    if found is None:
        return None
    if isinstance(found, AtRunTime):
        value = shapes.exact_value(found.tensor)
        if value is None:
            raise CannotInfer
        found = value.tolist()
    numbers = found if isinstance(found, list) else [found]
    if not all(isinstance(number, int | Dim) for number in numbers):  # the parameter is a matrix, or has fractions
        raise CannotInfer
    return cast("list[Size]", numbers)


def partial_integers(shapes: ShapeInfo, node: Node, index: int) -> list[Size | None]:
    """Return the elements of an input that is a vector of integers; None for each element that is not known.

    The elements of a Concat are collected from its operands.  Raises CannotInfer if even the length is unknown.
    """
    if not has_input(node, index):
        raise CannotInfer
    vector = node.inputs[index]
    maker = producer(vector)
    if shapes.exact_value(vector) is None and maker is not None and op_of(maker) == "Concat":
        parts = [partial_integers(shapes, maker, i) for i in range(len(maker.inputs))]
        return [size for part in parts for size in part]
    value = shapes.exact_value(vector)
    if value is not None and value.ndim == 1:
        return [size if isinstance(size, int | Dim) else None for size in value]
    return [None] * _vector_length(shapes, node, index)


def _vector_length(shapes: ShapeInfo, node: Node, index: int) -> int:
    """Return the length of an input vector.  Raises CannotInfer if it is unknown or too large, or the rank is not 1."""
    shape = input_shape(shapes, node, index)
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] > MAX_VALUE_ELEMENTS:
        raise CannotInfer
    return shape[0]


def required(value: T | None) -> T:
    """Return an attribute's value.  Raises CannotInfer where it is absent."""
    if value is None:
        raise CannotInfer
    return value


def axes_parameter(shapes: ShapeInfo, node: Node, rank: int) -> list[int] | None:
    """Return the parameter `axes` with nonnegative axes; None where it is absent."""
    found = integers(shapes, node, "axes")
    return None if found is None else [normalize_axis(axis, rank) for axis in found]


def normalize_axis(axis: Size, rank: int) -> int:
    """Return an axis as a nonnegative number.  Raises CannotInfer where a tensor of this rank has no such axis."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise CannotInfer
    return axis % rank


def shape_of_known_rank(shapes: ShapeInfo, node: Node, index: int) -> tuple[Size | None, ...]:
    """Return a shape of unknown dimensions; its rank is the length of the input that gives the shape.

    Raises CannotInfer where that length exceeds the rank limit: a malformed model can reshape to 10^9 axes.
    """
    rank = _vector_length(shapes, node, index)
    if op_of(node) == "Expand":
        rank = max(rank, len(input_shape(shapes, node)))
    return (None,) * rank
