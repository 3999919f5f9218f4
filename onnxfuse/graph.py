"""onnx-graphsurgeon seen through our eyes: a linked graph to rewrite, and the model around it kept word for word.

graphsurgeon gives linked nodes and tensors, but its exporter drops what it does not know (metadata, doc strings, some
attribute types).  So a node that nobody touched is written back as the NodeProto it was read from, and everything
outside the node list is copied from the model as read.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx.numpy_helper
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import external_data_helper
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.errors import ModelError
from onnxfuse.protos import graphs, subgraphs, without

Node: TypeAlias = Any  # gs.Node: graphsurgeon ships no types
Tensor: TypeAlias = Any  # gs.Variable | gs.Constant
Array: TypeAlias = NDArray[Any]

DOMAIN = "onnxfuse"
G_LOGGER.severity = G_LOGGER.ERROR


@dataclass
class Graph:
    """A model's main graph.  Nodes and tensors are graphsurgeon's; subgraphs stay inside their node's proto."""

    gs: Any
    model: onnx.ModelProto
    folder: Path | None
    opset: int
    pinned: frozenset[str]
    outputs: frozenset[str]
    functions: list[onnx.FunctionProto]
    names: set[str]
    protos: dict[int, tuple[Node, onnx.NodeProto]] = field(default_factory=dict)
    notes: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    place: dict[Node, int] = field(default_factory=dict)  # position in execution order, as of the last `sort`

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in execution order after `sort`."""
        return self.gs.nodes  # type: ignore[no-any-return]

    def is_kept(self, tensor: Tensor) -> bool:
        """Whether the tensor must exist under its name: it is a graph output, or a subgraph may read it."""
        return tensor.name in self.outputs or tensor.name in self.pinned

    def fresh(self, stem: str) -> str:
        """A name that no node or tensor has yet: `stem`, or `stem_2`, `stem_3` …"""
        name, count = stem, 1
        while name in self.names:
            count += 1
            name = f"{stem}_{count}"
        self.names.add(name)
        return name

    def constant(self, stem: str, value: Array) -> Tensor:
        """A new initializer."""
        return gs.Constant(self.fresh(stem), np.array(value, order="C", copy=None))

    def variable(self, stem: str, like: Tensor | None = None) -> Tensor:
        """A new computed tensor; with the dtype and shape that the model records for `like`, where given."""
        return gs.Variable(self.fresh(stem), *((like.dtype, like.shape) if like is not None else ()))

    def add(
        self, op: str, inputs: Iterable[Tensor], outputs: Iterable[Tensor], name: str = "", domain: str = "",
        **attributes: Any,
    ) -> Node:
        """Append a node; `sort` puts it into its place later."""
        node = _Node(op, name or self.fresh(op), attributes, list(inputs), list(outputs), domain or None)
        self.gs.nodes.append(node)
        return node

    def note(self, tensor: Tensor, dtype: int, shape: Iterable[object] | None) -> None:
        """Record a tensor's type for the written model, so that tools which do not know its node can go on."""
        if dtype:
            known = shape if shape is None else [d if isinstance(d, int) else _dim_param(str(d)) for d in shape]
            self.notes[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, dtype, known)

    def replace(self, old: Tensor, new: Tensor) -> bool:
        """Let every reader of `old` read `new`.

        Where `old` must keep its name, the node that computes `new` computes `old` instead.  False, and nothing
        changed, where both must keep their names or `new` is not computed by a node.
        """
        if self.is_kept(old):
            if self.is_kept(new) or not new.inputs:
                return False
            producer = new.inputs[0]
            old.inputs.clear()
            for reader in unique(new.outputs):
                _swap(reader.inputs, new, old)
            _swap(producer.outputs, new, old)
            return True
        for reader in unique(old.outputs):
            _swap(reader.inputs, old, new)
        return True

    def remove_dead(self) -> None:
        """Drop the nodes none of whose outputs is read or kept, until none is left."""
        dead: set[int] = set()
        work = list(self.nodes)
        while work:
            node = work.pop()
            if id(node) in dead or any(t.outputs or self.is_kept(t) for t in node.outputs):
                continue
            dead.add(id(node))
            work.extend(p for t in node.inputs for p in t.inputs)
            node.inputs.clear()
        if dead:
            for node in self.nodes:
                if id(node) in dead:
                    node.outputs.clear()
            self.gs.nodes = [n for n in self.nodes if id(n) not in dead]

    def reads(self, node: Node) -> set[str]:
        """Names of the tensors that a node reads, those that its subgraphs read included."""
        names = {t.name for t in node.inputs if t.name}
        if any(isinstance(value, gs.Graph) for value in node.attrs.values()):
            names |= set(_subgraph_names(self.protos[id(node)][1]))
        return names

    def sort(self) -> None:
        """Put the nodes in execution order (Kahn's algorithm), staying close to the present order."""
        nodes = self.nodes
        maker = {t.name: i for i, n in enumerate(nodes) for t in n.outputs if t.name}
        waits, users = [], [list[int]() for _ in nodes]
        for i, node in enumerate(nodes):
            needs = {maker[name] for name in self.reads(node) if name in maker}
            waits.append(len(needs))
            for j in needs:
                users[j].append(i)
        ready = [i for i, count in enumerate(waits) if count == 0]
        order: list[Node] = []
        while ready:
            i = heapq.heappop(ready)
            order.append(nodes[i])
            for j in users[i]:
                waits[j] -= 1
                if waits[j] == 0:
                    heapq.heappush(ready, j)
        if len(order) != len(nodes):
            stuck = next(n.name or n.op for i, n in enumerate(nodes) if waits[i])
            raise ModelError(f"the graph has a cycle through node '{stuck}'; ONNX graphs must be acyclic")
        self.gs.nodes = order
        self.place = {node: i for i, node in enumerate(order)}


