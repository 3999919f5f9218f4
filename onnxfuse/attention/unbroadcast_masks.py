"""Shrink masks: where a mask is constant along an axis, store it with size 1 there and let its consumers broadcast it.

If all elements of a padding mask are gathered in order, the result becomes a Reshape of the mask.  `And(x, range >= 0)`
becomes `x`; if `x` has fewer axes than the And, the consumers broadcast it.  A mask that is true everywhere is removed.
The embedding of token types that are all 0 becomes one row.  Operators that broadcast read the input of an Expand
instead of its result, for example where F.normalize of PyTorch divides by the norms of rows.

Where axes of size 1 are added to the result of an And or Or, they are added to its operands instead, so that each
operand is a mask of the shape that broadcasts to the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.algebra.operators import COMPARISONS, REGROUPING
from onnxfuse.analysis.index_formulas import GatheredElement, axis_index
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.compose_views import added_ones
from onnxfuse.passes.emit import integers, unsqueezed, write
from onnxfuse.passes.fold_constants import MAX_GROWTH_BYTES
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.passes.graph_pass import graph_pass

BROADCASTING = frozenset(
    ("Add", "And", "Cast", "Div", "Max", "Min", "Mod", "Mul", "Not", "Or", "Pow", "Sub", "Where", "Xor", *COMPARISONS)
)
# By operator: if all elements of one operand equal this value, the result is the other operand.
NEUTRAL_MASKS = {"And": True, "Or": False, "Add": 0, "Mul": 1}


@graph_pass()
def unbroadcast_masks(graph: Graph, shapes: ShapeInfo) -> int:
    """Make elementwise operators read smaller tensors that broadcast to the operands; return the number of changes."""
    substitution = _Substitution(graph, shapes)
    return sum(substitution.visit(node) for node in list(graph.nodes) if len(node.outputs) == 1)


class _Substitution:
    """Smaller tensors that broadcast to larger ones, and replace them as operands of operators that broadcast."""

    def __init__(self, graph: Graph, shapes: ShapeInfo) -> None:
        """Analyze the integer and boolean tensors of a sorted graph."""
        self.graph, self.shapes = graph, shapes
        self.indices = IndexAnalysis(graph, shapes)
        self.smaller: dict[str, Tensor] = {}  # name of a tensor -> the smaller tensor that can replace it

    def visit(self, node: Node) -> bool:
        """Find a substitute for the node's output; return whether all consumers read the substitute now."""
        output = node.outputs[0]
        value = self.indices.values.get(output.name)
        if isinstance(value, bool):
            return self._substitute(node, self.graph.constant("everywhere", np.array(value)))
        op = op_of(node)
        if op == "Expand":
            return self._substitute(node, node.inputs[0])
        if op == "ConstantOfShape" and self.shapes.dtype(output) in FUSIBLE_FLOATS:
            dtype = tensor_dtype_to_np_dtype(self.shapes.dtype(output))
            return self._substitute(node, self.graph.constant("everywhere", np.array(self._fill_value(output), dtype)))
        if isinstance(value, GatheredElement) and op.startswith("Gather"):
            return self._substitute(node, self._regrouped_source(output, value))
        if op == "Gather" and not int_attribute(node, "axis", 0) and is_constant(node.inputs[0]):
            return self._substitute(node, self._single_row(node))
        joined = producer(node.inputs[0]) if op in REGROUPING else None
        if joined is not None and op_of(joined) in ("And", "Or"):
            return self._move_axes_before(joined, node)
        if op in ("And", "Or") or (op in BROADCASTING and any(t.name in self.smaller for t in node.inputs)):
            return self._shrink(node, [self.smaller.get(t.name, t) for t in node.inputs])
        return False

    def _substitute(self, node: Node, tensor: Tensor | None) -> bool:
        """Replace the node's output by `tensor` if the shapes are equal; else store it as the output's smaller tensor.

        Returns whether the output was replaced.
        """
        output = node.outputs[0]
        if tensor is None:
            return False
        shape = self.shapes.shape(tensor)
        is_same = shape is not None and shape == self.shapes.shape(output)
        if not is_same or self.graph.is_kept(output) or not self.graph.replace(output, tensor):
            self.smaller[output.name] = tensor
            return False
        return True

    def _regrouped_source(self, output: Tensor, value: GatheredElement) -> Tensor | None:
        """Return the gathered tensor with axes of size 1 added; None if that does not broadcast to the output."""
        sizes, shape = self.shapes.shape(value.tensor), self.shapes.shape(output)
        if sizes is None or shape is None:
            return None
        # For each index, the (negative) axis of the output along which the index counts; 0 if the index is constant.
        axes = [int(index.terms[0][0].name) if index.terms else 0 for index in value.indices]
        triples = zip(value.indices, axes, sizes, strict=True)
        takes_all = all(index == axis_index(axis, size) for index, axis, size in triples)
        used = [axis for axis in axes if axis]
        if any(-axis > len(shape) or shape[axis] != size for axis, size in zip(axes, sizes, strict=True) if axis):
            return None  # the indices do not run over all elements of this axis exactly once
        new = [i for i in range(len(shape)) if i - len(shape) not in used]
        small_shape = [1 if i in new else size for i, size in enumerate(shape)]
        target = reshape_target(sizes, small_shape)
        if not takes_all or used != sorted(set(used)) or (target is None and 0 in axes):
            return None
        stem = f"{output.name}_thin"
        # Unsqueeze is preferred, because a Reshape might need a -1, which is ambiguous if another size is 0.  But only
        # a Reshape can move axes of size 1.
        if 0 not in axes:
            return unsqueezed(self.shapes, value.tensor, new, stem)
        inputs = [value.tensor, integers(self.graph, f"{stem}_shape", target or [])]
        return write(self.shapes, "Reshape", inputs, stem)

    def _single_row(self, node: Node) -> Tensor | None:
        """Return the one row that all indices of a Gather select from a small table, such as that of token types."""
        table, index = node.inputs[0], self.indices.index(node, 1)
        row, dtype = index.constant if index is not None and not index.terms else None, self.shapes.dtype(table)
        if not is_constant(table) or not table.shape or dtype not in FUSIBLE_FLOATS:
            return None
        if not isinstance(row, int) or not -table.shape[0] <= row < table.shape[0]:
            return None
        if math.prod(table.shape) * tensor_dtype_to_np_dtype(dtype).itemsize > MAX_GROWTH_BYTES:
            return None
        return self.graph.constant(f"{table.name}_row", constant_value(self.graph, table)[row])

    def _move_axes_before(self, joined: Node, view: Node) -> bool:
        """Where `view` adds axes of size 1 to the result of an And or Or, add them to the operands instead."""
        output = view.outputs[0]
        found = [self.shapes.shape(t) for t in (joined.outputs[0], output, *joined.inputs)]
        known = [shape for shape in found if shape is not None]
        if self.graph.sole_consumer(joined.outputs[0]) is None or len(known) < len(found):
            return False
        before, after, *operand_shapes = known
        new, operands = added_ones(before, after), []
        if not new:
            return False
        kept = [axis for axis in range(len(after)) if axis not in new]
        for operand, shape in zip(joined.inputs, operand_shapes, strict=True):
            first = kept[len(kept) - len(shape)] if shape else len(after)
            inner = [axis - first for axis in new if axis > first]  # broadcasting adds the outer axes
            stem = f"{output.name}_part"
            operands.append(unsqueezed(self.shapes, operand, inner, stem) if inner else operand)
        return self.graph.replace(output, write(self.shapes, joined.op, operands, f"{output.name}_joined"))

    def _shrink(self, node: Node, inputs: list[Tensor]) -> bool:
        """Make the node, or a copy with a smaller result, read the smaller inputs; return whether the graph changed."""
        if (result := self._result_among(op_of(node), inputs)) is not None:
            return self._substitute(node, result)
        known = [self.shapes.shape(t) for t in inputs]
        if None in known or inputs == list(node.inputs):
            return False
        try:
            shape = broadcast(self.shapes, *(each for each in known if each is not None))
        except CannotInfer:
            return False
        output = node.outputs[0]
        if shape == self.shapes.shape(output):
            for index, tensor in enumerate(inputs):
                node.inputs[index] = tensor
            return True
        self.smaller[output.name] = write(self.shapes, node.op, inputs, f"{output.name}_thin", node.attrs)
        return False

    def _result_among(self, op: str, inputs: Sequence[Tensor]) -> Tensor | None:
        """Return the input whose broadcast is the result, because the other inputs do not change it; else None.

        For example, And of a mask and a tensor that is true everywhere is the mask.
        """
        if op == "Where" and isinstance(condition := self._fill_value(inputs[0]), bool):
            return inputs[1 if condition else 2]
        if op not in NEUTRAL_MASKS:
            return None
        others = [t for t in inputs if self._fill_value(t) != NEUTRAL_MASKS[op]]
        return others[0] if len(others) == 1 else None

    def _fill_value(self, tensor: Tensor) -> bool | float | None:
        """Return the value that all elements of a tensor equal; None if no such value is known."""
        value = self.indices.value(tensor)
        return value if isinstance(value, bool) else self.indices.fill_value(tensor)
