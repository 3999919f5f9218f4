"""The view of a node that a spelling rule gets, and the type of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.spans import here
from onnxfuse.dsl.terms import Capture, Term, as_term
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.fold_constants import value_of_constant_node

T = TypeVar("T")


class NoSpelling(Exception):
    """Raised by a rule for an operator that has no spelling, with the reason."""


def stay_if(condition: object, reason: str) -> None:
    """Raise NoSpelling with the reason if the condition holds."""
    if condition:
        raise NoSpelling(reason)


def known(size: Size | None, reason: str) -> int:
    """Return a size that must be a number.  Raises NoSpelling with the reason where it is not one."""
    if not isinstance(size, int):
        raise NoSpelling(reason)
    return size


class Call:
    """A node to be spelled out, as a spelling rule sees it: the rule reads the node's inputs as terms.

    The rule stores the sizes and the scalars that its terms mention by name.

    dims        sizes by name
    values      scalars by name
    may_remain  operators of the spelling that need not be fused, besides `spell_out.MAY_REMAIN`
    of_regions  whether regions, not patterns, are to fuse the operators of the spelling
    """

    def __init__(self, graph: Graph, shapes: ShapeInfo, node: Node) -> None:
        self.graph, self.shapes, self.node = graph, shapes, node
        self.dims: dict[str, Size] = {}
        self.values: dict[str, object] = {}
        self.may_remain: set[str] = set()
        self.of_regions = False

    def has(self, index: int) -> bool:
        """Return whether the node has an input."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index].name)

    def input(self, index: int) -> Term:
        """Return the term of an input.  Raises NoSpelling where it is left out."""
        stay_if(not self.has(index), f"it has no input {index}")
        return Capture(kind="tensor", name=input_name(index), span=here())

    def scalar(self, name: str, value: float) -> Capture:
        """Return the term of a scalar with this value."""
        self.values[name] = value
        return Capture(kind="scalar", name=name, span=here())

    def epsilon(self, default: float) -> Term:
        """Return the term of the attribute `epsilon`."""
        return as_term(self.attribute("epsilon", default))

    def optional(self, index: int) -> Term:
        """Return the term of an input; if the node lacks it, a term that stands for an omitted input."""
        return self.input(index) if self.has(index) else as_term(None)

    def sum_of(self, *indices: int) -> Term:
        """Return the sum of inputs, without those that are left out.  Raises NoSpelling where all are."""
        first, *others = [self.input(index) for index in indices if self.has(index)] or [self.input(indices[0])]
        for other in others:
            first = first + other
        return first

    def tensor(self, index: int) -> Tensor:
        """Return the tensor of an input.  Raises NoSpelling where it is left out."""
        stay_if(not self.has(index), f"it has no input {index}")
        return self.node.inputs[index]

    def constant(self, index: int) -> Array | None:
        """Return the value of an input that is constant, or the output of a Constant; None where it is computed."""
        tensor, maker = self.tensor(index), producer(self.tensor(index))
        if maker is not None and op_of(maker) == "Constant" and id(maker) in self.graph.protos:
            return value_of_constant_node(self.graph, self.graph.protos[id(maker)][1])
        return constant_value(self.graph, tensor) if is_constant(tensor) else None

    def shape(self, index: int) -> tuple[Size, ...] | None:
        """Return the shape of an input; None where its rank is unknown or the input is left out."""
        return self.shapes.shape(self.node.inputs[index]) if self.has(index) else None

    def axes(self, index: int, reason: str, *ranks: int) -> tuple[Size, ...]:
        """Return the shape of an input.  Raises NoSpelling with the reason unless its rank is one of `ranks`."""
        shape = self.shape(index)
        if shape is None or len(shape) not in ranks:
            raise NoSpelling(reason)
        return shape

    def rank(self, index: int) -> int | None:
        """Return the number of axes of an input; None where it is unknown or the input is left out."""
        shape = self.shape(index)
        return None if shape is None else len(shape)

    def dtype(self, index: int) -> int:
        """Return the element type of an input, an onnx.TensorProto.DataType; 0 where it is unknown."""
        return self.shapes.dtype(self.node.inputs[index])

    def attribute(self, name: str, default: T) -> T:
        """Return an attribute; the default where it is absent or of another type."""
        value = self.node.attrs.get(name, default)
        return value if isinstance(value, type(default)) else default


def input_name(index: int) -> str:
    """Return the name by which terms refer to an input."""
    return f"input_{index}"


# A rule returns a term for each output index.  It returns None if patterns match the node itself, and raises NoSpelling
# if it cannot spell out the node.  If an output has no term, the node is spelled out only if nothing reads that output.
Rule: TypeAlias = Callable[[Call], "dict[int, Term] | None"]
