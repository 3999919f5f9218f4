"""Convert a model to a linked graph, and a graph back to a model.

graphsurgeon's exporter drops the parts that it does not know: metadata, doc strings, and some types of attributes.  So
a node that no pass created is written from the NodeProto that it was read from.  Everything outside the list of nodes
is copied from the original model.
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
from onnxfuse.ir.protos import copy_without, drop_constant_inputs, graphs, opset_of, overridable_initializers

# In a graph, nodes of onnxfuse's domain that are not fused nodes have this domain; writing them restores DOMAIN.
FOREIGN = f"not {DOMAIN}"
MIN_SHARED_BYTES = 2**20  # bytes; the value of a constant at least this large is freed after it was written


def read_graph(model: onnx.ModelProto, folder: Path | None = None) -> Graph:
    """Return a model's main graph, with its nodes and tensors linked to each other.

    `folder` holds the model's external data.  The values of initializers are read when they are needed.

    Raises ModelError if the model's fused nodes are newer than this version of onnxfuse.
    """
    check_version(model)
    graph = model.graph
    defaults = overridable_initializers(model)
    linked = link(model, defaults)
    names = {n.name for n in graph.node} | defaults
    for part in graphs(graph):  # a new name must also differ from all names in subgraphs
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
    """Return the linked graph of a subgraph, given as a model whose last inputs are the outer tensors that it reads.

    `captured` holds the names of these inputs.  `constants` holds, by name, the inputs that are constant in the outer
    graphs.
    """
    linked = link(model, ())
    if not model.functions:
        model.functions.extend(outer.model.functions)  # only nodes are linked, so functions can be added now
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
    """Store each node's NodeProto in the graph.

    A node in onnxfuse's domain that is not a fused node gets the domain FOREIGN.
    """
    bodies = {function.name: function for function in graph.model.functions if function.domain == DOMAIN}
    for node, proto in zip(graph.linked.nodes, graph.model.graph.node, strict=True):
        graph.protos[id(node)] = (node, proto)
        if node.domain == DOMAIN and not is_whole(proto, bodies.get(proto.op_type)):
            node.domain = FOREIGN
    graph.update_captured()


def write_model(graph: Graph) -> onnx.ModelProto:
    """Return the graph as a model; everything that was not rewritten equals the original model."""
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
    drop_constant_inputs(model, {t.name for t in source.initializer})
    _declare_functions(model)
    return model


def _write_initializers(graph: Graph, result: onnx.GraphProto, alive: Collection[str]) -> set[str]:
    """Write the initializers that are still read: copy unchanged ones, and write new ones from their values.

    Afterwards, a large new constant refers to the bytes that were written, so that memory holds its value only once.
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
    """Return a constant as an initializer named `name`; external data stays in its file."""
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
    """Import onnxfuse's domain if the model has fused operators; raise the IR version to 8, which functions require."""
    if not any(f.domain == DOMAIN for f in model.functions):
        return
    imported = next((each for each in model.opset_import if each.domain == DOMAIN), None)
    if imported is None:
        imported = model.opset_import.add(domain=DOMAIN)
    imported.version = DOMAIN_VERSION
    model.ir_version = max(model.ir_version, 8)


def node_proto(graph: Graph, node: Node) -> onnx.NodeProto:
    """Return a node's NodeProto: the one that was read, with the node's present inputs and outputs, or a new one."""
    if id(node) not in graph.protos:
        return export_node(node)
    proto = onnx.NodeProto()
    proto.CopyFrom(graph.protos[id(node)][1])
    proto.input[:] = [t.name for t in node.inputs]
    proto.output[:] = [t.name for t in node.outputs]
    return proto
