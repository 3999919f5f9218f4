"""One graph of a model on its way to half precision: the main one, or the body of an If, Loop or Scan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx

from onnxfuse.algebra.operators import GATHERS, MATRIX_PRODUCTS, MOVES
from onnxfuse.half.operators import ELEMENTWISE, is_onnx
from onnxfuse.half.precision import REAL

LARGE_WEIGHT = 4096  # elements: a product with such a constant is one of features, not of indices


@dataclass(frozen=True)
class Scope:
    """The nodes of a graph, and what is known of the tensors that they read and write."""

    graph: onnx.GraphProto
    types: Mapping[str, int]  # the dtype of every tensor, as far as it is known
    constants: Mapping[str, onnx.TensorProto]  # of this graph and those around it

    @property
    def nodes(self) -> Sequence[onnx.NodeProto]:
        """The nodes, in execution order."""
        nodes: Sequence[onnx.NodeProto] = self.graph.node
        return nodes

    @cached_property
    def producers(self) -> dict[str, int]:
        """The position of the node that computes each tensor."""
        return {name: i for i, node in enumerate(self.nodes) for name in node.output if name}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """The positions of the nodes that read each tensor, those that only subgraphs read it in aside."""
        found: dict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.input):
                found[name].append(i)
        return found

    @cached_property
    def named(self) -> dict[str, list[int]]:
        """The positions of nodes by their names and by their outputs."""
        found: dict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.nodes):
            for name in {node.name, *node.output} - {""}:
                found[name].append(i)
        return found

    def is_real(self, name: str) -> bool:
        """Return whether a tensor's dtype may change."""
        return bool(name) and self.types.get(name, 0) in REAL

    def untyped(self, i: int) -> str:
        """Return a tensor that a node reads or writes whose dtype is not known; "" if there is none."""
        node = self.nodes[i]
        return next((name for name in (*node.input, *node.output) if name and not self.types.get(name)), "")

    def real_inputs(self, i: int) -> list[str]:
        """Return the tensors that a node reads whose dtype may change."""
        return [name for name in self.nodes[i].input if self.is_real(name)]

    def real_outputs(self, i: int) -> list[str]:
        """Return the tensors that a node writes whose dtype may change."""
        return [name for name in self.nodes[i].output if self.is_real(name)]

    def elements(self, name: str) -> int:
        """Return the number of elements of a constant; 0 for other tensors."""
        if name not in self.constants:
            return 0
        count = 1
        for size in self.constants[name].dims:
            count *= size
        return count

    def behind(
        self, names: Iterable[str], through: Callable[[int], bool], within: Collection[int] | None = None
    ) -> Iterator[int]:
        """Yield the nodes that compute tensors, and those that compute what these read, as long as `through` holds."""
        seen: set[int] = set()
        work = list(names)
        while work:
            i = self.producers.get(work.pop())
            if i is None or i in seen or (within is not None and i not in within) or not through(i):
                continue
            seen.add(i)
            yield i
            work += self.real_inputs(i)

    def is_arithmetic(self, i: int) -> bool:
        """Return whether a node is elementwise or moves values, so that it knows no features."""
        node = self.nodes[i]
        if not is_onnx(node):
            return False
        if node.op_type in GATHERS and self.elements(node.input[0]):
            return False  # rows of a table of weights
        return node.op_type in ELEMENTWISE or node.op_type in MOVES

    def is_index_product(self, i: int) -> bool:
        """Return whether a node is the product of positions with frequencies, as in a table of rotary embedding."""
        node = self.nodes[i]
        is_product = is_onnx(node) and node.op_type in MATRIX_PRODUCTS | {"Einsum"}
        return is_product and all(self.elements(name) < LARGE_WEIGHT for name in node.input)

    @cached_property
    def counted(self) -> frozenset[str]:
        """The tensors that are computed from integers and constants alone, by arithmetic: positions, lengths, masks."""
        found: set[str] = set()
        for i, node in enumerate(self.nodes):
            outputs = self.real_outputs(i)
            if not outputs or not is_onnx(node):
                continue
            reals = [name for name in self.real_inputs(i) if name not in self.constants]
            begins = not reals and (
                node.op_type in ("Cast", "Range", "ConstantOfShape", "Where", "Expand", "EyeLike", "OneHot")
            )
            goes_on = bool(reals) and all(name in found for name in reals)
            steps = self.is_arithmetic(i) or node.op_type.startswith(("Reduce", "Cos", "Sin", "CumSum"))
            if begins or (goes_on and (steps or self.is_index_product(i))):
                found.update(outputs)
        return frozenset(found)
