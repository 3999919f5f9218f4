"""Name all results of recurrent layers: patterns find a layer by its first result, which a model can leave out."""

from __future__ import annotations

from onnxfuse.algebra.operators import RECURRENCES
from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, op_of
from onnxfuse.passes.graph_pass import graph_pass


@graph_pass()
def name_results(graph: Graph, shapes: ShapeInfo) -> int:
    """Name the results that the model leaves out, and return the number of changed nodes."""
    return sum(_name_results(shapes, node) for node in graph.nodes if op_of(node) in RECURRENCES)


def _name_results(shapes: ShapeInfo, node: Node) -> bool:
    graph = shapes.graph
    found = schema(op_of(node), graph.opset)
    count = len(found.outputs) if found else 0
    stem = next(tensor.name for tensor in node.outputs if tensor.name)
    missing = [i for i in range(count) if not any(tensor.name for tensor in node.outputs[i : i + 1])]
    for i in missing:
        tensor = graph.variable(f"{stem}_{i}")
        if i < len(node.outputs):
            node.outputs[i] = tensor
        else:
            node.outputs.append(tensor)
    if missing:
        infer_node(shapes, node)
    return bool(missing)
