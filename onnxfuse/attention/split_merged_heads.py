"""Give batched matrix products of (batch * heads, rows, columns) an axis for each of batch and heads.

Many models compute attention with `torch.bmm`: queries, keys and values are reshaped to three axes, and the scores,
their addends or the result are reshaped back to four.  Where such a Reshape splits the first axis of a product, or of a
tensor that is computed from a product by elementwise operators, this pass rewrites the whole computation on four axes.
Then the Reshapes before and after the products cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.scores import is_of_last_axis
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.attention.new_axes import SCORES, NewAxes, are_read_by, nodes_from_product
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of, producer
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
from onnxfuse.passes.emit import ALLOWZERO_OPSET, integers, joined_sizes, sizes_along, write
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.sizes_of_operands import origin_of_size

RANK: Final = 3  # rank of the tensors whose first axis is split
THROUGH: Final = SCORES | {"MatMul"}


@graph_pass(opset=7)  # from this opset on, broadcasting aligns the last axes
def split_merged_heads(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite computations on three axes, whose results are reshaped to four, as computations on four axes.

    Returns the number of rewritten results.
    """
    return sum(_split_at(graph, shapes, node) for node in list(graph.nodes) if op_of(node) in REARRANGING)


def _split_at(graph: Graph, shapes: ShapeInfo, last: Node) -> bool:
    """Compute the source of views that end in `last` with four axes, if the views split its first axis in two.

    Returns whether the source was rewritten.
    """
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
    if after is None or not heads.is_inside(source) or not heads.are_read_by(chain):
        return False
    split = NewAxes(shapes, heads.nodes, heads).of(source)
    result = None if split is None else write_views(shapes, split, after, f"{last.outputs[0].name}_heads")
    return result is not None and graph.replace(last.outputs[0], result)


def _parts_of_first_axis(shape: Sequence[Size], views: Sequence[View]) -> tuple[Size, Size] | None:
    """Return the two sizes that views split the first axis into; None where they do not split it in two."""
    layout = layout_of(shape, views)
    found = [sub_axis for axis in layout or () for sub_axis in axis if sub_axis.axis == 0]
    if len(found) != 2:
        return None
    outer, inner = sorted(found, key=lambda sub_axis: sub_axis.stride == 1)
    return (outer.size, inner.size) if (outer.stride, inner.stride) == (inner.size, 1) else None


