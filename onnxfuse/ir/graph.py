"""A graph of a model, linked to be rewritten: nodes in execution order, and the tensors between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import external_data_helper

from onnxfuse.errors import ModelError
from onnxfuse.ir import graphsurgeon
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.execution_order import execution_order, is_in_order, outer_reads
from onnxfuse.ir.node import AttributeValue, Constant, Node, Tensor, consumers, has_subgraph, is_constant, op_of
from onnxfuse.ir.protos import subgraphs

OPSET_OF_UNCUT_SLICES: Final = 10  # in this opset onnx infers that a Slice of a named size has that size


def take_name(names: set[str], stem: str) -> str:
    """Return a name that is not among `names` yet, and add it: `stem`, else `stem_2`, `stem_3` and so on."""
    name, count = stem, 1
    while name in names:
        count += 1
        name = f"{stem}_{count}"
    names.add(name)
    return name


@dataclass
class RewrittenScores:
    """The Softmaxes whose scores were rewritten as patterns of attention have them, by the outputs they began with.

    `stay` are those of which no attention was made before, and whose scores therefore stay as they are.  `begun` has
    the output that a Softmax began with, by that which it has since it was written with other axes.
    """

    stay: frozenset[str] = frozenset()
    done: set[str] = field(default_factory=set)
    begun: dict[str, str] = field(default_factory=dict)

    def name(self, softmax: Node) -> str:
        """Return the output that a Softmax began with."""
        name = softmax.outputs[0].name
        return self.begun.get(name, name)


@dataclass
class Graph:
    """A model's main graph, or a subgraph as one, whose nodes are rewritten in place.

    Its own subgraphs stay inside the message of their node.  What belongs to the whole model, `functions`, `bodies` and
    `names`, is shared by all of its graphs.
    """

    linked: graphsurgeon.LinkedGraph
    model: onnx.ModelProto
    folder: Path | None
    opset: int
    fixed_names: frozenset[str]  # tensors that must not change, such as initializers that a caller may override
    outputs: frozenset[str]  # names of the graph's outputs
    functions: list[onnx.FunctionProto]
    names: set[str]
    bodies: dict[bytes, str] = field(default_factory=dict)  # the names of functions that fused nodes call, by content
    captured: frozenset[str] = frozenset()  # names of tensors that subgraphs read
    outer_constants: dict[str, Constant] = field(default_factory=dict)  # constants of the graphs around this one
    folded_for_subgraphs: dict[str, Constant] = field(default_factory=dict)  # constants that no node here need read
    protos: dict[int, tuple[Node, onnx.NodeProto]] = field(default_factory=dict)  # messages of read nodes, by ids
    recorded_types: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    misdeclared: set[str] = field(default_factory=set)  # tensors whose recorded shape was wrong and is corrected
    position: dict[Node, int] = field(default_factory=dict)  # positions in execution order at the last `sort`
    _operators: tuple[dict[Node, int], Set[str]] = field(default_factory=lambda: ({}, frozenset()))
    _captured: dict[int, tuple[onnx.NodeProto, frozenset[str]]] = field(default_factory=dict)  # by the node's id
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)  # origins of tensors: see `remember_origins`
    is_subgraph: bool = False
    scores: RewrittenScores = field(default_factory=RewrittenScores)

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in execution order after `sort`."""
        return self.linked.nodes

    @property
    def operators(self) -> Set[str]:
        """The operators of the nodes, as of the last `sort`."""
        if self._operators[0] is not self.position:
            self._operators = self.position, {op_of(node) for node in self.nodes}
        return self._operators[1]

    def is_kept(self, tensor: Tensor) -> bool:
        """Return whether the tensor must keep its name: as a graph output, for subgraphs, or for `fixed_names`."""
        return tensor.name in self.outputs or self.is_fixed(tensor.name)

    def is_fixed(self, name: str) -> bool:
        """Return whether a tensor must keep its name although it is not an output of the graph."""
        return name in self.captured or name in self.fixed_names

    def must_be_computed(self, tensor: Tensor) -> bool:
        """Return whether a tensor must not become an initializer; a tensor that only subgraphs read may."""
        return tensor.name in self.outputs or tensor.name in self.fixed_names

    def sole_consumer(self, tensor: Tensor) -> Node | None:
        """Return the node that is all that reads the tensor.

        None where several nodes, or none, read it, one node reads it twice, or the tensor must keep its name.
        """
        return tensor.outputs[0] if len(tensor.outputs) == 1 and not self.is_kept(tensor) else None

    def unique_name(self, stem: str) -> str:
        """Return a name that no node or tensor has yet, and take it: `stem`, else `stem_2`, `stem_3` and so on."""
        return take_name(self.names, stem)

    def constant(self, stem: str, value: Array) -> Constant:
        """Return a new initializer."""
        return graphsurgeon.new_constant(self.unique_name(stem), value)

    def variable(self, stem: str, like: Tensor | None = None) -> Tensor:
        """Return a new computed tensor; with the dtype and shape that the model records for `like`, where given."""
        recorded = (like.dtype, like.shape) if like is not None else ()
        return graphsurgeon.new_variable(self.unique_name(stem), *recorded)

    def add_node(
        self,
        op: str,
        inputs: Iterable[Tensor],
        outputs: Iterable[Tensor],
        attributes: Mapping[str, AttributeValue] | None = None,
        *,
        name: str = "",
        domain: str = "",
    ) -> Node:
        """Append a node; `sort` puts it in execution order later."""
        name = name or self.unique_name(op)
        node = graphsurgeon.new_node(op, name, dict(attributes or {}), inputs, outputs, domain or None)
        self.linked.nodes.append(node)
        return node

    def set_attribute(self, node: Node, name: str, value: int | list[int]) -> None:
        """Change an attribute of a node, and of its message where it was read, which is what is written."""
        node.attrs[name] = value
        if id(node) in self.protos:
            changed = onnx.NodeProto()
            changed.CopyFrom(self.protos[id(node)][1])
            kept = [each for each in changed.attribute if each.name != name]
            del changed.attribute[:]
            changed.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
            self.protos[id(node)] = (node, changed)

    def record_type(self, tensor: Tensor, dtype: int, shape: Iterable[object] | None) -> None:
        """Record a tensor's type in the model that is written, so that tools which do not know its node can go on."""
        if dtype:
            known = shape if shape is None else [d if isinstance(d, int) else self._dim_param(d) for d in shape]
            self.recorded_types[tensor.name] = onnx.helper.make_tensor_value_info(tensor.name, dtype, known)

    def _dim_param(self, size: object) -> str | None:
        """Return the name of a size in a recorded type; None where it is not known, which "?" marks.

        None as well where onnx's inference gives a Slice the names of what it cuts: onnxruntime would then take two
        Slices of a tensor to be equally large, and fail where one reuses the memory of the other.
        """
        is_named = size is not None and "?" not in str(size) and self.opset != OPSET_OF_UNCUT_SLICES
        return str(size) if is_named else None

    def correct_type(self, tensor: Tensor, dtype: int, shape: Iterable[object] | None) -> None:
        """Record a tensor's type in place of the one that the model records, or declares of an output.

        onnxruntime believes that one where its own inference tells nothing, as after a fused node.
        """
        self.misdeclared.add(tensor.name)
        self.record_type(tensor, dtype, shape)

    def replace(self, old: Tensor, new: Tensor) -> bool:
        """Replace `old` by `new` in the inputs of all nodes.

        Where `old` must keep its name, the node that computes `new` computes `old` instead.  Returns False, and changes
        nothing, where both must keep their names or `new` is not computed by a node.
        """
        if self.is_kept(old):
            if self.is_kept(new) or not new.inputs:
                return False
            producer = new.inputs[0]
            old.inputs.clear()
            for consumer in consumers(new):
                _replace_in(consumer.inputs, new, old)
            _replace_in(producer.outputs, new, old)
            return True
        for consumer in consumers(old):
            _replace_in(consumer.inputs, old, new)
        return True

    def remove_dead(self) -> None:
        """Remove every node that nothing kept depends on."""
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
            self.linked.nodes = [n for n in self.nodes if id(n) not in dead]

    def remember_origins(self) -> None:
        """Record the operator and the name of the node that computes each tensor, for messages after it is replaced.

        What was recorded of a tensor before stays.
        """
        now = {t.name: (op_of(node), node.name or "") for node in self.nodes for t in node.outputs}
        self.origins = {**now, **self.origins}

    def reads(self, node: Node) -> set[str]:
        """Return the names of the tensors that a node reads, those that its subgraphs read included."""
        names = {t.name for t in node.inputs}
        names.discard("")
        if has_subgraph(node):
            names |= self.captured_by(node)
        return names

    def captured_by(self, node: Node) -> frozenset[str]:
        """Return the names of the tensors of this graph, and of those around it, that a node's subgraphs read."""
        proto = self.protos[id(node)][1]
        known = self._captured.get(id(node))
        if known is None or known[0] is not proto:
            known = proto, frozenset(name for inner in subgraphs(proto) for name in outer_reads(inner))
            self._captured[id(node)] = known
        return known[1]

    def update_captured(self) -> None:
        """Record the tensors that the subgraphs of the nodes read now."""
        self.captured = frozenset(n for node in self.nodes if has_subgraph(node) for n in self.captured_by(node))

    def sort(self) -> None:
        """Put the nodes in execution order, staying close to the present order."""
        needs, writes = [self.reads(n) for n in self.nodes], [[t.name for t in n.outputs] for n in self.nodes]
        if not is_in_order(needs, writes):
            order = execution_order(needs, writes)
            if len(order) != len(self.nodes):
                stuck = min(set(range(len(self.nodes))).difference(order))
                name = self.nodes[stuck].name or self.nodes[stuck].op
                raise ModelError(f"the graph has a cycle through node '{name}'; ONNX graphs must be acyclic")
            self.linked.nodes = [self.nodes[i] for i in order]
        self.position = {node: i for i, node in enumerate(self.nodes)}


