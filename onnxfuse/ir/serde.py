"""Turn a model into a linked graph, and a graph into a model again.

graphsurgeon's exporter drops what it does not know: metadata, doc strings, some types of attributes.  So a node that no
pass created is written as the NodeProto that it was read from, and everything outside the list of nodes is copied from
the model that was read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import onnx.numpy_helper

from onnxfuse.ir.domain import DOMAIN, DOMAIN_VERSION, check_version, is_whole
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.graphsurgeon import export_node, link, share_constant, share_value, stored_value
from onnxfuse.ir.node import Constant, Node, OuterVariable, is_constant
from onnxfuse.ir.protos import copy_without, graphs, opset_of, overridable_initializers

FOREIGN = f"not {DOMAIN}"  # the domain of such nodes in a graph; their messages keep theirs
MIN_SHARED_BYTES = 2**20  # of a constant whose value is freed after it was written


def read_graph(model: onnx.ModelProto, folder: Path | None = None) -> Graph:
    """Link a model's main graph.  `folder` is where its external data lies; initializers are read when they are needed.

    Raises ModelError if the model's fused nodes are newer than this version of onnxfuse.
    """
    check_version(model)
    graph = model.graph
    defaults = overridable_initializers(model)
    linked = link(model, defaults)
    names = {n.name for n in graph.node} | defaults
    for part in graphs(graph):  # a new name must not be one of a subgraph either
        names |= {t.name for t in (*part.input, *part.output, *part.initializer)}
        names |= {name for n in part.node for name in (n.name, *n.input, *n.output)}
    result = Graph(
        linked, model, folder, opset_of(model), frozenset(defaults), frozenset(o.name for o in graph.output),
        list(model.functions), names,
    )  # fmt: skip
    _remember_messages(result)
    return result


def read_subgraph(
    outer: Graph, model: onnx.ModelProto, captured: Collection[str], constants: Mapping[str, Constant]
) -> Graph:
    """Link a subgraph that was written as a model, whose further inputs are what it reads of the graphs around it.

    `captured` are the names of these inputs, and `constants` those of them whose values the graphs around it hold.
    """
    linked = link(model, ())
    if not model.functions:
        model.functions.extend(outer.model.functions)  # they need not be linked again
    for tensor in linked.inputs:
        if tensor.name in constants:
            share_constant(tensor, constants[tensor.name])
        elif tensor.name in captured:
            tensor.__class__ = OuterVariable
    outputs = frozenset(o.name for o in model.graph.output)
    result = Graph(
        linked, model, outer.folder, outer.opset, frozenset(), outputs, outer.functions, outer.names, outer.bodies,
        outer_constants=dict(constants), is_subgraph=True,
    )  # fmt: skip
    _remember_messages(result)
    return result


def _remember_messages(graph: Graph) -> None:
    """Record the message of each node in the graph.  A foreign node in our domain gets another domain here."""
    bodies = {function.name: function for function in graph.model.functions if function.domain == DOMAIN}
    for node, proto in zip(graph.linked.nodes, graph.model.graph.node, strict=True):
        graph.protos[id(node)] = (node, proto)
        if node.domain == DOMAIN and not is_whole(proto, bodies.get(proto.op_type)):
            node.domain = FOREIGN
    graph.update_captured()


def write_model(graph: Graph) -> onnx.ModelProto:
    """Return the graph as a model; all that was not rewritten is the same as in the model that was read."""
    source = graph.model.graph
    model = copy_without(graph.model, "graph", "functions")
    rewritten = "node", "initializer", "sparse_initializer", "value_info", "quantization_annotation"
    model.graph.CopyFrom(copy_without(source, *rewritten))
    result = model.graph
    result.node.extend(node_proto(graph, node) for node in graph.nodes)
    model.functions.extend(graph.functions)
    alive = {name for node in graph.nodes for name in (*graph.reads(node), *(t.name for t in node.outputs))}
    alive |= {v.name for v in (*source.input, *source.output)}
    written = _write_initializers(graph, result, alive)
    infos = {**{info.name: info for info in source.value_info}, **graph.recorded_types}
    for value in (*result.input, *result.output):
        if value.name in graph.misdeclared and value.name in infos:
            value.type.CopyFrom(infos[value.name].type)
    outer = written | {v.name for v in (*source.input, *source.output)}
    result.value_info.extend(info for name, info in infos.items() if name in alive and name not in outer)
    for note in source.quantization_annotation:
        if note.tensor_name in alive:
            result.quantization_annotation.append(note)
    _drop_constant_inputs(model, {t.name for t in source.initializer})
    _declare_functions(model)
    return model


def _write_initializers(graph: Graph, result: onnx.GraphProto, alive: Collection[str]) -> set[str]:
    """Write the initializers that are still read: unchanged ones as they were, new ones from their values.

    A large new constant then refers to the written bytes, so that memory does not hold its value twice.
    """
    source = graph.model.graph
    known = {t.name: t for t in source.initializer}
    known_sparse = {t.values.name: t for t in source.sparse_initializer}
    constants = {n: t for n, t in graph.folded_for_subgraphs.items() if n in graph.captured}
    constants |= {t.name: t for n in graph.nodes for t in n.inputs if is_constant(t)}
    wanted = dict.fromkeys((*(t.name for t in source.initializer), *known_sparse, *constants))
    kept = (graph.fixed_names | graph.captured).intersection(alive) | graph.outputs
    written = set()
    for name in wanted:
        if name in graph.outer_constants or (name not in constants and name not in kept):
            continue
        if name in known_sparse:
            result.sparse_initializer.append(known_sparse[name])
        elif name in known:
            result.initializer.append(known[name])
        elif name in constants:
            result.initializer.append(constant_proto(graph, constants[name], name))
            if len(result.initializer[-1].raw_data) >= MIN_SHARED_BYTES:
                share_value(constants[name], result.initializer[-1])
        else:
            continue
        written.add(name)
    return written


def constant_proto(graph: Graph, constant: Constant, name: str) -> onnx.TensorProto:
    """Return a constant as an initializer; data that lies in a file stays there."""
    stored = stored_value(constant)
    if not isinstance(stored, onnx.TensorProto):
        return onnx.numpy_helper.from_array(constant_value(graph, constant), name)
    if stored.name == name:
        return stored
    result = onnx.TensorProto()
    result.CopyFrom(stored)
    result.name = name
    return result


def _declare_functions(model: onnx.ModelProto) -> None:
    """Import the domain of the fused operators if the model has any; functions require IR version 8."""
    if not any(f.domain == DOMAIN for f in model.functions):
        return
    imported = next((each for each in model.opset_import if each.domain == DOMAIN), None)
    if imported is None:
        imported = model.opset_import.add(domain=DOMAIN)
    imported.version = DOMAIN_VERSION
    model.ir_version = max(model.ir_version, 8)


def _drop_constant_inputs(model: onnx.ModelProto, constants: set[str]) -> None:
    """Remove initializers from the graph inputs of a model before IR version 4, and raise it to version 4.

    Before version 4 every initializer is an input too; from 4 on that would let callers override it.
    """
    if model.ir_version < 4:
        inputs = [i for i in model.graph.input if i.name not in constants]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = 4


def node_proto(graph: Graph, node: Node) -> onnx.NodeProto:
    """Return a node as a message: the one it was read from with its present inputs and outputs, or a new one."""
    if id(node) not in graph.protos:
        return export_node(node)
    proto = onnx.NodeProto()
    proto.CopyFrom(graph.protos[id(node)][1])
    proto.input[:] = [t.name for t in node.inputs]
    proto.output[:] = [t.name for t in node.outputs]
    return proto
