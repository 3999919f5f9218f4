"""The only module that accesses internals of onnx-graphsurgeon, which links nodes and tensors and has no type hints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter
from onnx_graphsurgeon.ir.tensor import LazyValues
from onnx_graphsurgeon.logger import G_LOGGER

from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.node import AttributeValue, Constant, DType, Node, Tensor

G_LOGGER.severity = G_LOGGER.ERROR


class LinkedGraph(Protocol):
    """A graph whose nodes refer to their tensors, and whose tensors refer to their nodes."""

    nodes: list[Node]
    inputs: list[Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that nodes read or write, by name."""


class IdentityNode(gs.Node):  # type: ignore[misc]
    """A node that equals only itself.

    graphsurgeon compares nodes by content, even to remove a node from a list.  This is slow, and confuses different
    unnamed nodes with equal content.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def link(model: onnx.ModelProto, overridable: Iterable[str]) -> LinkedGraph:
    """Link the nodes of a model's main graph by Tensor objects, which know their producers and consumers.

    The initializers named in `overridable` become graph inputs without a value.

    Subgraphs stay inside the message of their node and are not linked.  The tensors that they read must keep their
    names (`Graph.captured`), so that no fusion removes them.
    """
    graph = gs.import_onnx(model)
    names = set(overridable)
    for tensor in graph.tensors().values():
        if tensor.name in names:
            tensor.to_variable(tensor.dtype, tensor.shape)
    inner = list(graph.subgraphs(recursive=True))
    for part in (graph, *inner):
        for node in part.nodes:
            node.__class__ = IdentityNode
    for part in inner:  # needs IdentityNodes: otherwise `clear` confuses equal nodes of two branches
        for node in part.nodes:
            node.inputs.clear()
    return graph  # type: ignore[no-any-return]


def new_node(
    op: str, name: str, attributes: dict[str, AttributeValue], inputs: Iterable[Tensor], outputs: Iterable[Tensor],
    domain: str | None,
) -> Node:  # fmt: skip
    """Return a node that is linked to its tensors, and is not yet part of a graph."""
    return IdentityNode(op, name, attributes, list(inputs), list(outputs), domain)


def new_constant(name: str, value: Array) -> Constant:
    """Return an initializer with this name and value, not yet read by any node."""
    return gs.Constant(name, np.array(value, order="C", copy=None))  # type: ignore[no-any-return]


def new_variable(name: str, dtype: DType | None = None, shape: Sequence[int | str | None] | None = None) -> Tensor:
    """Return a tensor that a node will compute, with the dtype and shape to record for it."""
    return gs.Variable(name, dtype, shape)  # type: ignore[no-any-return]


def disconnect(nodes: Sequence[Node]) -> None:
    """Clear the inputs of nodes.  Each tensor's list of consumers is searched once, and not once for each node."""
    gone = set(map(id, nodes))
    for tensor in {id(tensor): tensor for node in nodes for tensor in node.inputs}.values():
        # The methods of `list` leave out what SynchronizedList does for each element.
        list.__setitem__(tensor.outputs, slice(None), [each for each in tensor.outputs if id(each) not in gone])
    for node in nodes:
        list.clear(node.inputs)


def make_constant(tensor: Tensor, value: Array) -> None:
    """Turn a computed tensor into an initializer of the same name; its consumers then read the initializer."""
    tensor.inputs.clear()
    tensor.to_constant(np.array(value, order="C", copy=None))  # type: ignore[attr-defined]


def share_constant(tensor: Tensor, constant: Constant) -> None:
    """Convert a graph input into a constant that shares the value of another constant."""
    tensor.to_constant(constant._values)  # type: ignore[attr-defined]


def constant_of(proto: onnx.TensorProto) -> Constant:
    """Return a constant for this initializer, not yet read by any node; its value stays in `proto`."""
    return gs.Constant(proto.name, LazyValues(proto))  # type: ignore[no-any-return]


def copy_of(constant: Constant, name: str) -> Constant:
    """Return a constant of another name that shares the value of `constant`, not yet read by any node."""
    return gs.Constant(name, constant._values)  # type: ignore[attr-defined,no-any-return]


def stored_value(constant: Constant) -> Array | onnx.TensorProto | onnx.SparseTensorProto:
    """Return a constant's value: an array, or the protobuf message that was read, whose data can be in another file."""
    stored = constant._values  # type: ignore[attr-defined]
    return stored if isinstance(stored, np.ndarray) else stored.tensor


def share_value(constant: Constant, written: onnx.TensorProto) -> None:
    """Replace a constant's value by the protobuf message written from it, so that memory holds the data once."""
    constant._values = LazyValues(written)  # type: ignore[attr-defined]


def export_node(node: Node) -> onnx.NodeProto:
    """Return a node as a NodeProto, without the parts that graphsurgeon drops, such as metadata and doc strings."""
    return OnnxExporter.export_node(node)  # type: ignore[no-any-return]
