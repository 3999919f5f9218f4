"""Walking and copying ONNX messages: subgraphs, nodes and tensors at any depth; copies that leave weights behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import onnx
from onnx.external_data_helper import uses_external_data

Message = TypeVar("Message", bound=Any)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    for attribute in node.attribute:
        yield from (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


def nodes(*parts: Any) -> Iterator[onnx.NodeProto]:
    """The nodes of graphs and functions, and of their subgraphs."""
    for part in parts:
        for node in part.node:
            yield node
            yield from nodes(*subgraphs(node))


def graphs(*parts: Any) -> Iterator[Any]:
    """The graphs and functions, and the graphs inside them."""
    for part in parts:
        yield part
        for node in part.node:
            yield from graphs(*subgraphs(node))


def tensors(*parts: Any) -> Iterator[onnx.TensorProto]:
    """Every dense tensor in graphs and functions, at any depth."""
    for part in graphs(*parts):
        yield from getattr(part, "initializer", ())
        for node in part.node:
            for attribute in node.attribute:
                yield from (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors)


def overridable(model: onnx.ModelProto) -> set[str]:
    """The initializers that are only defaults: inputs too, which from IR version 4 on a caller may give."""
    inputs = {value.name for value in model.graph.input}
    return {t.name for t in model.graph.initializer if t.name in inputs} if model.ir_version >= 4 else set()


def without(message: Message, *fields: str) -> Message:
    """A copy without these fields, whose content is not even read."""
    kept = {field.name: value for field, value in message.ListFields() if field.name not in fields}
    return type(message)(**kept)  # type: ignore[no-any-return]


def swapped(model: onnx.ModelProto, swap: Callable[[onnx.TensorProto], onnx.TensorProto]) -> onnx.ModelProto:
    """A copy with every initializer and every external tensor swapped; weights that are swapped out are not copied."""
    copy = without(model, "graph")
    copy.graph.CopyFrom(without(model.graph, "initializer"))
    for tensor in tensors(copy.graph, *copy.functions):
        if uses_external_data(tensor):
            tensor.CopyFrom(swap(tensor))
    copy.graph.initializer.extend(swap(tensor) for tensor in model.graph.initializer)
    return copy
