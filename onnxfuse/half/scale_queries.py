"""Scale an operand of a product instead of its result, where only the latter is beyond half precision (Phi-2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx
import onnx.numpy_helper

from onnxfuse.half.operators import is_onnx, label
from onnxfuse.half.precision import Precision
from onnxfuse.half.ranges import Range
from onnxfuse.half.scope import Scope
from onnxfuse.ir.protos import copy_without

SCALINGS: Final = frozenset({"Mul", "Div"})


def scale_queries(
    model: onnx.ModelProto, types: Mapping[str, int], ranges: Mapping[str, Range], precision: Precision
) -> tuple[onnx.ModelProto, dict[str, int], dict[str, Range]]:
    """Return a model in which scores are in range, and the types and ranges of its tensors; the model may be the same.

    MatMul(q, k) * s becomes MatMul(q * s, k), which is what the bodies and kernels of fused attention compute.
    """
    graph = model.graph
    scope = Scope(graph, types, {t.name: t for t in graph.initializer})
    outputs = {value.name for value in graph.output}
    pairs = {
        i: readers[0]
        for i, node in enumerate(graph.node)
        if node.op_type == "MatMul" and is_onnx(node) and node.output[0] not in outputs
        and len(readers := scope.readers.get(node.output[0], [])) == 1
        and _is_worth_it(scope, ranges, precision, i, readers[0])
    }  # fmt: skip
    if not pairs:
        return model, dict(types), dict(ranges)
    result = copy_without(model, "graph")
    result.graph.CopyFrom(graph)
    new_types, new_ranges = dict(types), dict(ranges)
    for product, scaling in pairs.items():
        first, second = result.graph.node[product], result.graph.node[scaling]
        query, scores = first.input[0], first.output[0]
        names = label(first), label(second)
        scaled = onnx.NodeProto()
        scaled.CopyFrom(second)
        scaled.input[:] = [query if name == scores else name for name in second.input]
        scaled.output[:] = [scores]  # its name now stands for the scaled queries
        second.CopyFrom(first)
        second.input[0] = scores
        second.output[:] = [graph.node[scaling].output[0]]
        first.CopyFrom(scaled)
        first.name, second.name = names
        factor = ranges[graph.node[scaling].output[0]].magnitude / ranges[scores].magnitude
        seen = ranges[query]
        new_ranges[scores] = Range(seen.lowest * factor, seen.highest * factor, seen.smallest * factor)
        _forget_shape(result.graph, scores)
    return result, new_types, new_ranges


def _is_worth_it(scope: Scope, ranges: Mapping[str, Range], precision: Precision, product: int, scaling: int) -> bool:
    """Return whether only the unscaled product is out of range, and a scaled operand is in range."""
    node, scaler = scope.nodes[product], scope.nodes[scaling]
    if not is_onnx(scaler) or scaler.op_type not in SCALINGS:
        return False
    scores, scaled, query = node.output[0], scaler.output[0], node.input[0]
    by = [name for name in scaler.input if name != scores]
    if len(by) != 1 or scope.elements(by[0]) != 1 or (scaler.op_type == "Div" and scaler.input[0] != scores):
        return False
    if len(scope.constants[by[0]].dims) > 1 or any(name not in ranges for name in (scores, scaled, query)):
        return False
    factor = ranges[scaled].magnitude / ranges[scores].magnitude if ranges[scores].magnitude else 0.0
    small = ranges[query].magnitude * factor
    return ranges[scores].magnitude > precision.limit >= ranges[scaled].magnitude and small >= precision.smallest


def _forget_shape(graph: onnx.GraphProto, name: str) -> None:
    kept = [info for info in graph.value_info if info.name != name]
    del graph.value_info[:]
    graph.value_info.extend(kept)