def read_graph(model: onnx.ModelProto, folder: Path | None = None) -> Graph:
    """Link a model's main graph.  `folder` is where its external data lies; initializers stay unread until needed."""
    graph = model.graph
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    imported = gs.import_onnx(model)
    inputs = {i.name for i in graph.input}
    overridable = {t.name for t in graph.initializer if t.name in inputs} if model.ir_version >= 4 else set()
    pinned = overridable | {name for n in graph.node for name in _subgraph_names(n)}
    names = {n.name for n in graph.node} | pinned | inputs | {t.name for t in graph.initializer}
    for part in graphs(graph):  # names in subgraphs too: none may stand for two values
        names |= {t.name for t in (*part.input, *part.initializer)}
        names |= {name for n in part.node for name in (*n.input, *n.output)}
    result = Graph(
        imported, model, folder, opset, frozenset(pinned), frozenset(o.name for o in graph.output),
        list(model.functions), names,
    )
    for tensor in imported.tensors().values():
        if tensor.name in overridable:
            tensor.to_variable(tensor.dtype, tensor.shape)
    for part in (imported, *imported.subgraphs(recursive=True)):
        for node in part.nodes:
            node.__class__ = _Node
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
    result.node.extend(_node_proto(graph, node) for node in graph.nodes)
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
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
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


def _dim_param(text: str) -> str | None:
    return None if "?" in text else text  # "?" marks a dimension that is not known


def _node_proto(graph: Graph, node: Node) -> onnx.NodeProto:
    if id(node) not in graph.protos:
        exported: onnx.NodeProto = OnnxExporter.export_node(node)
        return exported
    proto = onnx.NodeProto()
    proto.CopyFrom(graph.protos[id(node)][1])
    proto.input[:] = [t.name for t in node.inputs]
    proto.output[:] = [t.name for t in node.outputs]
    return proto


class _Node(gs.Node):  # type: ignore[misc]
    """A node that equals itself only.

    graphsurgeon compares nodes by content, which its lists do on every removal: slow, and wrong among unnamed nodes.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _subgraph_names(node: onnx.NodeProto) -> Iterator[str]:
    """Every name that the subgraphs of a node mention: the outer tensors they read are among them."""
    for inner in subgraphs(node):
        yield from (o.name for o in inner.output)
        for child in inner.node:
            yield from child.input
            yield from _subgraph_names(child)


def _swap(tensors: Any, old: Tensor, new: Tensor) -> None:
    for i, tensor in enumerate(tensors):
        if tensor is old:
            tensors[i] = new


def unique(nodes: Iterable[Node]) -> list[Node]:
    """The nodes without repeats, in order."""
    return list(dict.fromkeys(nodes))


def is_constant(tensor: Tensor) -> bool:
    """Whether the tensor is an initializer whose value no caller can override."""
    return isinstance(tensor, gs.Constant)


def producer(tensor: Tensor) -> Node | None:
    """The node that computes the tensor; None for graph inputs and initializers."""
    return tensor.inputs[0] if tensor.inputs else None


def op_of(node: Node) -> str:
    """The operator's name: `Add` in the ONNX domain, `domain::Add` elsewhere."""
    domain, op = node.domain, node.op
    return f"{domain}::{op}" if domain and domain != "ai.onnx" else op


def constant_value(graph: Graph, tensor: Tensor) -> Array:
    """An initializer's value, read from its file only now where it is external; bfloat16 as ml_dtypes.bfloat16."""
    stored = tensor._values
    if isinstance(stored, np.ndarray):
        return stored
    proto = stored.tensor
    if isinstance(proto, onnx.SparseTensorProto):
        return np.asarray(stored.load())
    if external_data_helper.uses_external_data(proto):
        if graph.folder is None:
            raise ModelError(f"initializer '{tensor.name}' lies in an external file; give the model as a path")
        loaded = onnx.TensorProto()
        loaded.CopyFrom(proto)
        external_data_helper.load_external_data_for_tensor(loaded, str(graph.folder))
        proto = loaded
    return onnx.numpy_helper.to_array(proto)


@functools.cache
def schema(op: str, opset: int) -> onnx.defs.OpSchema | None:
    """The ONNX-domain operator's schema in an opset; None where the opset has no such operator."""
    try:
        return onnx.defs.get_schema(op, opset, "")
    except onnx.defs.SchemaError:
        return None


@functools.cache
def input_place(op: str, name: str, opset: int) -> int | None:
    """The position of an operator's input `name` in an opset; None where the opset knows no such input."""
    found = schema(op, opset)
    return next((i for i, formal in enumerate(found.inputs) if formal.name == name), None) if found else None


def attribute(graph: Graph, node: Node, name: str) -> Any:
    """An ONNX operator's parameter, be it an attribute or, in later opsets, an input.

    Returns the value, the schema's default where it is absent (None without one), or the Tensor where it is an input
    that is not constant.
    """
    if name in node.attrs:
        return node.attrs[name]
    place = input_place(op_of(node), name, graph.opset)
    if place is not None and place < len(node.inputs) and node.inputs[place].name:
        tensor = node.inputs[place]
        return constant_value(graph, tensor).tolist() if is_constant(tensor) else tensor
    return default(op_of(node), name, graph.opset)


@functools.cache
def default(op: str, name: str, opset: int) -> Any:
    """The default of an operator's attribute in an opset; None where it has none."""
    found = schema(op, opset)
    formal = found.attributes.get(name) if found else None
    if formal is None or not formal.default_value.name:
        return None
    value = onnx.helper.get_attribute_value(formal.default_value)
    return value.decode() if isinstance(value, bytes) else value
