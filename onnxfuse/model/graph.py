"""onnx-graphsurgeon seen through our eyes: a linked graph to rewrite."""

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
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.errors import ModelError
from onnxfuse.model.protos import subgraphs

Node: TypeAlias = Any  # gs.Node: graphsurgeon ships no types
Tensor: TypeAlias = Any  # gs.Variable | gs.Constant
Array: TypeAlias = NDArray[Any]

DOMAIN, VERSION = "onnxfuse", 1  # of the operators that we write
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
        node = LinkedNode(op, name or self.fresh(op), attributes, list(inputs), list(outputs), domain or None)
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
        names = {t.name for t in node.inputs}
        names.discard("")
        if node.attrs and any(isinstance(value, gs.Graph) for value in node.attrs.values()):
            names |= set(subgraph_names(self.protos[id(node)][1]))
        return names

    def sort(self) -> None:
        """Put the nodes in execution order (Kahn's algorithm), staying close to the present order."""
        if not self._is_sorted():
            self.gs.nodes = self._sorted()
        self.place = {node: i for i, node in enumerate(self.nodes)}

    def _is_sorted(self) -> bool:
        """Whether no node reads what a later one computes."""
        later = {t.name for node in self.nodes for t in node.outputs}
        later.discard("")
        for node in self.nodes:
            if not later.isdisjoint(self.reads(node)):
                return False
            later.difference_update([t.name for t in node.outputs])
        return True

    def _sorted(self) -> list[Node]:
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
        return order


def check_version(model: onnx.ModelProto) -> None:
    """Raise ModelError for a model that imports our operators in a version that is newer than ours."""
    for opset in model.opset_import:
        if opset.domain == DOMAIN and opset.version > VERSION:
            raise ModelError(
                f"the model uses version {opset.version} of the operators of domain {DOMAIN}, this onnxfuse knows "
                f"version {VERSION}; install a newer onnxfuse"
            )


def _dim_param(text: str) -> str | None:
    return None if "?" in text else text  # "?" marks a dimension that is not known


class LinkedNode(gs.Node):  # type: ignore[misc]
    """A node that equals itself only.

    graphsurgeon compares nodes by content, which its lists do on every removal: slow, and wrong among unnamed nodes.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def subgraph_names(node: onnx.NodeProto) -> Iterator[str]:
    """Every name that the subgraphs of a node mention: the outer tensors they read are among them."""
    for inner in subgraphs(node):
        yield from (o.name for o in inner.output)
        for child in inner.node:
            yield from child.input
            yield from subgraph_names(child)


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
    return stored if isinstance(stored, np.ndarray) else array_of(graph, stored.tensor, tensor.name)


def array_of(graph: Graph, proto: onnx.TensorProto | onnx.SparseTensorProto, name: str) -> Array:
    """A stored tensor's value, read from the model's folder where it is external; the proto stays as it is."""
    if isinstance(proto, onnx.SparseTensorProto):  # of which graphsurgeon reads neither the dtype nor raw data
        values, places = array_of(graph, proto.values, name), array_of(graph, proto.indices, name)
        dense = np.zeros(tuple(proto.dims), values.dtype)
        dense[np.unravel_index(places, dense.shape) if places.ndim == 1 else tuple(places.T)] = values
        return dense
    if external_data_helper.uses_external_data(proto):
        if graph.folder is None:
            raise ModelError(f"constant '{name}' lies in an external file; give the model as a path")
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
