"""Capture loop-invariant values in the body of a Loop or Scan, instead of carrying them through the iterations.

PaddlePaddle's converter makes a Loop carry its weights.  Captured weights are constants in the body again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import onnx

from onnxfuse.control_flow.inputs import FIRST_SCAN_WITHOUT_BATCH, carried, leading_results
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, has_subgraph, op_of, producer
from onnxfuse.ir.protos import ONNX_DOMAINS, graphs, nodes
from onnxfuse.passes.folded import Folded, node_label

FIRST_LOOP_OF_NOTHING: Final = 11  # the first opset in which a Loop can have no carried values


def read_invariants_outside(graph: Graph) -> list[Folded]:
    """Remove unchanged carried values from Loops and Scans, and replace their results by the initial values.

    Returns the records of these changes.
    """
    folded: list[Folded] = []
    for node in [node for node in graph.nodes if op_of(node) in ("Loop", "Scan") and has_subgraph(node)]:
        if op_of(node) == "Scan" and graph.opset < FIRST_SCAN_WITHOUT_BATCH:
            continue
        index = next(i for i, a in enumerate(graph.protos[id(node)][1].attribute) if a.HasField("g"))
        invariants = _invariants(graph, node, graph.protos[id(node)][1].attribute[index].g)
        if invariants:
            folded += [Folded("carried", node_label(node), tensor.name) for tensor in invariants.values()]
            _remove(graph, node, index, invariants)
    if folded:
        graph.update_captured()
        graph.remove_dead()
        graph.sort()
    return folded


def _invariants(graph: Graph, node: Node, body: onnx.GraphProto) -> dict[int, Tensor]:
    """Return the initial values that a body passes on unchanged, by index among the carried values."""
    copies = {n.output[0]: n.input[0] for n in body.node if n.op_type == "Identity" and n.domain in ONNX_DOMAINS}
    names = [value.name for value in body.input]
    results = [value.name for value in body.output][leading_results(node) :]
    # onnxruntime 1.31 refuses a body in which a MatMul reads a DequantizeLinear whose weights and scales are captured.
    scales = {name for n in nodes(body) if n.op_type == "DequantizeLinear" for name in n.input[1:2]}
    found: dict[int, Tensor] = {}
    for place, ((name, tensor), result) in enumerate(zip(carried(node, names).items(), results, strict=False)):
        while result in copies:
            result = copies[result]
        output = node.outputs[place] if place < len(node.outputs) else None
        stays = output is not None and output.name and graph.is_kept(output)
        if result != name or not tensor.name or stays or _is_lost(tensor) or name in scales:
            continue
        if output is not None and graph.joins_quantizers(output, tensor):
            continue
        if not _is_defined(body, tensor.name, name):
            found[place] = tensor
    if op_of(node) == "Loop" and graph.opset < FIRST_LOOP_OF_NOTHING and len(found) == len(carried(node, names)):
        found.popitem()
    return found


def _is_lost(tensor: Tensor) -> bool:
    """Return whether a tensor is the result of the second of two Casts in a row.

    onnxruntime 1.31 removes the second Cast, even if a body captures its result.
    """
    node = producer(tensor)
    made = producer(node.inputs[0]) if node is not None and op_of(node) == "Cast" else None
    return made is not None and op_of(made) == "Cast"


def _is_defined(body: onnx.GraphProto, name: str, own: str) -> bool:
    """Return whether a body, or a graph in it, defines a tensor of this name other than as its input `own`."""
    inputs = [value.name for part in graphs(body) for value in part.input]
    if name == own:
        inputs.remove(own)
    stored = (t.name for part in graphs(body) for t in part.initializer)
    return name in {*inputs, *stored, *(output for node in nodes(body) for output in node.output)}


def _remove(graph: Graph, node: Node, index: int, invariants: Mapping[int, Tensor]) -> None:
    """Remove the carried values at these indices from a node; its body then captures the initial values."""
    message = onnx.NodeProto()
    message.CopyFrom(graph.protos[id(node)][1])
    body = message.attribute[index].g
    leading = 2 if op_of(node) == "Loop" else 0  # a Loop's inputs before the carried values: trip count and condition
    renamed = {body.input[leading + place].name: tensor.name for place, tensor in invariants.items()}
    for inner in nodes(body):
        inner.input[:] = [renamed.get(name, name) for name in inner.input]
    for place in sorted(invariants, reverse=True):
        if place < len(node.outputs):
            graph.replace(node.outputs[place], invariants[place])
            del node.outputs[place]
        del node.inputs[leading + place]
        del body.input[leading + place]
        del body.output[leading_results(node) + place]
    graph.protos[id(node)] = node, message
