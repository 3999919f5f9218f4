"""Write a bias of scores that is a slope per head times positions (ALiBi) as a Mul of slopes and positions.

Attention with linear biases (Press et al. 2022, arXiv:2108.12409) adds slope[head] * position to scores.  Models write
the product before Casts, Reshapes and Slices (Bloom), or store it as a table of all heads, which is cut to length
(MPT).  The bias becomes `Mul(slopes, positions)` right before the Add.  The slopes have the shape (heads, 1, 1), and
the positions are the same for all heads, so that attention reads only the slopes and one table of positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.rules import axes_parameter
from onnxfuse.analysis.scores import (
    HEADS_AXIS,
    MAX_STEPS,
    RANK,
    is_computed_from_product,
    is_product_of_slopes,
    rewritable_softmaxes,
)
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS, Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.compose_views import added_ones
from onnxfuse.passes.emit import unsqueezed, write
from onnxfuse.passes.graph_pass import graph_pass

MAX_TABLE_ELEMENTS: Final = 2**24  # maximum number of elements of a table of all heads; larger tables are left alone
EPSILON: Final = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Factored:
    """A tensor as the product of two factors: one slope per head, and positions that all heads share."""

    slopes: Array
    positions: Tensor


@graph_pass()
def extract_alibi(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite biases of scores with four axes as products.  Returns the number of rewritten biases."""
    count = 0
    for node in [node for node in graph.nodes if op_of(node) == "Add" and shapes.rank(node.outputs[0]) == RANK]:
        softmaxes = rewritable_softmaxes(graph, node)
        if softmaxes and any(_rewrite(graph, shapes, node, side) for side in (0, 1)):
            graph.scores.done |= softmaxes
            count += 1
    return count


def _rewrite(graph: Graph, shapes: ShapeInfo, node: Node, side: int) -> bool:
    """Write the bias that an Add reads as input `side` as a product; return whether the bias was rewritten."""
    bias, dtype = node.inputs[side], shapes.dtype(node.outputs[0])
    shape = shapes.shape(bias)
    if shape is None or len(shape) < -HEADS_AXIS or dtype not in FUSIBLE_FLOATS or is_product_of_slopes(shapes, bias):
        return False
    heads = shape[HEADS_AXIS]
    if not isinstance(heads, int) or heads == 1 or any(size != 1 for size in shape[: HEADS_AXIS - 1]):
        return False
    biases = _Biases(graph, shapes, dtype)
    found = biases.factored(bias, HEADS_AXIS) if is_computed_from_product(node.inputs[1 - side]) else None
    if found is None:
        return False
    rank = RANK if is_constant(found.positions) else -HEADS_AXIS  # constant positions get four axes, like masks
    positions = biases.with_axes(found.positions, [*range(rank - biases.rank(found.positions))])
    stem, own = f"{bias.name}_of_slopes", shapes.dtype(positions)
    values = found.slopes.reshape(heads, 1, 1).astype(tensor_dtype_to_np_dtype(own))
    slopes = graph.constant(f"{bias.name}_slopes", values)
    made = write(shapes, "Mul", [slopes, positions], stem)
    if own != dtype:
        made = write(shapes, "Cast", [made], f"{stem}_cast", {"to": dtype})
    node.inputs[side] = made
    return True


