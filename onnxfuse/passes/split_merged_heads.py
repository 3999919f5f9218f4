"""Give batched matrix products of (batch * heads, rows, columns) an axis for each of batch and heads.

Many models compute attention with `torch.bmm`: queries, keys and values are reshaped to three axes, and what is added
to the scores, the scores or the result is reshaped back to four.  Where such a Reshape splits the first axis of a
product, or of what is computed from it element by element, the whole computation runs on four axes, and the Reshapes in
front of the products and behind them cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import numpy as np
from onnx import TensorProto

from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, op_of, producer
from onnxfuse.passes.attention_nodes import ELEMENTWISE, is_of_last_axis
from onnxfuse.passes.compose_views import (
    View,
    chain_to,
    farthest_view,
    layout_of,
    view_of,
    write_scalings,
    write_views,
    written_from,
)
from onnxfuse.passes.emit import emit
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.passes.graph_pass import graph_pass

RANK: Final = 3  # of what is split
ALLOWZERO_OPSET: Final = 14  # with targets in which 0 is a size; before, it is the size of the input along that axis
THROUGH: Final = ELEMENTWISE | {"MatMul", "Softmax"}
Writer: TypeAlias = Callable[[], Tensor]


@graph_pass(opset=7)  # with broadcasting from the last axis on
def split_merged_heads(graph: Graph, shapes: ShapeInfo) -> int:
    """Compute on four axes what is reshaped to four axes afterwards.  Returns the number of results."""
    return sum(_split_at(graph, shapes, node) for node in list(graph.nodes) if op_of(node) in REARRANGING)


def _split_at(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Split what a chain of views reads, if it splits the first axis of that in two; return whether it did."""
    chain = chain_to(last)
    source = chain[0].inputs[0] if chain else None
    node = None if source is None else producer(source)
    if source is None or node is None or op_of(node) not in THROUGH:
        return False
    shape, views = shapes.shape(source), [view_of(shapes, each) for each in chain]
    known = [view for view in views if view is not None]
    if shape is None or len(shape) != RANK or len(known) < len(views):
        return False
    parts = _parts_of_first_axis(shape, known)
    if parts is None or _parts_of_first_axis(shape, known[:-1]) is not None:
        return False
    after = written_from((*parts, *shape[1:]), (View(None, shape), *known))
    heads = SplitHeads(graph, shapes, parts)
    write = None if after is None else heads.writer(source)
    if after is None or write is None or not heads.products or not heads.are_read_inside(chain):
        return False
    result = write_views(graph, shapes, write(), after, f"{last.outputs[0].name}_heads")
    return result is not None and graph.replace(last.outputs[0], result)


def _parts_of_first_axis(shape: Sequence[Size], views: Sequence[View]) -> tuple[Size, Size] | None:
    """Return the two sizes that views split the first axis into; None where they do not."""
    layout = layout_of(shape, views)
    found = [sub_axis for axis in layout or () for sub_axis in axis if sub_axis.axis == 0]
    if len(found) != 2:
        return None
    outer, inner = sorted(found, key=lambda sub_axis: sub_axis.stride == 1)
    return (outer.size, inner.size) if (outer.stride, inner.stride) == (inner.size, 1) else None


def _is_of_last_axis(graph: Graph, node: Node) -> bool:
    return op_of(node) != "Softmax" or is_of_last_axis(graph, node, RANK)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass
