"""Types for the nodes, tensors and attribute values of a linked graph; the objects are onnx-graphsurgeon's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

if TYPE_CHECKING:
    from typing_extensions import TypeIs

DType: TypeAlias = "np.dtype[np.generic] | int"  # numpy's dtype, or an onnx.TensorProto.DataType where numpy has none


class Tensor(Protocol):
    """A value in a graph; it is not hashable.  Tensors of one name are one object: compare them with `is`."""

    name: str  # "" for an omitted optional input or output
    inputs: list[Node]  # a list with the tensor's producer; empty for graph inputs and initializers
    outputs: list[Node]  # the tensor's consumers; a node occurs once per input that reads the tensor

    @property
    def dtype(self) -> DType | None:
        """The recorded element type."""

    @property
    def shape(self) -> Sequence[int | str | None] | None:
        """The recorded dims, each a size, a name or None; None instead of a list if the rank is not recorded."""


class Constant(Tensor, Protocol):
    """A tensor whose value is stored in the model: an initializer, or an attribute's tensor; see `constant_value`."""

    @property
    def dtype(self) -> DType:
        """The element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""


class Subgraph(Protocol):
    """The body of an If, Loop or Scan.  Bodies are written from their node's NodeProto, so no methods are needed."""

    name: str


AttributeValue: TypeAlias = "int | float | str | list[int] | list[float] | list[str] | Constant | Subgraph"


class Node(Protocol):
    """An operator with its inputs and outputs.  It equals only itself, so it can be a dictionary key."""

    op: str
    name: str
    domain: str | None
    attrs: dict[str, AttributeValue]
    inputs: list[Tensor]
    outputs: list[Tensor]


def op_of(node: Node) -> str:
    """Return the operator's name: `Add` in the ONNX domain, `domain::Add` elsewhere."""
    domain, op = node.domain, node.op
    return f"{domain}::{op}" if domain and domain != "ai.onnx" else op


def producer(tensor: Tensor) -> Node | None:
    """Return the node that computes the tensor; None for graph inputs and initializers."""
    return tensor.inputs[0] if tensor.inputs else None


def tensor_before(tensor: Tensor, ops: Collection[str]) -> Tensor:
    """Follow first inputs back from `tensor` through nodes with these operators; return the tensor at the end."""
    while (node := producer(tensor)) is not None and op_of(node) in ops:
        tensor = node.inputs[0]
    return tensor


def consumers(tensor: Tensor) -> list[Node]:
    """Return the nodes that read the tensor, without duplicates."""
    return list(dict.fromkeys(tensor.outputs))


def is_tensor(value: AttributeValue | Tensor | None) -> TypeIs[Tensor]:
    """Return whether the value is a tensor: a tensor of the graph, or an attribute's tensor."""
    return isinstance(value, gs.Tensor)


def is_constant(value: AttributeValue | Tensor | None) -> TypeIs[Constant]:
    """Return whether the value is a tensor that is stored in the model and that no caller can override."""
    return isinstance(value, gs.Constant)


class OuterVariable(gs.Variable):  # type: ignore[misc]
    """A tensor of an outer graph that a subgraph reads."""


def is_outer(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to an outer graph, not to the subgraph that reads it."""
    return isinstance(tensor, OuterVariable)


def has_subgraph(node: Node) -> bool:
    """Return whether an attribute of the node is a graph."""
    return bool(node.attrs) and any(isinstance(value, gs.Graph) for value in node.attrs.values())
