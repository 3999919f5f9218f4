"""Convert a half-precision model to float32: the same graph with every float16 and bfloat16 replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
from onnx import AttributeProto, TensorProto
from onnx.external_data_helper import uses_external_data

from onnxfuse.ir.dtypes import HALF_PRECISION
from onnxfuse.ir.protos import NodeContainer, OneNode, graphs, nodes, replace_tensors

DTYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "softmax_precision", "stash_type"}


def half_precision_of(model: onnx.ModelProto) -> str:
    """Return the coarsest half precision that the model names anywhere: "bfloat16", "float16", or "" for none."""
    found = _dtypes_in(_dtype_names(model), model.graph, *model.functions)
    return next((HALF_PRECISION[t] for t in (TensorProto.BFLOAT16, TensorProto.FLOAT16) if t in found), "")


def half_precision_tensors(model: onnx.ModelProto) -> set[str]:
    """Return the tensors of the main graph that are computed in or from half precision, whatever their own dtype is."""
    graph, names = model.graph, _dtype_names(model)
    known = {t.name for t in graph.initializer if t.data_type in HALF_PRECISION}
    known |= {t.values.name for t in graph.sparse_initializer if t.values.data_type in HALF_PRECISION}
    known |= {v.name for v in _value_infos(graph) if any(t.elem_type in HALF_PRECISION for t in _element_types(v.type))}
    for function in model.functions:
        if not HALF_PRECISION.keys().isdisjoint(_dtypes_in(names, function)):
            known.add(f"{function.domain}::{function.name}")
    for node in graph.node:
        alone = OneNode((node,))
        reads = {name for each in nodes(alone) for name in (*each.input, f"{each.domain}::{each.op_type}")}
        uses_half = not HALF_PRECISION.keys().isdisjoint(_dtypes_in(names, alone))
        if node.op_type not in ("Shape", "Size") and (uses_half or not reads.isdisjoint(known)):
            known.update(node.output)
    return known


def _dtypes_in(names: set[str], *outer: NodeContainer) -> set[int]:
    """Return the dtypes that graphs and functions name: of tensors, of values, and in the attributes `names`."""
    parts = list(graphs(*outer))
    found = {a.i for a in _dtype_attributes(names, parts)}
    for part in parts:
        found |= {t.data_type for t in getattr(part, "initializer", ())}
        found |= {t.values.data_type for t in getattr(part, "sparse_initializer", ())}
        found |= {t.elem_type for v in _value_infos(part) for t in _element_types(v.type)}
        for node in part.node:
            found |= {t.data_type for a in node.attribute for t in (a.t, *a.tensors)}
    return found


def model_to_float32(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that computes in float32 wherever the model computes in float16 or bfloat16.

    A Cast to half precision rounds on purpose, so it still rounds: a Cast back to float32 follows it.  Initializers,
    tensors in attributes, the types of values, and the dtypes of `Cast` and the like are replaced, in subgraphs and
    model-local functions too.  External weights stay in their file, and a Cast converts them.
    """
    result = replace_tensors(model, lambda tensor: tensor if uses_external_data(tensor) else _tensor_to_float32(tensor))
    parts = list(graphs(result.graph, *result.functions))
    roundings = {id(part): _roundings(part) for part in parts}
    for attribute in _dtype_attributes(_dtype_names(result), parts):
        attribute.i = TensorProto.FLOAT if attribute.i in HALF_PRECISION else attribute.i
    for part in reversed(parts):  # inner ones first: `_round_again` copies the nodes of a graph, with what they hold
        for value in _value_infos(part):
            _type_to_float32(value.type)
        for tensor in getattr(part, "sparse_initializer", ()):
            tensor.values.CopyFrom(_tensor_to_float32(tensor.values))
        for node in part.node:
            for attribute in node.attribute:
                _attribute_to_float32(attribute)
        if isinstance(part, onnx.GraphProto):
            _initializers_to_float32(part)
        _round_again(part, roundings[id(part)])
    return result


def _roundings(part: NodeContainer) -> dict[str, int]:
    """Return the half precision that Casts of a graph round to, by the name of the output."""
    return {
        node.output[0]: attribute.i
        for node in part.node
        for attribute in node.attribute
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i in HALF_PRECISION
    }


