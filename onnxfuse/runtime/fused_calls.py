"""Read a model's fused nodes and the dtypes of their inputs, and make some nodes call a copy of their function."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import onnx
from onnx import helper

from onnxfuse.algebra.operators import RANDOM
from onnxfuse.errors import ModelError
from onnxfuse.ir.domain import DOMAIN, check_version, is_fused
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.inline_functions import check_expanded
from onnxfuse.ir.protos import subgraphs
from onnxfuse.ir.without_weights import read_without_weights
from onnxfuse.runtime.hosts import numbers_of
from onnxfuse.runtime.plan import FusedNode

NamedShape = tuple[int | str, ...]  # a dynamic dim is a name, and dims of one name are equal


@dataclass(frozen=True)
class Type:
    """The dtype of a tensor, its shape if known, and whether it is constant."""

    dtype: int
    shape: NamedShape | None  # None if the rank is unknown
    constant: bool = False  # the model holds the tensor's values

    @property
    def rank(self) -> int | None:
        """The number of dims; None if it is unknown."""
        return None if self.shape is None else len(self.shape)


Types = Mapping[str, Type]
MAX_INITIALIZER_BYTES: Final = 1024  # larger initializers are left out of shape inference
ATTRIBUTE_KINDS: Final = {
    onnx.AttributeProto.INT: "i",
    onnx.AttributeProto.FLOAT: "f",
    onnx.AttributeProto.STRING: "s",
    onnx.AttributeProto.INTS: "I",
    onnx.AttributeProto.FLOATS: "F",
}


@dataclass(frozen=True)
class Call:
    """A fused node of a model."""

    op: str  # the function that the node calls
    proto: onnx.NodeProto
    node: FusedNode
    dtypes: tuple[str | None, ...]  # dtypes of the node's inputs; None if unknown
    # Shapes of the inputs, or None if unknown.  An input that is a number (an int32 in host memory) is recorded as a
    # shape of one dynamic dim, whose size is the number.
    shapes: tuple[NamedShape | None, ...]
    constants: tuple[bool, ...]  # whether the model holds the values of each input
    has_ranks: bool  # whether onnxruntime can infer the ranks of the outputs: see native/infer.h
    in_function: bool  # whether the node is in the body of a function
    has_body: bool  # whether the model has the function that the node calls


def read_model(source: str | Path | bytes | onnx.ModelProto) -> onnx.ModelProto:
    """Return the model; a path or bytes are read without large weights.  Raises ModelError if reading fails."""
    return source if isinstance(source, onnx.ModelProto) else read_without_weights(source)


def read_calls(model: onnx.ModelProto) -> list[Call]:
    """Return the fused nodes of a model.

    Raises ModelError for a node that this version of onnxfuse cannot read, and for functions with too many nodes.
    """
    check_version(model)
    check_expanded(model, "the model")
    bodies = {f.name for f in model.functions if f.domain == DOMAIN}
    nodes = list(_nodes(model.graph, ChainMap[str, Type]()))
    if not any(is_fused(node) for node, _ in nodes):
        return []
    constants = _constants(model.graph)
    typed = list(_nodes(inferred(model).graph, ChainMap[str, Type](), constants))
    calls = [_call(node, types, bodies) for (node, _), (_, types) in zip(nodes, typed, strict=True) if is_fused(node)]
    for function in model.functions:
        calls += [_call(n, None, bodies) for n in _all_nodes(function.node) if is_fused(n)]
    return calls


def _call(node: onnx.NodeProto, types: Types | None, bodies: Collection[str]) -> Call:
    name = node.name or next(iter(node.output), "")
    attributes = {each.name: _value(each) for each in node.attribute if not each.ref_attr_name}
    fused = FusedNode.read(name, attributes)
    for attribute, named, count in (
        ("operands", fused.operands, len(node.input)),
        ("output_types", fused.output_dtypes, len(node.output)),
    ):
        if len(named) != count or not named:
            raise ModelError(f"fused node '{name}': attribute {attribute} names {len(named)}, the node has {count}")
    known = types or {}
    found = [known.get(name) for name in node.input]
    numbers = numbers_of(fused)
    ranks = {known[name].rank if name in known else None for name in (node.input[0], *node.output)}
    return Call(
        node.op_type,
        node,
        fused,
        tuple(None if each is None else dtype_name(each.dtype) for each in found),
        tuple(
            (f"{name}'s value",) if i in numbers else None if each is None else each.shape
            for i, (name, each) in enumerate(zip(node.input, found, strict=True))
        ),
        tuple(each is not None and each.constant for each in found),
        has_ranks="output_ranks" in attributes or (len(ranks) == 1 and not ranks & {None, 0}),
        in_function=types is None,
        has_body=node.op_type in bodies,
    )


def _value(attribute: onnx.AttributeProto) -> object:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return list(value) if isinstance(value, tuple) else value


def attribute_kinds(calls: Collection[Call]) -> str:
    """Return names and types of the attributes of an op's nodes, for the native library: such as "epsilon:f axis:i @3".

    @3 says that input 3 is a number: one int32 in host memory.
    """
    attributes = [attribute for call in calls for attribute in call.proto.attribute]
    kinds = {(each.name, ATTRIBUTE_KINDS[each.type]) for each in attributes if each.type in ATTRIBUTE_KINDS}
    numbers = sorted({number for call in calls for number in numbers_of(call.node)})
    return " ".join([*(f"{name}:{kind}" for name, kind in sorted(kinds)), *(f"@{number}" for number in numbers)])


def split_functions(model: onnx.ModelProto, calls: Collection[Call], whole: onnx.ModelProto) -> onnx.ModelProto:
    """Make some nodes call renamed copies of their functions, which are not registered as operators with kernels.

    Other nodes that call the same functions can then run as kernels, while these nodes run as ONNX functions.

    calls  the nodes, as they were read from `model`
    whole  the same model with all its weights; its nodes are changed, and it is returned
    """
    ids = {id(call.proto) for call in calls}
    renamed: dict[str, str] = {}
    taken = {f.name for f in model.functions}
    for op in sorted({call.op for call in calls}):
        name = f"{op}_body"
        while name in taken:
            name += "_"
        taken.add(name)
        renamed[op] = name
    indices = [index for index, node in enumerate(_all_model_nodes(model)) if id(node) in ids]
    nodes = _all_model_nodes(whole)
    for index in indices:
        nodes[index].op_type = renamed[nodes[index].op_type]
    for function in model.functions:
        if function.domain == DOMAIN and function.name in renamed:
            whole.functions.add().CopyFrom(function)
            whole.functions[-1].name = renamed[function.name]
    return whole


def _all_model_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [*_all_nodes(model.graph.node), *(n for f in model.functions for n in _all_nodes(f.node))]


def _all_nodes(nodes: Collection[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.node)


def _nodes(
    graph: onnx.GraphProto, scope: ChainMap[str, Type], constants: AbstractSet[str] = frozenset()
) -> Iterator[tuple[onnx.NodeProto, Types]]:
    """Yield every node with the types of the tensors visible to it; `constants` names tensors that never change."""
    types = scope.new_child()
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        if tensor.elem_type:
            types[info.name] = Type(tensor.elem_type, _shape(info.name, tensor))
    for t in graph.initializer:
        types[t.name] = Type(t.data_type, tuple(t.dims))
    for name in constants & types.maps[0].keys():
        types[name] = replace(types[name], constant=True)
    for node in graph.node:
        yield node, types
        for inner in subgraphs(node):
            yield from _nodes(inner, types)


def _constants(graph: onnx.GraphProto) -> set[str]:
    """Return the tensors that onnxruntime treats as constants: initializers, and tensors computed from constants."""
    inputs = {each.name for each in graph.input}
    found = {t.name for t in graph.initializer} - inputs
    for node in graph.node:
        is_plain = node.op_type not in RANDOM and not any(subgraphs(node))
        if is_plain and found.issuperset(filter(None, node.input)):
            found.update(filter(None, node.output))
    return found


def _shape(name: str, tensor: onnx.TypeProto.Tensor) -> NamedShape | None:
    """Return the shape of a tensor; each dim without a size or a name gets a name of its own."""
    if not tensor.HasField("shape"):
        return None
    dims = enumerate(tensor.shape.dim)
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{name}[{i}]" for i, dim in dims)


def inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model without large weights, with the dtypes and shapes that onnx's shape inference finds."""
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
        if tensor.ByteSize() <= MAX_INITIALIZER_BYTES and tensor.data_location != onnx.TensorProto.EXTERNAL:
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
    except Exception:  # onnx's errors have no common class; use the types that the model records
        return light
