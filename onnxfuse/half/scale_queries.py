"""Scale an operand of a product instead of its result, if only the result exceeds half precision (Phi-2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.half.ranges import Range
from onnxfuse.half.weights import Weights
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, op_of
from onnxfuse.passes.scale_operand import scale_operand

SCALINGS: Final = frozenset({"Mul", "Div"})


def scale_queries(shapes: ShapeInfo, ranges: Mapping[str, Range], weights: Weights) -> dict[str, Range]:
    """Scale queries so that scores are in range; return the ranges of the scaled queries, if any, by name.

    MatMul(q, k) * s becomes MatMul(q * s, k), as the bodies and kernels of fused attention compute it.
    """
    graph, made = shapes.graph, dict[str, Range]()
    for product in [node for node in graph.nodes if op_of(node) == "MatMul"]:
        scores, queries = product.outputs[0], product.inputs[0]
        scaling = graph.sole_consumer(scores)
        if scaling is None or not _is_scaled(graph, scores, scaling):
            continue
        before, after, read = (ranges.get(each.name) for each in (scores, scaling.outputs[0], queries))
        if before is None or after is None or read is None or not before.magnitude:
            continue
        small, precision = read.scaled(after.magnitude / before.magnitude), weights.precision
        is_in_range = after.magnitude <= precision.limit and small.magnitude >= precision.smallest
        if before.magnitude > precision.limit and is_in_range:
            made[scale_operand(shapes, product, scaling).name] = small
    return made


def _is_scaled(graph: Graph, scores: Tensor, node: Node) -> bool:
    """Return whether a node multiplies scores by a number, or divides them by one."""
    if op_of(node) not in SCALINGS or (node.op == "Div" and node.inputs[0] is not scores):
        return False
    numbers = [each for each in node.inputs if graph.number(each) is not None]
    return len(numbers) == 1 and len(numbers[0].shape or ()) <= 1
