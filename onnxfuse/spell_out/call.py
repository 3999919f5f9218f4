"""The view of a node that a spelling rule gets, and the type of rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.spans import here
from onnxfuse.dsl.terms import Capture, Term, as_term
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant


class Call:
    """A node to be spelled out: its inputs are terms, and a rule sets the values of other names in terms.

    dims        sizes by the names that terms use
    values      scalars by the names that terms use
    choices     the selected variant of each `choose` in the terms
    may_remain  operators of the spelling that need not be fused, besides `spell_out.MAY_REMAIN`
    """

    def __init__(self, graph: Graph, shapes: ShapeInfo, node: Node) -> None:
        self.graph, self.shapes, self.node = graph, shapes, node
        self.dims: dict[str, Size] = {}
        self.values: dict[str, object] = {}
        self.choices: dict[str, str] = {}
        self.may_remain: set[str] = set()
        self._inputs: dict[int, Capture] = {}

    def has(self, index: int) -> bool:
        """Return whether the node has an input."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index].name)

    def is_read(self, index: int) -> bool:
        """Return whether anything reads an output."""
        if index >= len(self.node.outputs) or not self.node.outputs[index].name:
            return False
        output = self.node.outputs[index]
        return bool(output.outputs) or self.graph.is_kept(output)

    def input(self, index: int) -> Term:
        """Return the term of an input; repeated calls return the same term."""
        if index not in self._inputs:
            self._inputs[index] = Capture(kind="tensor", name=input_name(index), span=here())
        return self._inputs[index]

    def scalar(self, name: str, value: float) -> Capture:
        """Return the term of a scalar with this value."""
        self.values[name] = value
        return Capture(kind="scalar", name=name, span=here())

    def optional(self, index: int) -> Term:
        """Return the term of an input that may be left out, as an operator's optional input."""
        return self.input(index) if self.has(index) else as_term(None)

    def sum_of(self, *indices: int) -> Term:
        """Return the sum of inputs, without those that are left out."""
        first, *others = (self.input(index) for index in indices if self.has(index))
        for other in others:
            first = first + other
        return first

    def tensor(self, index: int) -> Tensor:
        """Return the tensor of an input."""
        return self.node.inputs[index]

    def constant(self, index: int) -> Constant | None:
        """Return the tensor of an input if it is a constant."""
        if not self.has(index):
            return None
        tensor = self.node.inputs[index]
        return tensor if is_constant(tensor) else None

    def shape(self, index: int) -> tuple[Size, ...] | None:
        """Return the shape of an input; None where its rank is unknown or the input is left out."""
        return self.shapes.shape(self.node.inputs[index]) if self.has(index) else None

    def rank(self, index: int) -> int | None:
        """Return the number of axes of an input; None where it is unknown or the input is left out."""
        shape = self.shape(index)
        return None if shape is None else len(shape)

    def dtype(self, index: int) -> int:
        """Return the element type of an input, an onnx.TensorProto.DataType; 0 where it is unknown."""
        return self.shapes.dtype(self.node.inputs[index])

    def number(self, name: str, default: float) -> float:
        """Return an attribute that is a number."""
        value = self.node.attrs.get(name, default)
        return value if isinstance(value, int | float) else default

    def integer(self, name: str, default: int = 0) -> int:
        """Return an attribute that is an integer."""
        value = self.node.attrs.get(name, default)
        return value if isinstance(value, int) else default

    def numbers(self, name: str) -> list[float]:
        """Return an attribute that is a list of numbers; an empty list where it is absent."""
        value = self.node.attrs.get(name)
        return [each for each in value if isinstance(each, int | float)] if isinstance(value, list) else []

    def text(self, name: str, default: str = "") -> str:
        """Return an attribute that is a string."""
        value = self.node.attrs.get(name, default)
        return value if isinstance(value, str) else default


def input_name(index: int) -> str:
    """Return the name of an input in terms."""
    return f"input_{index}"


# A rule returns a term for each output index, or a sentence that says why the node stays, or None where patterns match
# the node as it is.  If an output has no term, the node is spelled out only if nothing reads that output.
Rule: TypeAlias = Callable[[Call], "dict[int, Term] | str | None"]