def _round_again(part: onnx.GraphProto | onnx.FunctionProto, roundings: Mapping[str, int]) -> None:
    """Put a Cast to half precision in front of each Cast that has rounded to it and is to float32 now."""
    if not roundings:
        return
    present = list(part.node)
    del part.node[:]
    for node in present:
        to = roundings.get(node.output[0]) if node.op_type == "Cast" else None
        if to is not None:
            rounded = f"{node.output[0]}::rounded"
            part.node.append(onnx.helper.make_node("Cast", [node.input[0]], [rounded], to=to))
            node.input[:] = [rounded]
        part.node.append(node)


def arrays_to_float32(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, with those of half precision converted to float32."""
    return {name: _array_to_float32(value) for name, value in arrays.items()}


def _array_to_float32(value: Any) -> Any:
    if isinstance(value, list):
        return [_array_to_float32(each) for each in value]
    half = isinstance(value, np.ndarray) and value.dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    return value.astype(np.float32) if half else value


def _tensor_to_float32(tensor: TensorProto) -> TensorProto:
    if tensor.data_type not in HALF_PRECISION:
        return tensor
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float32), tensor.name)


def _dtype_names(model: onnx.ModelProto) -> set[str]:
    """Return names of attributes that hold a dtype, also of function calls whose body uses an attribute as a dtype."""
    bodies = (node for part in graphs(*model.functions) for node in part.node)
    return DTYPE_ATTRIBUTES | {
        a.ref_attr_name for n in bodies for a in n.attribute if a.name in DTYPE_ATTRIBUTES and a.ref_attr_name
    }


def _dtype_attributes(names: set[str], parts: list[NodeContainer]) -> Iterator[AttributeProto]:
    for part in parts:
        for attributes in (getattr(part, "attribute_proto", ()), *(n.attribute for n in part.node)):
            yield from (a for a in attributes if a.name in names and a.type == AttributeProto.INT)


def _value_infos(part: NodeContainer) -> Iterator[onnx.ValueInfoProto]:
    yield from part.value_info
    if isinstance(part, onnx.GraphProto):
        yield from (*part.input, *part.output)


def _element_types(kind: onnx.TypeProto) -> Iterator[Any]:
    """Yield the tensor types in a type: its own, or that of the elements of a sequence, an optional or a map."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        yield getattr(kind, which)
    elif which in ("sequence_type", "optional_type"):
        yield from _element_types(getattr(kind, which).elem_type)
    elif which == "map_type":
        yield from _element_types(kind.map_type.value_type)


def _type_to_float32(kind: onnx.TypeProto) -> None:
    for tensor in _element_types(kind):
        tensor.elem_type = TensorProto.FLOAT if tensor.elem_type in HALF_PRECISION else tensor.elem_type


def _attribute_to_float32(attribute: AttributeProto) -> None:
    for tensor in (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors):
        if not uses_external_data(tensor):
            tensor.CopyFrom(_tensor_to_float32(tensor))
    sparse_tensors = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for sparse in (*sparse_tensors, *attribute.sparse_tensors):
        sparse.values.CopyFrom(_tensor_to_float32(sparse.values))
    for kind in (*([attribute.tp] if attribute.HasField("tp") else ()), *attribute.type_protos):
        _type_to_float32(kind)


def _initializers_to_float32(graph: onnx.GraphProto) -> None:
    """Convert initializers; one in an external file gets a new name, and a Cast under its old name converts it."""
    casts = {}
    for tensor in graph.initializer:
        if not uses_external_data(tensor):
            tensor.CopyFrom(_tensor_to_float32(tensor))
        elif tensor.data_type in HALF_PRECISION:
            stored = f"{tensor.name}::stored"
            casts[tensor.name] = onnx.helper.make_node("Cast", [stored], [tensor.name], to=TensorProto.FLOAT)
            tensor.name = stored
    if casts:
        present, inputs = list(graph.node), [i for i in graph.input if i.name not in casts]
        del graph.node[:]
        graph.node.extend([*casts.values(), *present])
        del graph.input[:]  # before IR version 4 every initializer was an input as well
        graph.input.extend(inputs)