def _replace_in(tensors: list[Tensor], old: Tensor, new: Tensor) -> None:
    for i, tensor in enumerate(tensors):
        if tensor is old:
            tensors[i] = new


def constant_value(graph: Graph, constant: Constant) -> Array:
    """Return a constant's value, read from its file only now where it is external; bfloat16 as ml_dtypes.bfloat16."""
    stored = graphsurgeon.stored_value(constant)
    return stored if isinstance(stored, np.ndarray) else array_of(graph.folder, stored)


def constant_number(graph: Graph, tensor: Tensor) -> float | None:
    """Return the value of a constant of one element that is not a string; None for any other tensor."""
    if not is_constant(tensor) or math.prod(tensor.shape) != 1:
        return None
    value = constant_value(graph, tensor)
    return float(value.reshape(())) if value.dtype != object else None


def array_of(folder: Path | None, proto: onnx.TensorProto | onnx.SparseTensorProto, name: str = "") -> Array:
    """Return a stored tensor's value, read from the model's folder where it is external; the proto stays as it is.

    Raises ModelError for an external tensor if the folder is not known; the message names `name`, else the tensor.
    """
    if isinstance(proto, onnx.SparseTensorProto):  # graphsurgeon reads neither its dtype nor raw data
        values, indices = array_of(folder, proto.values), array_of(folder, proto.indices)
        dense = np.zeros(tuple(proto.dims), values.dtype)
        dense[np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)] = values
        return dense
    if external_data_helper.uses_external_data(proto):
        if folder is None:
            raise ModelError(f"constant '{name or proto.name}' lies in an external file; give the model as a path")
        loaded = onnx.TensorProto()
        loaded.CopyFrom(proto)
        external_data_helper.load_external_data_for_tensor(loaded, str(folder))
        proto = loaded
    return onnx.numpy_helper.to_array(proto)