@dataclass
class SplitHeads:
    """Splits the first axis of (batch * heads, rows, columns), and collects the nodes that can have four axes."""

    graph: Graph
    shapes: ShapeInfo
    parts: tuple[Size, Size]
    _inside: dict[int, Node | None] = field(default_factory=dict)  # node by its output's id; None: cannot be rewritten

    @property
    def nodes(self) -> dict[int, Node]:
        """The nodes that are written with four axes, by the ids of their outputs."""
        return {key: node for key, node in self._inside.items() if node is not None}

    def are_read_by(self, chain: Sequence[Node]) -> bool:
        """Return whether a MatMul computes the source of `chain`, and no node outside reads a tensor between the two.

        Nodes in `nodes` and `chain`, and Shapes, are inside.  A bias or mask can have other readers, for example if all
        layers share the mask: it is then computed with three axes as well as with four.
        """
        source = chain[0].inputs[0]
        products = nodes_from_product(source, lambda tensor, _: id(tensor) in self.nodes)
        readers = {*self.nodes.values(), *chain}
        return bool(products) and are_read_by(
            self.graph, [*products.values(), *chain[:-1]], readers, besides=("Shape",)
        )

    def is_inside(self, tensor: Tensor) -> bool:
        """Return whether the producer of a tensor, and each operand of the producer, can be written with four axes."""
        if id(tensor) not in self._inside:
            node = producer(tensor)
            found = node is not None and op_of(node) in THROUGH and self._has_first_axis(tensor)
            if node is not None and found:
                is_product, is_softmax = op_of(node) == "MatMul", op_of(node) == "Softmax"
                found = not is_product or all(map(self._has_first_axis, node.inputs))  # a weight has no axis of heads
                operands = [self._can_write(each, is_product) for each in node.inputs if found and each.name]
                found &= all(operands) and (not is_softmax or is_of_last_axis(self.graph, node, RANK))
            self._inside[id(tensor)] = node if found else None
        return self._inside[id(tensor)] is not None

    def _can_write(self, tensor: Tensor, of_product: bool) -> bool:
        """Return whether an operand can be written with its first axis split.

        Views with constant targets can split it.  If the operand is not read by a product, it can also broadcast over
        heads, or get a Reshape whose target is computed at run time.
        """
        if self.is_inside(tensor) or self._farthest_view(tensor) is not None:
            return True
        can_reshape = isinstance(self.parts[1], int) and self._has_first_axis(tensor)
        if of_product:
            shape = self.shapes.shape(tensor)
            return can_reshape and shape is not None and reshape_target(shape, self.shape(shape)) is not None
        return can_reshape or self._broadcasts(tensor)

    def _has_first_axis(self, tensor: Tensor) -> bool:
        shape = self.shapes.shape(tensor)
        return shape is not None and len(shape) == RANK and shape[0] == self.parts[0] * self.parts[1]

    def _broadcasts(self, tensor: Tensor) -> bool:
        shape = self.shapes.shape(tensor)
        return shape is not None and (len(shape) < RANK or (len(shape) == RANK and shape[0] == 1))

    def _farthest_view(self, tensor: Tensor) -> tuple[Tensor, tuple[View, ...], list[Node]] | None:
        """Return the earliest tensor from which views alone compute `tensor` with its first axis split, and the views.

        Multiplications by a number can lie between the views.  They are returned, too; see `farthest_view`.
        """
        node, shape = producer(tensor), self.shapes.shape(tensor)
        if node is None or shape is None or op_of(node) not in REARRANGING or not self._has_first_axis(tensor):
            return None
        return farthest_view(self.shapes, tensor, View(None, self.shape(shape)))

    def shape(self, shape: Shape) -> Shape:
        """Return a shape with the first axis split."""
        return (*self.parts, *shape[1:])

    def operand(self, tensor: Tensor) -> Tensor:
        """Return an operand of the rewritten nodes with its first axis split; unchanged if it broadcasts over heads."""
        if self._broadcasts(tensor):
            return tensor
        if (found := self._farthest_view(tensor)) is None:
            return self._reshaped(tensor)
        source, views, scalings = found
        made = write_views(self.shapes, source, views, f"{source.name}_heads")
        assert made is not None  # the targets of these views are constants
        return write_scalings(self.shapes, made, scalings)

    def _reshaped(self, tensor: Tensor) -> Tensor:
        """Write a Reshape of a tensor; the target of the Reshape can be computed at run time."""
        shape = self.shapes.shape(tensor)
        assert shape is not None
        split, stem = self.shape(shape), f"{tensor.name}_heads"
        constant = reshape_target(shape, split)
        target = self._computed_target(tensor, stem) if constant is None else integers(self.graph, stem, constant)
        # With allowzero, a 0 in a computed target is a size of 0.  Without it, the 0 would copy the input's size.
        attributes = {"allowzero": 1} if constant is None and self.graph.opset >= ALLOWZERO_OPSET else {}
        return write(self.shapes, "Reshape", [tensor, target], stem, attributes)

    def _computed_target(self, tensor: Tensor, stem: str) -> Tensor:
        """Write the target (merged / heads, heads, rows, columns); a -1 would be ambiguous if an axis is empty."""
        assert isinstance(self.parts[1], int)  # checked by `_can_write`
        heads = integers(self.graph, f"{stem}_count", [self.parts[1]])
        # A tensor whose sizes are read cannot stay inside a fusion.
        origins = [origin_of_size(self.shapes, tensor, axis) for axis in range(RANK)]
        merged, *rest = (sizes_along(self.shapes, source, [axis], stem) for source, axis in origins)
        batch = write(self.shapes, "Div", [merged, heads], f"{stem}_batch")
        return joined_sizes(self.shapes, [batch, heads, *rest], f"{stem}_target")
