"""Finds the elementwise operators that a recurrence takes in: those that compute what it slices, and those after it.

A node before the steps joins if nothing else reads its result, and if the result is larger than what the node reads.
Operators after the steps join as long as each is the only reader of the one before it, with the operators that compute
their other operands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.tensor_bytes import tensor_bytes
from onnxfuse.ir.node import Node, Tensor, consumers, has_subgraph, is_constant, op_of, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.recurrences.form import Recurrence
from onnxfuse.regions.normal_form import normal_form
from onnxfuse.regions.pointwise import POINTWISE

JOINING_VIEWS: Final = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Expand")
FREE: Final = (*JOINING_VIEWS, "Cast", "Identity")  # operators that stay with what reads them


@dataclass(frozen=True)
class Joined:
    """The nodes that join a recurrence, in execution order, and the tensor that they make of its only output."""

    before: Sequence[Node] = ()
    after: Sequence[Node] = ()
    output: Tensor | None = None


def joined(shapes: ShapeInfo, recurrence: Recurrence, keep: Set[str]) -> Joined:
    """Return the nodes that join a recurrence; `keep` holds the labels of nodes that must not."""
    found = _Joining(shapes, recurrence, keep)
    before = found.producers([each.tensor for each in recurrence.inputs], set(recurrence.replaced))
    found.drop_small(before)
    finals = [state.final for state in recurrence.states if state.final is not None]
    if finals or len(recurrence.outputs) != 1:  # what follows one output might be read by what follows another
        return Joined(found.in_order(before))
    after, output = found.readers(recurrence.outputs[0].tensor)
    others = [t for node in after for t in node.inputs if producer(t) not in after]
    return Joined(found.in_order(before), found.in_order(after | found.producers(others, after)), output)


@dataclass
class _Joining:
    shapes: ShapeInfo
    recurrence: Recurrence
    keep: Set[str]

    def __post_init__(self) -> None:
        """Find the tensors that the steps, or bodies of other nodes, read as a whole, or that states begin with."""
        graph, replaced = self.shapes.graph, set(self.recurrence.replaced)
        self.fixed = {*graph.outputs, *graph.fixed_names}
        self.fixed |= {t.name for node in self.recurrence.body for t in node.inputs}
        self.fixed |= {state.initial.name for state in self.recurrence.states}
        others = (node for node in graph.nodes if has_subgraph(node) and node not in replaced)
        self.fixed |= {name for node in others for name in graph.captured_by(node)}

    def in_order(self, nodes: Set[Node]) -> list[Node]:
        """Return nodes in execution order."""
        return sorted(nodes, key=self.shapes.graph.position.__getitem__)

    def _can_join(self, node: Node | None) -> bool:
        if node is None or len(node.outputs) != 1 or node_label(node) in self.keep or node.domain not in (None, ""):
            return False
        if op_of(node) not in JOINING_VIEWS and op_of(node) not in POINTWISE:
            return False
        form = normal_form(self.shapes, node)
        return not isinstance(form, str) and not any(step.measured or step.computed for step in form)

    def producers(self, tensors: Sequence[Tensor], readers: Set[Node]) -> set[Node]:
        """Return the elementwise nodes that compute tensors for `readers` alone, and what these nodes read."""
        found, work = set[Node](), list(tensors)
        while work:
            tensor = work.pop()
            node = producer(tensor)
            if node is None or node in found or not self._can_join(node) or tensor.name in self.fixed:
                continue
            if all(reader in readers or reader in found for reader in consumers(tensor)):
                found.add(node)
                work += [t for t in node.inputs if not is_constant(t)]
        return found

    def drop_small(self, nodes: set[Node]) -> None:
        """Discard nodes whose results are not larger than what they read: these can as well run before the scan."""
        for node in self.in_order(nodes):
            read = [t for t in node.inputs if not is_constant(t)]
            if op_of(node) in FREE or any(made not in (None, node) and made in nodes and op_of(made) not in FREE
                                          for made in map(producer, read)):  # fmt: skip
                continue
            if self._bytes(node.outputs[0]) <= max(map(self._bytes, read), default=0):
                nodes.discard(node)
        while stray := {node for node in nodes if any(not self._is_inside(reader, nodes) for reader in
                                                      consumers(node.outputs[0]))}:  # fmt: skip
            nodes -= stray

    def _is_inside(self, node: Node, nodes: Set[Node]) -> bool:
        return node in nodes or node in self.recurrence.replaced

    def _bytes(self, tensor: Tensor) -> int:
        return tensor_bytes(self.shapes, self.shapes.shape(tensor), self.shapes.dtype(tensor))

    def readers(self, tensor: Tensor) -> tuple[set[Node], Tensor]:
        """Return the elementwise nodes that follow an output one after another, and the last one's result."""
        found, size = set[Node](), self._elements(tensor)
        while len(readers := consumers(tensor)) == 1 and tensor.name not in self.fixed:
            (node,) = readers
            if not self._can_join(node) or self._elements(node.outputs[0]) != size:
                break
            found.add(node)
            tensor = node.outputs[0]
        return found, tensor

    def _elements(self, tensor: Tensor) -> object:
        shape = self.shapes.shape(tensor)
        return None if shape is None else math.prod(shape)
