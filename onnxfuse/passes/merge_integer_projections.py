"""Merge the products of a quantized tensor that become heads of an attention: one product of all columns, and slices.

A GPU has one launch then, whose tiles fill it better than those of three.  Kernels of attention read the slices where
they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import sliced, write
from onnxfuse.passes.graph_pass import graph_pass


@dataclass(frozen=True)
class Projection:
    """A MatMulInteger by a constant, the Cast and the product with both scales after it, and the bias that is added."""

    product: Node
    cast: Node
    x_scale: Tensor
    w_scale: Array
    bias: Array | None
    result: Tensor

    @property
    def weight(self) -> Constant:
        """The integers by which x is multiplied."""
        weight = self.product.inputs[1]
        assert is_constant(weight)
        return weight

    @property
    def columns(self) -> int:
        """The size of the last axis of the result."""
        return self.weight.shape[1]


@graph_pass(opset=10)  # the first opset with MatMulInteger, and with Slices whose bounds are inputs
def merge_integer_projections(graph: Graph, shapes: ShapeInfo) -> int:
    """Merge MatMulIntegers of one tensor whose scaled sums are rearranged to heads.  Returns how many are merged.

    Their weights are constants of one dtype without zero points, and have one scale or one for each column.
    """
    same = defaultdict[tuple[object, ...], list[Projection]](list)
    for node in graph.nodes:
        if op_of(node) == "MatMulInteger" and (found := _projection(graph, shapes, node)) is not None:
            x, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
            key = (id(x), id(zero), id(found.x_scale), found.weight.dtype, found.w_scale.dtype)
            same[key].append(found)
    groups = [group for group in same.values() if len(group) > 1 and shapes.rank(group[0].result) is not None]
    for group in groups:
        _merge(graph, shapes, group)
    return sum(map(len, groups))


def _projection(graph: Graph, shapes: ShapeInfo, product: Node) -> Projection | None:
    x, weight, zero = product.inputs[0], product.inputs[1], _constant(graph, product, 3)
    if is_constant(x) or not is_constant(weight) or len(weight.shape) != 2:
        return None
    if len(product.inputs) > 3 and (zero is None or zero.any()):
        return None
    cast = graph.sole_consumer(product.outputs[0])
    scaled = graph.sole_consumer(cast.outputs[0]) if cast is not None and op_of(cast) == "Cast" else None
    if cast is None or scaled is None or op_of(scaled) != "Mul":
        return None
    scales = producer(_other(scaled, cast.outputs[0]))
    if scales is None or op_of(scales) != "Mul":
        return None
    own = next((index for index in (1, 0) if is_constant(scales.inputs[index])), None)
    w_scale = None if own is None else _constant(graph, scales, own)
    if own is None or w_scale is None or w_scale.size not in (1, weight.shape[1]) or w_scale.ndim > 1:
        return None
    x_scale = scales.inputs[1 - own]
    if shapes.shape(x_scale) not in ((), (1,)):  # it could have the columns of one product
        return None
    result, bias = scaled.outputs[0], None
    after = graph.sole_consumer(result)
    if after is not None and op_of(after) == "Add":
        added = _other(after, result)
        bias = constant_value(graph, added) if is_constant(added) else None
        if bias is None or bias.shape != (weight.shape[1],):
            return None
        result = after.outputs[0]
        after = graph.sole_consumer(result)
    if after is None or op_of(after) not in REARRANGING:
        return None
    return Projection(product, cast, x_scale, w_scale, bias, result)


def _other(node: Node, tensor: Tensor) -> Tensor:
    """Return the operand of a node of two operands that is not `tensor`."""
    return node.inputs[1] if node.inputs[0] is tensor else node.inputs[0]


def _constant(graph: Graph, node: Node, index: int) -> Array | None:
    """Return the value of an input; None if it is left out or computed."""
    found = node.inputs[index] if index < len(node.inputs) else None
    return constant_value(graph, found) if is_constant(found) else None


def _merge(graph: Graph, shapes: ShapeInfo, group: Sequence[Projection]) -> None:
    first, rank = group[0], shapes.rank(group[0].result)
    assert rank is not None
    stem = f"{first.result.name}_merged"

    def constant(kind: str, parts: Sequence[Array], axis: int = 0) -> Tensor:
        return graph.constant(f"{stem}_{kind}", np.concatenate(parts, axis=axis))

    weights = [constant_value(graph, each.weight) for each in group]
    scales = [np.broadcast_to(each.w_scale.reshape(-1), (each.columns,)) for each in group]
    operands = [first.product.inputs[0], constant("weights", weights, 1), *first.product.inputs[2:3]]
    made = write(shapes, "MatMulInteger", operands, f"{stem}_sums")
    made = write(shapes, "Cast", [made], f"{stem}_numbers", first.cast.attrs)
    both = write(shapes, "Mul", [first.x_scale, constant("scales", scales)], f"{stem}_scale")
    made = write(shapes, "Mul", [made, both], f"{stem}_scaled")
    if any(each.bias is not None for each in group):
        zeros = (np.zeros(each.columns, first.w_scale.dtype) for each in group)
        biases = [zero if each.bias is None else each.bias for each, zero in zip(group, zeros, strict=True)]
        made = write(shapes, "Add", [made, constant("biases", biases)], stem)
    bounds = pairwise((0, *accumulate(each.columns for each in group)))
    for each, (start, end) in zip(group, bounds, strict=True):
        graph.replace(each.result, sliced(shapes, made, rank - 1, start, end, 1, f"{each.result.name}_part"))
