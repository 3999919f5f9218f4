"""Walk through ONNX messages to any depth, and copy them without their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
from onnx.external_data_helper import uses_external_data

from onnxfuse.algebra.operators import CONTROL_FLOW
from onnxfuse.ir.dtypes import Array

ONNX_DOMAINS: Final = ("", "ai.onnx")
# The types of attributes that hold neither tensors nor graphs.  Most attributes have one of them, so their other fields
# are not read; `load` refuses an attribute whose type does not fit its fields.
PLAIN_ATTRIBUTES: Final = frozenset({
    onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS,
    onnx.AttributeProto.STRING, onnx.AttributeProto.STRINGS,
})  # fmt: skip


class NodeContainer(Protocol):
    """A graph or a function."""

    @property
    def node(self) -> Iterable[onnx.NodeProto]:
        """The nodes, without those in subgraphs."""

    @property
    def value_info(self) -> Iterable[onnx.ValueInfoProto]:
        """The recorded types of the values between the nodes."""


@dataclass(frozen=True)
class OneNode:
    """A container that refers to one node without copying it; a FunctionProto would copy the node and its tensors."""

    node: tuple[onnx.NodeProto]
    value_info: tuple[onnx.ValueInfoProto, ...] = ()


Part = TypeVar("Part", bound=NodeContainer)
Message = TypeVar("Message", onnx.ModelProto, onnx.GraphProto)


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs in a node's attributes."""
    return [
        g for a in node.attribute if a.type not in PLAIN_ATTRIBUTES
        for g in (*((a.g,) if a.HasField("g") else ()), *a.graphs)
    ]  # fmt: skip


def is_control_flow(node: onnx.NodeProto) -> bool:
    """Return whether a node is an If, Loop or Scan of the ONNX domain; onnxfuse can rewrite their subgraphs."""
    return node.op_type in CONTROL_FLOW and node.domain in ONNX_DOMAINS


def operator_name(node: onnx.NodeProto) -> str:
    """Return `Add` for an operator of ONNX, and `domain::Add` for others, like `op_of` for nodes of a graph."""
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}"


def opset_of(part: onnx.ModelProto | onnx.FunctionProto) -> int:
    """Return the version of the ONNX domain that a model or function imports; 0 if it imports none."""
    return next((each.version for each in part.opset_import if each.domain in ONNX_DOMAINS), 0)


def import_opset(part: onnx.ModelProto | onnx.FunctionProto, version: int) -> None:
    """Change, in place, the version of the ONNX domain that a model or function imports."""
    for each in part.opset_import:
        if each.domain in ONNX_DOMAINS:
            each.version = version


def external_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors that have their data in another file, at any depth and in functions."""
    return filter(uses_external_data, tensors(model.graph, *model.functions))


def external_locations(model: onnx.ModelProto) -> set[str]:
    """Return the names of the files that hold external data of a model."""
    entries = (entry for tensor in external_tensors(model) for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def defined_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of the tensors that a graph defines, without those inside its subgraphs."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    names |= {tensor.values.name for tensor in graph.sparse_initializer}
    return names | {name for node in graph.node for name in node.output if name}


def nodes(*parts: NodeContainer) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of graphs and functions, and of their subgraphs."""
    for part in parts:
        for node in part.node:
            yield node
            if node.attribute and (inner := subgraphs(node)):
                yield from nodes(*inner)


def count_nodes(*parts: NodeContainer) -> int:
    """Return the number of nodes of graphs and functions, and of their subgraphs.

    Constants are not counted, because they compute nothing.
    """
    return sum(not is_constant(node) for node in nodes(*parts))


def is_constant(node: onnx.NodeProto) -> bool:
    """Return whether a node is a Constant of the ONNX domain."""
    return node.op_type == "Constant" and node.domain in ONNX_DOMAINS


def graphs(*parts: Part) -> Iterator[Part | onnx.GraphProto]:
    """Yield the graphs and functions, and all subgraphs inside them."""
    for part in parts:
        yield part
        for node in part.node:
            if node.attribute and (inner := subgraphs(node)):
                yield from graphs(*inner)


def tensors(*parts: NodeContainer) -> Iterator[onnx.TensorProto]:
    """Yield every dense tensor in graphs and functions, at any depth, including defaults of functions' attributes."""
    for part in graphs(*parts):
        if isinstance(part, onnx.GraphProto):
            yield from part.initializer
        if isinstance(part, onnx.FunctionProto):
            yield from _tensors_of(part.attribute_proto)
        for node in part.node:
            yield from _tensors_of(node.attribute)


def _tensors_of(attributes: Iterable[onnx.AttributeProto]) -> Iterator[onnx.TensorProto]:
    for attribute in attributes:
        if attribute.type not in PLAIN_ATTRIBUTES:
            yield from (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors)


def has_external_data(model: onnx.ModelProto) -> bool:
    """Return whether any tensor, at any depth or in a function, has its data in another file."""
    return next(external_tensors(model), None) is not None


def overridable_initializers(model: onnx.ModelProto) -> set[str]:
    """Return the initializers that a caller can override: since IR version 4, those that are also graph inputs."""
    inputs = {value.name for value in model.graph.input}
    return {t.name for t in model.graph.initializer if t.name in inputs} if model.ir_version >= 4 else set()


def drop_constant_inputs(model: onnx.ModelProto, constants: set[str]) -> None:
    """Remove initializers from the graph inputs of a model before IR version 4, and set its version to 4.

    Before version 4, every initializer is also an input.  Since version 4, callers can override those that are inputs.
    """
    if model.ir_version < 4:
        inputs = [i for i in model.graph.input if i.name not in constants]
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = 4


def stored_integers(tensor: onnx.TensorProto | None) -> Array:
    """Return the values of an integer tensor that is stored in the model; an empty array for others."""
    integers = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    if tensor is None or tensor.data_type not in integers or uses_external_data(tensor):
        return np.zeros(0, np.int64)
    return onnx.numpy_helper.to_array(tensor)


def value_info(name: str, dtype: int, dims: Iterable[int | str | None] | None) -> onnx.ValueInfoProto:
    """Return the type of a tensor, like onnx's make_tensor_value_info; `dims` is None for a tensor of unknown rank."""
    return onnx.ValueInfoProto(name=name, type=_tensor_type(dtype, None if dims is None else tuple(dims)))


@functools.lru_cache(maxsize=4096)  # the tensors of a model have few types, and copying one takes a tenth of making it
def _tensor_type(dtype: int, dims: tuple[int | str | None, ...] | None) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(dtype, dims)


def copy_without(message: Message, *fields: str) -> Message:
    """Return a copy of a message without these fields; their content is not read."""
    kept = {field.name: value for field, value in message.ListFields() if field.name not in fields}
    return type(message)(**kept)


def without_initializers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a model without the dense initializers of its main graph; their values are not read."""
    copy = copy_without(model, "graph")
    copy.graph.CopyFrom(copy_without(model.graph, "initializer"))
    return copy


def replace_tensors(
    model: onnx.ModelProto, replacement: Callable[[onnx.TensorProto], onnx.TensorProto]
) -> onnx.ModelProto:
    """Return a copy with every initializer and external tensor replaced; the replaced weights are not copied."""
    copy = without_initializers(model)
    for tensor in tensors(copy.graph, *copy.functions):
        if uses_external_data(tensor):
            tensor.CopyFrom(replacement(tensor))
    copy.graph.initializer.extend(replacement(tensor) for tensor in model.graph.initializer)
    return copy
