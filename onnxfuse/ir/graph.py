"""A model's graph, linked for rewriting: its nodes in execution order, and the tensors between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx.external_data_helper import uses_external_data

from onnxfuse.errors import ModelError
from onnxfuse.ir import graphsurgeon
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.execution_order import execution_order, is_in_order, outer_reads
from onnxfuse.ir.external_data import with_values
from onnxfuse.ir.node import AttributeValue, Constant, Node, Tensor, consumers, has_subgraph, is_constant, op_of
from onnxfuse.ir.protos import subgraphs, value_info
from onnxfuse.ir.quantizers import joined_quantizers

OPSET_OF_UNCUT_SLICES: Final = 10  # in this opset, onnx's inference gives a Slice the named sizes of its input


def take_name(names: set[str], stem: str) -> str:
    """Return a name that is not in `names`, and add it there: `stem`, else `stem_2`, `stem_3` and so on."""
    name, count = stem, 1
    while name in names:
        count += 1
        name = f"{stem}_{count}"
    names.add(name)
    return name


@dataclass
class RewrittenScores:
    """The Softmaxes whose scores were rewritten to match attention patterns, by the names of their original outputs.

    `stay` holds the Softmaxes whose scores must not be rewritten: in an earlier attempt, no attention pattern matched
    them after the rewrite.  If a rewrite replaced a Softmax, `begun` maps the new one's output to the original output.
    """

    stay: frozenset[str] = frozenset()
    done: set[str] = field(default_factory=set)
    begun: dict[str, str] = field(default_factory=dict)

    def name(self, softmax: Node) -> str:
        """Return the name of the output that a Softmax had before it was rewritten; else its present name."""
        name = softmax.outputs[0].name
        return self.begun.get(name, name)


@dataclass(frozen=True)
class Deferred:
    """A fused node that will later replace an operator of the same name: its function's name and its attributes.

    `inputs` holds, for each operand, the index of the operator's input.
    """

    function: str
    attributes: Mapping[str, AttributeValue]
    inputs: Sequence[int]


@dataclass
class Graph:
    """A model's main graph, or a subgraph; passes rewrite its nodes in place.

    Its own subgraphs stay inside the messages (NodeProtos) of their nodes.  `functions`, `bodies` and `names` belong to
    the whole model and are shared by all of its graphs.
    """

    linked: graphsurgeon.LinkedGraph
    model: onnx.ModelProto
    folder: Path | None
    opset: int
    # Tensors that keep their names and values, such as initializers that a caller can override.
    fixed_names: frozenset[str]
    outputs: frozenset[str]  # names of the graph's outputs
    functions: list[onnx.FunctionProto]
    names: set[str]
    bodies: dict[bytes, str] = field(default_factory=dict)  # serialized content of a function -> the function's name
    captured: frozenset[str] = frozenset()  # names of tensors that subgraphs read
    # Constants of the graphs around this one, by name.
    outer_constants: dict[str, Constant] = field(default_factory=dict)
    folded_for_subgraphs: dict[str, Constant] = field(default_factory=dict)  # folded constants that only subgraphs read
    # Id of a node -> the node, and the NodeProto from which it was read.
    protos: dict[int, tuple[Node, onnx.NodeProto]] = field(default_factory=dict)
    recorded_types: dict[str, onnx.ValueInfoProto] = field(default_factory=dict)
    misdeclared: set[str] = field(default_factory=set)  # tensors whose recorded shape was wrong and is corrected
    # Index of each node in execution order, as of the last `sort`.
    position: dict[Node, int] = field(default_factory=dict)
    _operators: tuple[dict[Node, int], Set[str]] = field(default_factory=lambda: ({}, frozenset()))
    # Id of a node -> its NodeProto, and the names of the tensors that its subgraphs read.
    _captured: dict[int, tuple[onnx.NodeProto, frozenset[str]]] = field(default_factory=dict)
    # Name of a tensor -> the operator and the name of the node that computed it first; see `remember_origins`.
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)
    is_subgraph: bool = False
    scores: RewrittenScores = field(default_factory=RewrittenScores)
    # Operators that fused nodes will replace, unless a region (a generated kernel) takes them first.
    deferred: dict[Node, Deferred] = field(default_factory=dict)
    rewritten: list[tuple[str, str]] = field(default_factory=list)  # (name of an applied rule, node that it replaced)
    # Id of a constant -> the constant, and its number; see `number`.
    _numbers: dict[int, tuple[Constant, float | None]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[Node]:
        """The nodes, in execution order after `sort`."""
        return self.linked.nodes

    @property
    def operators(self) -> Set[str]:
        """The names of all operators in the graph, as of the last `sort`."""
        if self._operators[0] is not self.position:
            self._operators = self.position, {op_of(node) for node in self.nodes}
        return self._operators[1]

    def is_kept(self, tensor: Tensor) -> bool:
        """Return whether a tensor must keep its name: as an output, because a subgraph reads it, or as a fixed name."""
        return tensor.name in self.outputs or self.is_fixed(tensor.name)

    def is_fixed(self, name: str) -> bool:
        """Return whether a tensor must keep its name, even if it is not an output of the graph."""
        return name in self.captured or name in self.fixed_names

    def must_be_computed(self, tensor: Tensor) -> bool:
        """Return whether a tensor must not become an initializer; a tensor that only subgraphs read can become one."""
        return tensor.name in self.outputs or tensor.name in self.fixed_names

    def sole_consumer(self, tensor: Tensor) -> Node | None:
        """Return the only node that reads the tensor.

        None if no node or several nodes read it, if one node reads it twice, or if the tensor must keep its name.
        """
        return tensor.outputs[0] if len(tensor.outputs) == 1 and not self.is_kept(tensor) else None

    def number(self, tensor: Tensor) -> float | None:
        """Return the number in a one-element constant; None for strings and for any other tensor."""
        if not is_constant(tensor):
            return None
        known = self._numbers.get(id(tensor))
        if known is None:
            value = constant_value(self, tensor) if math.prod(tensor.shape) == 1 else None
            number = None if value is None or value.dtype == object else float(value.reshape(()))
            known = self._numbers[id(tensor)] = tensor, number
        return known[1]

    def have_one_scale(self, node: Node, other: Node) -> bool:
        """Return whether two quantizers are known to have the same scale and the same zero point."""
        pairs = list(zip(node.inputs[1:3], other.inputs[1:3], strict=False))
        numbers = [(self.number(a), self.number(b)) for a, b in pairs if a is not b]
        return len(node.inputs) == len(other.inputs) and all(a == b is not None for a, b in numbers)

    def joins_quantizers(self, old: Tensor, new: Tensor) -> bool:
        """Return whether a QuantizeLinear would read a DequantizeLinear with another scale if `new` replaced `old`.

        onnxruntime would then give both quantizers one scale.
        """
        return not all(self.have_one_scale(*pair) for pair in joined_quantizers(old, new))

    def unique_name(self, stem: str) -> str:
        """Return and reserve a name that no node or tensor has yet: `stem`, else `stem_2`, `stem_3` and so on."""
        return take_name(self.names, stem)

    def constant(self, stem: str, value: Array) -> Constant:
        """Return a new initializer with this value, named after `stem`."""
        return graphsurgeon.new_constant(self.unique_name(stem), value)

    def variable(self, stem: str, like: Tensor | None = None) -> Tensor:
        """Return a new tensor that a node will compute; it copies the recorded dtype and shape of `like`, if given."""
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

    def rewrite(
        self,
        node: Node,
        op: str,
        inputs: Iterable[Tensor] | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Node:
        """Replace a node by another operator with the same name and outputs, and by default the same inputs."""
        inputs, outputs = list(node.inputs if inputs is None else inputs), list(node.outputs)
        node.inputs.clear()
        node.outputs.clear()
        return self.add_node(op, inputs, outputs, attributes, name=node.name)

    def set_attribute(self, node: Node, name: str, value: float | list[int]) -> None:
        """Change an attribute both in a node and in the NodeProto that is written for the node.

        The NodeProto from which the node was read is not changed: a copy with the new attribute takes its place.
        """
        node.attrs[name] = value
        if id(node) in self.protos:
            changed = onnx.NodeProto()
            changed.CopyFrom(self.protos[id(node)][1])
            kept = [each for each in changed.attribute if each.name != name]
            del changed.attribute[:]
            changed.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])
            self.protos[id(node)] = (node, changed)

    def record_type(self, tensor: Tensor, dtype: int, shape: Iterable[object] | None) -> None:
        """Record a tensor's type in the written model, for tools that lack its operator and cannot infer the type."""
        if dtype:
            known = shape if shape is None else [d if isinstance(d, int) else self._dim_param(d) for d in shape]
            self.recorded_types[tensor.name] = value_info(tensor.name, dtype, known)

    def _dim_param(self, size: object) -> str | None:
        """Return the name of a size for a recorded type; None for an unknown size, whose text contains "?".

        In opset OPSET_OF_UNCUT_SLICES, None is returned for all sizes, because onnx's inference then gives a Slice the
        named sizes of its input.  With names, onnxruntime would assume that two Slices of a tensor are equally large,
        and fail where one reuses the other's memory.
        """
        if size is None or self.opset == OPSET_OF_UNCUT_SLICES:
            return None
        text = str(size)
        return None if "?" in text else text

    def correct_type(self, tensor: Tensor, dtype: int, shape: Iterable[object] | None) -> None:
        """Record a tensor's type in place of the type that the model records, or declares for an output.

        onnxruntime trusts the recorded type where its own inference fails, as after a fused node.
        """
        self.misdeclared.add(tensor.name)
        self.record_type(tensor, dtype, shape)

    def replace(self, old: Tensor, new: Tensor) -> bool:
        """Replace `old` by `new` in the inputs of all nodes.

        If `old` must keep its name, the node that computes `new` computes `old` instead.  If both must keep their
        names, or no node computes `new`, nothing changes, and False is returned.  The same holds if the replacement
        would join quantizers (see `joins_quantizers`).
        """
        if self.joins_quantizers(old, new):
            return False
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
        """Remove every node unless an output, or another tensor that must be kept, depends on it."""
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
        """Record the operator and name of each tensor's producer, so that reports can name it after it was replaced.

        Origins that were recorded before are kept.
        """
        now = {t.name: (op_of(node), node.name or "") for node in self.nodes for t in node.outputs}
        self.origins = {**now, **self.origins}

    def reads(self, node: Node) -> set[str]:
        """Return the names of the tensors that a node or its subgraphs read."""
        names = {t.name for t in node.inputs}
        names.discard("")
        if has_subgraph(node):
            names |= self.captured_by(node)
        return names

    def captured_by(self, node: Node) -> frozenset[str]:
        """Return the names of the tensors of this graph and of outer graphs that a node's subgraphs read."""
        proto = self.protos[id(node)][1]
        known = self._captured.get(id(node))
        if known is None or known[0] is not proto:
            known = proto, frozenset(name for inner in subgraphs(proto) for name in outer_reads(inner))
            self._captured[id(node)] = known
        return known[1]

    def update_captured(self) -> None:
        """Update `captured`: the names of all tensors that the nodes' subgraphs read now."""
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
    """Return a constant's value; an external one is read from its file now.  bfloat16 becomes ml_dtypes.bfloat16."""
    stored = graphsurgeon.stored_value(constant)
    return stored if isinstance(stored, np.ndarray) else array_of(graph.folder, stored)


def array_of(folder: Path | None, proto: onnx.TensorProto | onnx.SparseTensorProto, name: str = "") -> Array:
    """Return a stored tensor's value, read from the model's folder if it is external; the proto is not changed.

    Raises ModelError for an external tensor if the folder is not known.  The message names `name`, or else the tensor.
    """
    # For a sparse tensor, graphsurgeon reads neither the dtype nor raw data.
    if isinstance(proto, onnx.SparseTensorProto):
        values, indices = array_of(folder, proto.values), array_of(folder, proto.indices)
        dense = np.zeros(tuple(proto.dims), values.dtype)
        dense[np.unravel_index(indices, dense.shape) if indices.ndim == 1 else tuple(indices.T)] = values
        return dense
    if uses_external_data(proto):
        if folder is None:
            raise ModelError(f"constant '{name or proto.name}' lies in an external file; give the model as a path")
        proto = with_values(proto, folder)
    return onnx.numpy_helper.to_array(proto)
