"""What a session must know of a model: its fused nodes, the dtypes of their inputs, and how to split an op in two."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import helper

from onnxfuse.errors import ModelError
from onnxfuse.model.files import read
from onnxfuse.model.graph import DOMAIN, check_version
from onnxfuse.model.protos import subgraphs
from onnxfuse.provider.dtypes import dtype_name
from onnxfuse.provider.plan import FusedNode
from onnxfuse.provider.planner import fused_node

Type = tuple[int, int | None]  # dtype and rank of a tensor
Types = Mapping[str, Type]
LARGE: Final = 1024  # bytes; larger initializers are left out of shape inference
KINDS: Final = {
    onnx.AttributeProto.INT: "i",
    onnx.AttributeProto.FLOAT: "f",
    onnx.AttributeProto.STRING: "s",
    onnx.AttributeProto.INTS: "I",
    onnx.AttributeProto.FLOATS: "F",
}


@dataclass(frozen=True)
class Call:
    """A fused node of a model."""

    op: str  # the function it calls
    proto: onnx.NodeProto
    node: FusedNode
    dtypes: tuple[str | None, ...]  # of its inputs; None where unknown
    has_ranks: bool  # whether onnxruntime can tell the ranks of its outputs: see native/infer.h
    in_function: bool  # inside the body of a function, which many nodes may call
    has_body: bool


def read_model(source: str | Path | bytes | onnx.ModelProto) -> onnx.ModelProto:
    """The model, without its external data.  Raises ModelError."""
    return source if isinstance(source, onnx.ModelProto) else read(source)


def read_calls(model: onnx.ModelProto) -> list[Call]:
    """The fused nodes of a model.  Raises ModelError where one is not what this version of onnxfuse can read."""
    check_version(model)
    bodies = {f.name for f in model.functions if f.domain == DOMAIN}
    nodes = list(_nodes(model.graph, ChainMap[str, Type]()))
    if not any(node.domain == DOMAIN for node, _ in nodes):
        return []
    typed = list(_nodes(_inferred(model).graph, ChainMap[str, Type]()))
    calls = [
        _call(node, types, bodies)
        for (node, _), (_, types) in zip(nodes, typed, strict=True)
        if node.domain == DOMAIN
    ]
    for function in model.functions:
        calls += [_call(n, None, bodies) for n in _all_nodes(function.node) if n.domain == DOMAIN]
    return calls


def _call(node: onnx.NodeProto, types: Types | None, bodies: Collection[str]) -> Call:
    name = node.name or next(iter(node.output), "")
    attributes = {
        a.name: value.decode(errors="replace") if isinstance(value, bytes) else value
        for a in node.attribute
        if not a.ref_attr_name
        for value in [helper.get_attribute_value(a)]
    }
    fused = fused_node(name, {k: list(v) if isinstance(v, tuple) else v for k, v in attributes.items()})
    for what, given, count in (
        ("operands", fused.operands, len(node.input)),
        ("output_types", fused.output_dtypes, len(node.output)),
    ):
        if len(given) != count or not given:
            raise ModelError(f"fused node '{name}': attribute {what} names {len(given)}, the node has {count}")
    known = types or {}
    dtypes = tuple(dtype_name(known[name][0]) if name in known else None for name in node.input)
    ranks = {known[name][1] if name in known else None for name in (node.input[0], *node.output)}
    has_ranks = "output_ranks" in attributes or (len(ranks) == 1 and not ranks & {None, 0})
    return Call(node.op_type, node, fused, dtypes, has_ranks, types is None, node.op_type in bodies)


def attribute_kinds(calls: Collection[Call]) -> str:
    """The attributes of an op's nodes, as `name:kind`, for the native library to read."""
    kinds = {(a.name, KINDS[a.type]) for call in calls for a in call.proto.attribute if a.type in KINDS}
    return " ".join(f"{name}:{kind}" for name, kind in sorted(kinds))


def split(model: onnx.ModelProto, calls: Collection[Call]) -> onnx.ModelProto:
    """A copy of the model in which these nodes call their function under another name."""
    names = {id(call.proto) for call in calls}
    renamed: dict[str, str] = {}
    taken = {f.name for f in model.functions}
    for op in sorted({call.op for call in calls}):
        name = f"{op}_body"
        while name in taken:
            name += "_"
        taken.add(name)
        renamed[op] = name
    places = [i for i, node in enumerate(_all_model_nodes(model)) if id(node) in names]
    result = onnx.ModelProto()
    result.CopyFrom(model)
    nodes = _all_model_nodes(result)
    for place in places:
        nodes[place].op_type = renamed[nodes[place].op_type]
    for function in model.functions:
        if function.domain == DOMAIN and function.name in renamed:
            result.functions.add().CopyFrom(function)
            result.functions[-1].name = renamed[function.name]
    return result


def _all_model_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [*_all_nodes(model.graph.node), *(n for f in model.functions for n in _all_nodes(f.node))]


def _all_nodes(nodes: Collection[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.node)


def _nodes(graph: onnx.GraphProto, scope: ChainMap[str, Type]) -> Iterator[tuple[onnx.NodeProto, Types]]:
    """Every node, with the types known where it stands."""
    types = scope.new_child({t.name: (t.data_type, len(t.dims)) for t in graph.initializer})
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        if tensor.elem_type:
            types[info.name] = tensor.elem_type, len(tensor.shape.dim) if tensor.HasField("shape") else None
    for node in graph.node:
        yield node, types
        for inner in subgraphs(node):
            yield from _nodes(inner, types)


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without large weights, with the dtypes that shape inference finds."""
    light = onnx.ModelProto()
    light.ir_version = max(model.ir_version, 8)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph, source = light.graph, model.graph
    graph.name = source.name
    graph.node.extend(source.node)
    graph.input.extend(source.input)
    graph.output.extend(source.output)
    graph.value_info.extend(source.value_info)
    inputs = {i.name for i in source.input}
    for tensor in source.initializer:
        if tensor.ByteSize() <= LARGE and tensor.data_location != onnx.TensorProto.EXTERNAL:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    known = {v.name for v in (*graph.value_info, *graph.output)}
    for node in source.node:
        if node.domain == DOMAIN:
            types = next((a.ints for a in node.attribute if a.name == "output_types"), ())
            for output, dtype in zip(node.output, types, strict=False):
                if output not in known:
                    graph.value_info.append(helper.make_tensor_value_info(output, dtype, None))
    try:
        return onnx.shape_inference.infer_shapes(light)
    except Exception:  # what the model records must do
        return light