@dataclass(frozen=True)
class _Biases:
    """Splits biases of one dtype into slopes and positions, unless the model rounds them to a narrower dtype."""

    graph: Graph
    shapes: ShapeInfo
    dtype: int

    def rank(self, positions: Tensor) -> int:
        """Return the number of axes of `positions`; `factored` has checked that this number is known."""
        return self.shapes.rank(positions) or 0

    def factored(self, tensor: Tensor, axis: int, steps: int = MAX_STEPS) -> Factored | None:
        """Return the factors of a tensor whose heads are on `axis` (negative); None if it cannot be factored."""
        shape, node = self.shapes.shape(tensor), producer(tensor)
        if shape is None or not steps or self.shapes.dtype(tensor) not in (self.dtype, TensorProto.FLOAT):
            return None
        if is_constant(tensor):
            return self._table(tensor, axis)
        if node is None:
            return None
        match op_of(node):
            case "Cast":
                return self.factored(node.inputs[0], axis, steps - 1)
            case "Mul" | "Div":
                return self._product(node, axis, steps)
            case "Slice":
                return self._cut(node, shape, axis, steps)
            case "Reshape" | "Squeeze" | "Unsqueeze":
                return self._view(node, shape, axis, steps)
        return None

    def _product(self, node: Node, axis: int, steps: int) -> Factored | None:
        """Return the factors of a product with constant slopes, or of a factored tensor times a number."""
        for side in (0,) if op_of(node) == "Div" else (0, 1):
            tensor, other = node.inputs[side], node.inputs[1 - side]
            number = self.graph.number(other)
            if number:
                found = self.factored(tensor, axis, steps - 1)
                factor = 1 / number if op_of(node) == "Div" else number
                return None if found is None else replace(found, slopes=found.slopes * factor)
            slopes = self._of_heads(other, axis) if op_of(node) == "Mul" else None
            shape = self.shapes.shape(tensor)
            if slopes is not None and shape is not None and (len(shape) < -axis or shape[axis] == 1):
                return Factored(slopes, tensor)
        return None

    def _of_heads(self, tensor: Tensor, axis: int) -> Array | None:
        """Return the elements of a finite constant whose axes other than `axis` have size 1; None for other tensors."""
        if not is_constant(tensor) or len(tensor.shape) < -axis or tensor.shape[axis] != math.prod(tensor.shape):
            return None
        value = constant_value(self.graph, tensor).reshape(-1)
        return value.astype(np.float64) if np.all(np.isfinite(value)) else None

    def _table(self, table: Constant, axis: int) -> Factored | None:
        """Return the factors of a table in which each head's rows are a multiple of one head's; else None."""
        if len(table.shape) < -axis or table.shape[axis] == 1 or not 0 < math.prod(table.shape) <= MAX_TABLE_ELEMENTS:
            return None
        value = np.moveaxis(constant_value(self.graph, table), axis, 0)
        by_head = value.reshape(len(value), -1).astype(np.float64)
        if by_head.shape[1] < 2:
            return None
        largest = np.unravel_index(np.argmax(np.abs(by_head)), by_head.shape)
        if not np.isfinite(by_head[largest]) or not by_head[largest]:
            return None
        row, slopes = by_head[largest[0]], by_head[:, largest[1]] / by_head[largest]
        if not np.allclose(by_head, slopes[:, None] * row, rtol=2 * EPSILON[value.dtype.name], atol=0):
            return None
        positions = np.moveaxis(row.reshape(1, *value.shape[1:]), 0, axis).astype(value.dtype)
        return Factored(slopes, self.graph.constant(f"{table.name}_positions", positions))

    def _cut(self, node: Node, shape: Shape, axis: int, steps: int) -> Factored | None:
        """Return the factors of a Slice that does not cut the axis of heads."""
        try:
            axes = axes_parameter(self.shapes, node, len(shape))
        except CannotInfer:
            return None
        found = None if not axes or len(shape) + axis in axes else self.factored(node.inputs[0], axis, steps - 1)
        if found is None or self.rank(found.positions) < len(shape):
            return None
        inputs, stem = [found.positions, *node.inputs[1:]], f"{node.outputs[0].name}_positions"
        return replace(found, positions=write(self.shapes, "Slice", inputs, stem, node.attrs))

    def _view(self, node: Node, shape: Shape, axis: int, steps: int) -> Factored | None:
        """Return the factors of a view that adds axes of size 1."""
        source = self.shapes.shape(node.inputs[0])
        added = None if source is None else added_ones(source, shape)
        if source is None or added is None:
            return None
        kept = [place for place in range(len(shape)) if place not in added]
        found = self.factored(node.inputs[0], kept.index(len(shape) + axis) - len(kept), steps - 1)
        lacking = 0 if found is None else len(source) - self.rank(found.positions)  # broadcasting adds these axes
        if found is None or lacking < 0:
            return None
        axes = [place - lacking for place in added if place >= lacking]
        return replace(found, positions=self.with_axes(found.positions, axes))

    def with_axes(self, positions: Tensor, axes: list[int]) -> Tensor:
        """Return positions with axes of size 1 added."""
        stem = f"{positions.name}_positions"
        if is_constant(positions) and axes:
            return self.graph.constant(stem, np.expand_dims(constant_value(self.graph, positions), axes))
        return unsqueezed(self.shapes, positions, axes, stem) if axes else positions
