"""A half-precision model in float32: the same graph, every float16 or bfloat16 in it replaced."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.numpy_helper
from onnx import AttributeProto, TensorProto
from onnx.external_data_helper import uses_external_data

from onnxfuse.model.protos import graphs, nodes, swapped

HALVES = {TensorProto.FLOAT16: "float16", TensorProto.BFLOAT16: "bfloat16"}
DTYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "softmax_precision", "stash_type"}


def half_of(model: onnx.ModelProto) -> str:
    """The coarsest half precision that the model names anywhere: bfloat16, float16, or '' for none."""
    found = _named(_dtype_names(model), model.graph, *model.functions)
    return next((HALVES[t] for t in (TensorProto.BFLOAT16, TensorProto.FLOAT16) if t in found), "")


def from_half(model: onnx.ModelProto) -> set[str]:
    """The tensors of the main graph that are computed in or from half precision, whatever their own dtype is."""
    graph, names = model.graph, _dtype_names(model)
    known = {t.name for t in graph.initializer if t.data_type in HALVES}
    known |= {t.values.name for t in graph.sparse_initializer if t.values.data_type in HALVES}
    known |= {v.name for v in _values(graph) if any(t.elem_type in HALVES for t in _element_types(v.type))}
    for function in model.functions:
        if not HALVES.keys().isdisjoint(_named(names, function)):
            known.add(f"{function.domain}::{function.name}")
    for node in graph.node:
        alone = SimpleNamespace(node=[node], value_info=())  # no copy of its tensors
        reads = {name for each in nodes(alone) for name in (*each.input, f"{each.domain}::{each.op_type}")}
        halves = not HALVES.keys().isdisjoint(_named(names, alone))
        if node.op_type not in ("Shape", "Size") and (halves or not reads.isdisjoint(known)):
            known.update(node.output)
    return known


def _named(names: set[str], *outer: Any) -> set[int]:
    """The dtypes that graphs and functions name: of tensors, of values, and in the attributes `names`."""
    parts = list(graphs(*outer))
    found = {a.i for a in _dtype_attributes(names, parts)}
    for part in parts:
        found |= {t.data_type for t in getattr(part, "initializer", ())}
        found |= {t.values.data_type for t in getattr(part, "sparse_initializer", ())}
        found |= {t.elem_type for v in _values(part) for t in _element_types(v.type)}
        for node in part.node:
            found |= {t.data_type for a in node.attribute for t in (a.t, *a.tensors)}
    return found


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that computes in float32 wherever the model does in float16 or bfloat16.

    Initializers, tensors in attributes, the types of values, `Cast` and the like are replaced, in subgraphs and
    model-local functions too.  External weights stay where they lie, and a Cast reads them.
    """
    result = swapped(model, lambda tensor: tensor if uses_external_data(tensor) else _wide(tensor))
    parts = list(graphs(result.graph, *result.functions))
    for attribute in _dtype_attributes(_dtype_names(result), parts):
        attribute.i = TensorProto.FLOAT if attribute.i in HALVES else attribute.i
    for part in parts:
        for value in _values(part):
            _widen_type(value.type)
        for tensor in getattr(part, "sparse_initializer", ()):
            tensor.values.CopyFrom(_wide(tensor.values))
        for node in part.node:
            for attribute in node.attribute:
                _widen_attribute(attribute)
        if isinstance(part, onnx.GraphProto):
            _widen_initializers(part)
    return result


def widened_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays, those of half precision in float32."""
    return {name: _wide_array(value) for name, value in arrays.items()}


def _wide_array(value: Any) -> Any:
    if isinstance(value, list):
        return [_wide_array(each) for each in value]
    half = isinstance(value, np.ndarray) and value.dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
    return value.astype(np.float32) if half else value


def _wide(tensor: TensorProto) -> TensorProto:
    if tensor.data_type not in HALVES:
        return tensor
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float32), tensor.name)


def _dtype_names(model: onnx.ModelProto) -> set[str]:
    """Names of attributes that name a dtype, and of those of function calls that a function's body uses as one."""
    bodies = (node for part in graphs(*model.functions) for node in part.node)
    return DTYPE_ATTRIBUTES | {
        a.ref_attr_name for n in bodies for a in n.attribute if a.name in DTYPE_ATTRIBUTES and a.ref_attr_name
    }


def _dtype_attributes(names: set[str], parts: list[Any]) -> Iterator[AttributeProto]:
    for part in parts:
        for attributes in (getattr(part, "attribute_proto", ()), *(n.attribute for n in part.node)):
            yield from (a for a in attributes if a.name in names and a.type == AttributeProto.INT)


def _values(part: Any) -> Iterator[onnx.ValueInfoProto]:
    yield from part.value_info
    if isinstance(part, onnx.GraphProto):
        yield from (*part.input, *part.output)


def _element_types(kind: onnx.TypeProto) -> Iterator[Any]:
    """The tensor types in a type: its own, or that of the elements of a sequence, an optional or a map."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        yield getattr(kind, which)
    elif which in ("sequence_type", "optional_type"):
        yield from _element_types(getattr(kind, which).elem_type)
    elif which == "map_type":
        yield from _element_types(kind.map_type.value_type)


def _widen_type(kind: onnx.TypeProto) -> None:
    for tensor in _element_types(kind):
        tensor.elem_type = TensorProto.FLOAT if tensor.elem_type in HALVES else tensor.elem_type


def _widen_attribute(attribute: AttributeProto) -> None:
    for tensor in (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors):
        if not uses_external_data(tensor):
            tensor.CopyFrom(_wide(tensor))
    sparse_tensors = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for sparse in (*sparse_tensors, *attribute.sparse_tensors):
        sparse.values.CopyFrom(_wide(sparse.values))
    for kind in (*([attribute.tp] if attribute.HasField("tp") else ()), *attribute.type_protos):
        _widen_type(kind)


def _widen_initializers(graph: onnx.GraphProto) -> None:
    """Those in files are read through a Cast each, which takes over their names."""
    casts = {}
    for tensor in graph.initializer:
        if not uses_external_data(tensor):
            tensor.CopyFrom(_wide(tensor))
        elif tensor.data_type in HALVES:
            stored = f"{tensor.name}::stored"
            casts[tensor.name] = onnx.helper.make_node("Cast", [stored], [tensor.name], to=TensorProto.FLOAT)
            tensor.name = stored
    if casts:
        present, inputs = list(graph.node), [i for i in graph.input if i.name not in casts]
        del graph.node[:]
        graph.node.extend([*casts.values(), *present])
        del graph.input[:]  # before IR version 4 every initializer was an input as well
        graph.input.extend(inputs)
