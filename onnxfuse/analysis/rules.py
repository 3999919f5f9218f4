"""What an inference rule is, and how it reads the shapes, values and parameters of its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar, cast

from onnxfuse.algebra.sizes import Dim, Shape, Size
from onnxfuse.analysis.shape_info import MAX_VALUE_ELEMENTS, CannotInfer, PartialShape, ShapeInfo
from onnxfuse.ir.attributes import AtRunTime, attribute_or_input
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.node import Node, op_of, producer

# A shape rule returns one shape, which then every output has, or a list with a shape for each output.  A dimension or a
# shape that it cannot tell is None.
ShapeRule: TypeAlias = Callable[[ShapeInfo, Node], "tuple[Size | None, ...] | list[PartialShape | None]"]
# A value rule returns the value of the output, or a list with one for each output: arrays of int, bool and Dim objects.
ValueRule: TypeAlias = Callable[[ShapeInfo, Node], "Array | list[Array]"]
# Both raise CannotInfer where they can tell nothing.  They do not guess: an answer that depends on a symbol (`s == 1`)
# cannot be inferred.


class _Known(Protocol):
    def note(self, step: str, error: Exception) -> None:
        """Take note of an error; see `ShapeInfo.note`."""


T = TypeVar("T")
Known = TypeVar("Known", bound=_Known)
Rule = TypeVar("Rule", bound=Callable[..., object])


class RuleTable(dict[str, Rule], Generic[Rule]):
    """Rules, by the operator that they are for as `op_of` names it."""

    def rule(self, *ops: str) -> Callable[[Rule], Rule]:
        """Enter the decorated function for these operators."""

        def enter(function: Rule) -> Rule:
            self.update(dict.fromkeys(ops, function))
            return function

        return enter


def apply_rule(rule: Callable[[Known, Node], T] | None, known: Known, node: Node) -> T | None:
    """Return a rule's answer; None where there is no rule, or it can tell nothing.

    An error of a rule is noted, and nothing is known of its node.
    """
    try:
        return rule(known, node) if rule else None
    except CannotInfer:
        return None
    except Exception as error:  # models may break the rules of ONNX in any way; nodes with unknown facts are not fused
        known.note(f"inference of {op_of(node)}", error)
        return None


def has_input(node: Node, index: int) -> bool:
    """Return whether the node has this input; an optional one may be left out."""
    return index < len(node.inputs) and bool(node.inputs[index].name)


def input_shape(shapes: ShapeInfo, node: Node, index: int = 0) -> Shape:
    """Return the shape of an input.  Raises CannotInfer where its rank is not known."""
    found = shapes.shape(node.inputs[index]) if has_input(node, index) else None
    if found is None:
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
    """Return a parameter, be it an attribute or an input, as a list of integers and sizes; None where it is absent.

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
    if not all(isinstance(number, int | Dim) for number in numbers):  # a target of several axes, or of fractions
        raise CannotInfer
    return cast("list[Size]", numbers)


def partial_integers(shapes: ShapeInfo, node: Node, index: int) -> list[Size | None]:
    """Return the elements of an input that is a vector of integers, with None for those that are not known.

    Those of a Concat are known from its operands.  Raises CannotInfer where not even their number is known.
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
    """Return how many elements an input has.  Raises CannotInfer where these are too many, or it is not a vector."""
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
    """Return the parameter `axes`, counted from the front; None where it is absent."""
    found = integers(shapes, node, "axes")
    return None if found is None else [normalize_axis(axis, rank) for axis in found]


def normalize_axis(axis: Size, rank: int) -> int:
    """Return an axis counted from the front.  Raises CannotInfer where a tensor of this rank has no such axis."""
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise CannotInfer
    return axis % rank


def shape_of_known_rank(shapes: ShapeInfo, node: Node, index: int) -> tuple[Size | None, ...]:
    """Return a shape of unknown dimensions, as many as the input that gives the shape has elements.

    Raises CannotInfer where these are more than a shape has: a model may reshape its target to 10^9 elements.
    """
    rank = _vector_length(shapes, node, index)
    if op_of(node) == "Expand":
        rank = max(rank, len(input_shape(shapes, node)))
    return (None,) * rank