class SplitHeads:
    """The nodes of (batch * heads, rows, columns) that are written anew with four axes."""

    graph: Graph
    shapes: ShapeInfo
    parts: tuple[Size, Size]
    nodes: dict[int, Node] = field(default_factory=dict)  # by id: those that are written anew
    products: int = 0  # of them
    _writers: dict[int, Writer | None] = field(default_factory=dict)
    _written: dict[int, Tensor] = field(default_factory=dict)

    def are_read_inside(self, chain: Sequence[Node]) -> bool:
        """Return whether only these nodes, the chain of views, and Shapes read what is written anew."""
        inside = {*self.nodes, *map(id, chain)}
        made = [t for node in (*self.nodes.values(), *chain[:-1]) for t in node.outputs]
        readers = [reader for tensor in made for reader in consumers(tensor)]
        return not any(map(self.graph.is_kept, made)) and all(
            id(reader) in inside or op_of(reader) == "Shape" for reader in readers
        )

    def writer(self, tensor: Tensor, *, exact: bool = False) -> Writer | None:
        """Return what writes a tensor with its first axis split; None where that is not possible.

        `exact` asks for a tensor that needs no Reshape with a computed target.
        """
        if id(tensor) not in self._writers:
            self._writers[id(tensor)] = self._find_writer(tensor)
        found = self._writers[id(tensor)]
        if found is None and not exact and self._has_first_axis(tensor) and isinstance(self.parts[1], int):
            return partial(self._once, tensor, partial(self._reshaped, tensor))
        return found

    def _once(self, tensor: Tensor, write: Writer) -> Tensor:
        if id(tensor) not in self._written:
            self._written[id(tensor)] = write()
        return self._written[id(tensor)]

    def _has_first_axis(self, tensor: Tensor) -> bool:
        shape = self.shapes.shape(tensor)
        return shape is not None and len(shape) == RANK and shape[0] == self.parts[0] * self.parts[1]

    def _find_writer(self, tensor: Tensor) -> Writer | None:
        shape, node = self.shapes.shape(tensor), producer(tensor)
        if shape is not None and (len(shape) < RANK or (len(shape) == RANK and shape[0] == 1)):
            return partial(_unchanged, tensor)  # it broadcasts over heads as it is
        if shape is None or not self._has_first_axis(tensor):
            return None
        if node is not None and op_of(node) in REARRANGING:
            return self._view_writer(tensor, shape)
        if node is None or op_of(node) not in THROUGH or not _is_of_last_axis(self.graph, node):
            return None
        product = op_of(node) == "MatMul"
        if product and not all(map(self._has_first_axis, node.inputs)):
            return None  # of a weight: rows need no axis for heads
        operands = [
            self.writer(each, exact=product) if each.name else partial(_unchanged, each) for each in node.inputs
        ]
        if None in operands:
            return None
        self.nodes[id(node)] = node
        self.products += product
        writers = [each for each in operands if each is not None]
        return partial(self._once, tensor, partial(self._rewritten, node, writers))

    def _view_writer(self, tensor: Tensor, shape: tuple[Size, ...]) -> Writer | None:
        """Return what writes a view with one more axis, of the farthest source from which constants suffice."""
        found = farthest_view(self.graph, self.shapes, tensor, View(None, (*self.parts, *shape[1:])))
        return None if found is None else partial(self._once, tensor, partial(self._viewed, *found))

    def _viewed(self, source: Tensor, views: tuple[View, ...], scalings: list[Node]) -> Tensor:
        made = write_views(self.graph, self.shapes, source, views, f"{source.name}_heads")
        assert made is not None  # the views were chosen so that constants suffice
        return write_scalings(self.graph, self.shapes, made, scalings)

    def _rewritten(self, node: Node, operands: Sequence[Writer]) -> Tensor:
        """Write a node with four axes."""
        end = node.outputs[0]
        shape = self.shapes.shape(end)
        assert shape is not None
        attributes = {**node.attrs, "axis": RANK} if op_of(node) == "Softmax" else node.attrs
        inputs = [write() for write in operands]
        split, dtype = (*self.parts, *shape[1:]), self.shapes.dtype(end)
        made = emit(self.graph, self.shapes, op_of(node), inputs, f"{end.name}_heads", split, dtype, attributes)
        if op_of(node) == "Softmax":
            self.graph.scores.begun[made.name] = self.graph.scores.name(node)
        return made

    def _reshaped(self, tensor: Tensor) -> Tensor:
        """Write a Reshape of a tensor whose target may be computed."""
        shape = self.shapes.shape(tensor)
        assert shape is not None
        split, stem = (*self.parts, *shape[1:]), f"{tensor.name}_heads"
        constant = reshape_target(shape, split)
        if constant is None:
            target = self._computed_target(tensor, stem)
        else:
            target = self.graph.constant(f"{stem}_shape", np.array(constant, np.int64))
        # A size of 0 in a computed target is that size, and not the input's size along the same axis.
        attributes = {"allowzero": 1} if constant is None and self.graph.opset >= ALLOWZERO_OPSET else {}
        dtype = self.shapes.dtype(tensor)
        return emit(self.graph, self.shapes, "Reshape", [tensor, target], stem, split, dtype, attributes)

    def _computed_target(self, tensor: Tensor, stem: str) -> Tensor:
        """Write (merged / heads, heads, rows, columns); a -1 would have no meaning beside an empty axis."""
        write = (self.graph, self.shapes)
        heads = self.graph.constant(f"{stem}_count", np.array([self.parts[1]], np.int64))
        first = self.graph.constant(f"{stem}_first", np.array([0], np.int64))
        last = self.graph.constant(f"{stem}_axes", np.array([1, 2], np.int64))
        sizes = emit(*write, "Shape", [tensor], f"{stem}_sizes", (RANK,), TensorProto.INT64)
        merged = emit(*write, "Gather", [sizes, first], f"{stem}_merged", (1,), TensorProto.INT64, {"axis": 0})
        rest = emit(*write, "Gather", [sizes, last], f"{stem}_rest", (2,), TensorProto.INT64, {"axis": 0})
        batch = emit(*write, "Div", [merged, heads], f"{stem}_batch", (1,), TensorProto.INT64)
        parts = [batch, heads, rest]
        return emit(*write, "Concat", parts, f"{stem}_target", (4,), TensorProto.INT64, {"axis": 0})
