"""The nodes, tensors and attribute values of a linked graph, as types over the objects of onnx-graphsurgeon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

if TYPE_CHECKING:
    from typing_extensions import TypeIs

DType: TypeAlias = "np.dtype[np.generic] | int"  # numpy's dtype, or an onnx.TensorProto.DataType where numpy has none


class Tensor(Protocol):
    """A value in a graph.  Two tensors of one name are one tensor: compare them with `is`; they are not hashable."""

    name: str  # "" for an optional input or output that is left out
    inputs: list[Node]  # the node that computes it; empty for graph inputs and initializers
    outputs: list[Node]  # the nodes that read it, once for each time that they do

    @property
    def dtype(self) -> DType | None:
        """The recorded element type."""

    @property
    def shape(self) -> Sequence[int | str | None] | None:
        """The recorded dims: sizes, names, or None; None as a whole where the rank is not recorded."""


class Constant(Tensor, Protocol):
    """A tensor whose value is stored in the model: an initializer, or an attribute.  `constant_value` reads it."""

    @property
    def dtype(self) -> DType:
        """The element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""


class Subgraph(Protocol):
    """The body of an If, Loop or Scan.  It is written as the node's message has it, so it needs no methods."""

    name: str


AttributeValue: TypeAlias = "int | float | str | list[int] | list[float] | list[str] | Constant | Subgraph"


class Node(Protocol):
    """An operator with its inputs and outputs.  It equals itself only, so that it may be a key."""

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


def consumers(tensor: Tensor) -> list[Node]:
    """Return the nodes that read the tensor, each of them once."""
    return list(dict.fromkeys(tensor.outputs))


def is_tensor(value: AttributeValue | Tensor | None) -> TypeIs[Tensor]:
    """Return whether the value is a tensor: one of the graph, or an attribute's."""
    return isinstance(value, gs.Tensor)


def is_constant(value: AttributeValue | Tensor | None) -> TypeIs[Constant]:
    """Return whether the value is a tensor that is stored in the model; no caller can override it."""
    return isinstance(value, gs.Constant)


class OuterVariable(gs.Variable):  # type: ignore[misc]
    """A tensor of a graph around a subgraph, which the subgraph reads."""


def is_outer(tensor: Tensor) -> bool:
    """Return whether a tensor belongs to a graph around the subgraph that reads it."""
    return isinstance(tensor, OuterVariable)


def has_subgraph(node: Node) -> bool:
    """Return whether an attribute of the node is a graph."""
    return bool(node.attrs) and any(isinstance(value, gs.Graph) for value in node.attrs.values())
