"""The one file that touches the inside of onnx-graphsurgeon, which links nodes and tensors and ships no types."""

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
    """A graph whose nodes know their tensors, and whose tensors know their nodes."""

    nodes: list[Node]
    inputs: list[Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that nodes read or write, by name."""


class IdentityNode(gs.Node):  # type: ignore[misc]
    """A node that equals itself only.

    graphsurgeon compares nodes by content, which its lists do on every removal: slow, and wrong among unnamed nodes.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def link(model: onnx.ModelProto, overridable: Iterable[str]) -> LinkedGraph:
    """Link a model's main graph.  The initializers named in `overridable` become graph inputs without a value.

    Nodes of subgraphs read nothing here: they stay in the message of their node, and what they read must keep its name
    (`Graph.captured`), so that nothing is fused with them.
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
    for part in inner:  # after all others, because two branches may hold nodes that differ only in identity
        for node in part.nodes:
            node.inputs.clear()
    return graph  # type: ignore[no-any-return]


def new_node(
    op: str, name: str, attributes: dict[str, AttributeValue], inputs: Iterable[Tensor], outputs: Iterable[Tensor],
    domain: str | None,
) -> Node:  # fmt: skip
    """Return a node that is linked to its tensors, and is in no graph yet."""
    return IdentityNode(op, name, attributes, list(inputs), list(outputs), domain)


def new_constant(name: str, value: Array) -> Constant:
    """Return an initializer."""
    return gs.Constant(name, np.array(value, order="C", copy=None))  # type: ignore[no-any-return]


def new_variable(name: str, dtype: DType | None = None, shape: Sequence[int | str | None] | None = None) -> Tensor:
    """Return a tensor that a node is to compute, with the dtype and shape to record for it."""
    return gs.Variable(name, dtype, shape)  # type: ignore[no-any-return]


def make_constant(tensor: Tensor, value: Array) -> None:
    """Turn a tensor that a node computed into an initializer of its name; its readers then read that."""
    tensor.inputs.clear()
    tensor.to_constant(np.array(value, order="C", copy=None))  # type: ignore[attr-defined]


def share_constant(tensor: Tensor, constant: Constant) -> None:
    """Turn an input into a constant with the value of another one, without a copy."""
    tensor.to_constant(constant._values)  # type: ignore[attr-defined]


def constant_of(proto: onnx.TensorProto) -> Constant:
    """Return an initializer that no node reads, whose value stays in the message."""
    return gs.Constant(proto.name, LazyValues(proto))  # type: ignore[no-any-return]


def copy_of(constant: Constant, name: str) -> Constant:
    """Return an initializer of another name with the value of a constant, which no node reads."""
    return gs.Constant(name, constant._values)  # type: ignore[attr-defined,no-any-return]


def stored_value(constant: Constant) -> Array | onnx.TensorProto | onnx.SparseTensorProto:
    """Return a constant's value: an array, or the message that was read, whose data may be in another file."""
    stored = constant._values  # type: ignore[attr-defined]
    return stored if isinstance(stored, np.ndarray) else stored.tensor


def share_value(constant: Constant, written: onnx.TensorProto) -> None:
    """Replace a constant's value by the message to which it was written."""
    constant._values = LazyValues(written)  # type: ignore[attr-defined]


def export_node(node: Node) -> onnx.NodeProto:
    """Return a node as a message, without what graphsurgeon drops: metadata, doc strings, sparse attributes."""
    return OnnxExporter.export_node(node)  # type: ignore[no-any-return]
