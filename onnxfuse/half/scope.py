"""One graph of a model on its way to half precision: the main one, or the body of an If, Loop or Scan."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from onnxfuse.algebra.operators import GATHERS, MATRIX_PRODUCTS, MOVES
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.half.operators import ELEMENTWISE
from onnxfuse.half.precision import REAL
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.folded import node_label

LARGE_WEIGHT = 4096  # elements; a product with a constant of at least this size computes features, not indices


@dataclass(frozen=True)
class Scope:
    """A sorted graph, with the dtypes and other known facts of the tensors that its nodes read and write."""

    shapes: ShapeInfo

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self.shapes.graph

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that nodes read and write, by name."""
        return {t.name: t for node in self.graph.nodes for t in (*node.inputs, *node.outputs) if t.name}

    @cached_property
    def labeled(self) -> dict[str, list[Node]]:
        """The nodes, by the labels that reports use for them."""
        found: dict[str, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            found[node_label(node)].append(node)
        return found

    def is_real(self, tensor: Tensor) -> bool:
        """Return whether the conversion can change a tensor's dtype."""
        return bool(tensor.name) and self.shapes.dtype(tensor) in REAL

    def untyped(self, node: Node) -> str:
        """Return the name of a tensor of unknown dtype that a node reads or writes; "" if there is none."""
        tensors = (*node.inputs, *node.outputs)
        return next((each.name for each in tensors if each.name and not self.shapes.dtype(each)), "")

    def real_inputs(self, node: Node) -> list[Tensor]:
        """Return those inputs of a node whose dtype the conversion can change."""
        return list(filter(self.is_real, node.inputs))

    def real_outputs(self, node: Node) -> list[Tensor]:
        """Return those outputs of a node whose dtype the conversion can change."""
        return list(filter(self.is_real, node.outputs))

    def computes(self, node: Node) -> bool:
        """Return whether a node has an input or output whose dtype the conversion can change."""
        return any(map(self.is_real, (*node.inputs, *node.outputs)))

    def behind(self, tensors: Iterable[Tensor], through: Callable[[Node], bool]) -> Iterator[Node]:
        """Walk back from tensors: yield each producer for which `through` holds, and go on from its float inputs."""
        seen: set[Node] = set()
        work = list(tensors)
        while work:
            node = producer(work.pop())
            if node is not None and node not in seen and through(node):
                seen.add(node)
                yield node
                work += self.real_inputs(node)

    @cached_property
    def counted(self) -> frozenset[Node]:
        """The nodes that compute counts (positions, lengths, masks) by arithmetic, only from integers and constants."""
        found: set[Node] = set()
        for node in self.graph.nodes:
            op, reals = op_of(node), [each for each in self.real_inputs(node) if not is_constant(each)]
            if not self.real_outputs(node) or "::" in op:
                continue
            begins = not reals and op in ("Cast", "Range", "ConstantOfShape", "Where", "Expand", "EyeLike", "OneHot")
            goes_on = bool(reals) and all(producer(each) in found for each in reals)
            steps = is_arithmetic(node) or op.startswith(("Reduce", "Cos", "Sin", "CumSum"))
            if begins or (goes_on and (steps or is_index_product(node))):
                found.add(node)
        return frozenset(found)


def elements(tensor: Tensor) -> int:
    """Return the number of elements of a constant; 0 for other tensors."""
    return math.prod(tensor.shape) if is_constant(tensor) else 0


def is_arithmetic(node: Node) -> bool:
    """Return whether a node is elementwise or only moves values, and reads no row of a table of weights."""
    op = op_of(node)
    if op in GATHERS and elements(node.inputs[0]):
        return False  # the Gather reads rows of a weight table
    return op in ELEMENTWISE or op in MOVES


def is_index_product(node: Node) -> bool:
    """Return whether a node is the product of positions with frequencies, as in a table of rotary embedding."""
    is_product = op_of(node) in MATRIX_PRODUCTS | {"Einsum"}
    return is_product and all(elements(each) < LARGE_WEIGHT for each in node.inputs)
