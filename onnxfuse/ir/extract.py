"""Extracts the part of a model that computes given tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from onnxfuse.ir.execution_order import reads
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.protos import copy_without


def ancestors(nodes: Sequence[onnx.NodeProto], names: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that the tensors depend on, in their present order."""
    producers = {name: node for node in nodes for name in node.output if name}
    needed: set[int] = set()
    work = list(names)
    while work:
        node = producers.get(work.pop())
        if node is not None and id(node) not in needed:
            needed.add(id(node))
            work += reads(node)
    return [node for node in nodes if id(node) in needed]


def extract(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """Return the part of the model that computes the tensors `outputs`; these become its outputs, without dtypes."""
    result = copy_without(model, "graph")
    graph, source = result.graph, model.graph
    nodes = ancestors(source.node, outputs)
    read = {*outputs, *(name for node in nodes for name in reads(node))}
    graph.name = "part"
    graph.node.extend(nodes)
    graph.initializer.extend(t for t in source.initializer if t.name in read)
    graph.sparse_initializer.extend(t for t in source.sparse_initializer if t.values.name in read)
    graph.input.extend(value for value in source.input if value.name in read)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    return result


def without_unused_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its functions inlined, and without the nodes that no output depends on."""
    result = extract(inline_functions(model).model, [output.name for output in model.graph.output])
    del result.graph.output[:]
    result.graph.output.extend(model.graph.output)
    return result
