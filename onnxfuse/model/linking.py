"""A model becomes a linked graph, and a graph a model again.

graphsurgeon's exporter drops what it does not know (metadata, doc strings, some attribute types).  So a node that
nobody touched is written back as the NodeProto it was read from, and everything outside the node list is copied from
the model as read.
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.numpy_helper
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from onnxfuse.model.graph import DOMAIN, VERSION, Graph, LinkedNode, Node, check_version, subgraph_names
from onnxfuse.model.protos import graphs, overridable, without


def read_graph(model: onnx.ModelProto, folder: Path | None = None) -> Graph:
    """Link a model's main graph.  `folder` is where its external data lies; initializers stay unread until needed.

    Raises ModelError for a model whose fused nodes are newer than this version of onnxfuse.
    """
    check_version(model)
    graph = model.graph
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    imported = gs.import_onnx(model)
    defaults = overridable(model)
    pinned = defaults | {name for n in graph.node for name in subgraph_names(n)}
    names = {n.name for n in graph.node} | pinned | {t.name for t in (*graph.input, *graph.initializer)}
    for part in graphs(graph):  # names in subgraphs too: none may stand for two values
        names |= {t.name for t in (*part.input, *part.initializer)}
        names |= {name for n in part.node for name in (*n.input, *n.output)}
    result = Graph(
        imported, model, folder, opset, frozenset(pinned), frozenset(o.name for o in graph.output),
        list(model.functions), names,
    )
    for tensor in imported.tensors().values():
        if tensor.name in defaults:
            tensor.to_variable(tensor.dtype, tensor.shape)
    for part in (imported, *imported.subgraphs(recursive=True)):
        for node in part.nodes:
            node.__class__ = LinkedNode
            if part is not imported:  # written as it was read, and what it reads is pinned: no reader to fuse with
                node.inputs.clear()
    for node, proto in zip(imported.nodes, graph.node, strict=True):
        result.protos[id(node)] = (node, proto)
    return result


def write_model(graph: Graph) -> onnx.ModelProto:
    """The graph as a model: what was not rewritten is the same as in the model that was read."""
    source = graph.model.graph
    model = without(graph.model, "graph", "functions")
    rewritten = "node", "initializer", "sparse_initializer", "value_info", "quantization_annotation"
    model.graph.CopyFrom(without(source, *rewritten))
    result = model.graph
    result.node.extend(node_proto(graph, node) for node in graph.nodes)
    model.functions.extend(graph.functions)
    alive = {name for node in graph.nodes for name in (*graph.reads(node), *(t.name for t in node.outputs))}
    alive |= {v.name for v in (*source.input, *source.output)}
    written = _write_initializers(graph, result)
    infos = {**{info.name: info for info in source.value_info}, **graph.notes}
    outer = written | {v.name for v in (*source.input, *source.output)}
    result.value_info.extend(info for name, info in infos.items() if name in alive and name not in outer)
    for note in source.quantization_annotation:
        if note.tensor_name in alive:
            result.quantization_annotation.append(note)
    _drop_constant_inputs(model, {t.name for t in source.initializer})
    _declare_functions(model)
    return model


def _write_initializers(graph: Graph, result: onnx.GraphProto) -> set[str]:
    """Write what is still read: untouched initializers as they were, new ones from their values."""
    source = graph.model.graph
    known = {t.name: t for t in source.initializer}
    known_sparse = {t.values.name: t for t in source.sparse_initializer}
    constants = {t.name: t for n in graph.nodes for t in n.inputs if isinstance(t, gs.Constant)}
    wanted = dict.fromkeys((*(t.name for t in source.initializer), *known_sparse, *constants))
    kept = graph.pinned | graph.outputs
    written = set()
    for name in wanted:
        if name not in constants and name not in kept:
            continue
        if name in known_sparse:
            result.sparse_initializer.append(known_sparse[name])
        elif name in known:
            result.initializer.append(known[name])
        elif name in constants:
            result.initializer.append(onnx.numpy_helper.from_array(constants[name].values, name))
        else:
            continue
        written.add(name)
    return written


def _declare_functions(model: onnx.ModelProto) -> None:
    """Import our domain where nodes use it; functions need IR version 8."""
    if not any(f.domain == DOMAIN for f in model.functions):
        return
    if not any(o.domain == DOMAIN for o in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, VERSION))
    model.ir_version = max(model.ir_version, 8)


def _drop_constant_inputs(model: onnx.ModelProto, constants: set[str]) -> None:
    """Before IR version 4 every initializer is an input too; from 4 on that would let callers override it.

    So a model that is rewritten keeps only its true inputs, and becomes version 4 at least.
    """
    if model.ir_version < 4:
        inputs = [i for i in model.graph.input if i.name not in constants]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = 4


def node_proto(graph: Graph, node: Node) -> onnx.NodeProto:
    """A node as it is written: as it was read, with its present inputs and outputs, or exported where it is new."""
    if id(node) not in graph.protos:
        exported: onnx.NodeProto = OnnxExporter.export_node(node)
        return exported
    proto = onnx.NodeProto()
    proto.CopyFrom(graph.protos[id(node)][1])
    proto.input[:] = [t.name for t in node.inputs]
    proto.output[:] = [t.name for t in node.outputs]
    return proto
