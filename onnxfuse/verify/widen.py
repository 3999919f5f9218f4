"""Convert a model to a wider precision: half precision to float32, or float32 to float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import AttributeProto, TensorProto
from onnx.external_data_helper import uses_external_data

from onnxfuse.ir.dtypes import HALF_PRECISION
from onnxfuse.ir.protos import NodeContainer, OneNode, graphs, nodes, replace_tensors

NUMBERS: Final = ("value_float", "value_floats")  # attributes of a Constant that make its output float32
DTYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "softmax_precision", "stash_type"}


@dataclass(frozen=True)
class Widening:
    """The dtypes that a conversion replaces, and the wider dtype that it uses instead."""

    replaced: frozenset[int]
    to: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the converted arrays."""
        return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.to))

    def array(self, value: Any) -> Any:
        """Return an array or a list of arrays; those with a dtype in `replaced` are converted."""
        if isinstance(value, list):
            return [self.array(each) for each in value]
        kinds = {onnx.helper.tensor_dtype_to_np_dtype(number) for number in self.replaced}
        return value.astype(self.dtype) if isinstance(value, np.ndarray) and value.dtype in kinds else value


TO_FLOAT32: Final = Widening(frozenset(HALF_PRECISION), TensorProto.FLOAT)
TO_FLOAT64: Final = Widening(frozenset({TensorProto.FLOAT}), TensorProto.DOUBLE)


def half_precision_of(model: onnx.ModelProto) -> str:
    """Return the coarsest half precision that the model names anywhere: "bfloat16", "float16", or "" for none."""
    found = _dtypes_in(_dtype_names(model), model.graph, *model.functions)
    return next((HALF_PRECISION[t] for t in (TensorProto.BFLOAT16, TensorProto.FLOAT16) if t in found), "")


def half_precision_tensors(model: onnx.ModelProto) -> set[str]:
    """Return the main graph's tensors that are in half precision or are computed from such tensors."""
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
    """Return all dtypes in graphs and functions: of initializers and values, and in the attributes named in `names`."""
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

    A Cast to half precision rounds on purpose, so it is kept, followed by a Cast back to float32.  Everything else is
    converted, also in subgraphs and model-local functions: initializers, tensors in attributes, types of values, and
    attributes such as `to` of other Casts.  External weights stay in their file, and a Cast converts them.
    """
    return _widened(model, TO_FLOAT32)


def model_to_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy that computes in float64 wherever the model computes in float32; see `model_to_float32`.

    Half-precision parts stay in half precision.
    """
    return _widened(model, TO_FLOAT64)


def _widened(model: onnx.ModelProto, by: Widening) -> onnx.ModelProto:
    result = replace_tensors(model, lambda tensor: tensor if uses_external_data(tensor) else _tensor(tensor, by))
    parts = list(graphs(result.graph, *result.functions))
    roundings = {id(part): _roundings(part, by) for part in parts}
    for attribute in _dtype_attributes(_dtype_names(result), parts):
        attribute.i = by.to if attribute.i in by.replaced else attribute.i
    for part in reversed(parts):  # inner graphs first: `_round_again` copies nodes with their subgraphs
        for value in _value_infos(part):
            _type(value.type, by)
        for tensor in getattr(part, "sparse_initializer", ()):
            tensor.values.CopyFrom(_tensor(tensor.values, by))
        for node in part.node:
            for attribute in node.attribute:
                _attribute(node, attribute, by)
        if isinstance(part, onnx.GraphProto):
            _initializers(part, by)
        _round_again(part, roundings[id(part)])
    return result


def _roundings(part: NodeContainer, by: Widening) -> dict[str, int]:
    """Return the half-precision dtype that each Cast of a graph rounds to, by the name of its output."""
    return {
        node.output[0]: attribute.i
        for node in part.node
        for attribute in node.attribute
        if node.op_type == "Cast" and attribute.name == "to" and attribute.i in HALF_PRECISION.keys() & by.replaced
    }


def _round_again(part: onnx.GraphProto | onnx.FunctionProto, roundings: Mapping[str, int]) -> None:
    """Insert the original Cast to half precision before each Cast whose `to` the conversion replaced by float32."""
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
    """Return the arrays; those in half precision are converted to float32."""
    return {name: TO_FLOAT32.array(value) for name, value in arrays.items()}


def arrays_to_float64(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays; those in float32 are converted to float64."""
    return {name: TO_FLOAT64.array(value) for name, value in arrays.items()}


def _tensor(tensor: TensorProto, by: Widening) -> TensorProto:
    if tensor.data_type not in by.replaced:
        return tensor
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(by.dtype), tensor.name)


def _dtype_names(model: onnx.ModelProto) -> set[str]:
    """Return the names of attributes that hold a dtype, including function attributes that a body uses as a dtype."""
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
    """Yield the tensor types in a type: itself, or the element types of a sequence, an optional or a map."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        yield getattr(kind, which)
    elif which in ("sequence_type", "optional_type"):
        yield from _element_types(getattr(kind, which).elem_type)
    elif which == "map_type":
        yield from _element_types(kind.map_type.value_type)


def _type(kind: onnx.TypeProto, by: Widening) -> None:
    for tensor in _element_types(kind):
        tensor.elem_type = by.to if tensor.elem_type in by.replaced else tensor.elem_type


def _attribute(node: onnx.NodeProto, attribute: AttributeProto, by: Widening) -> None:
    if node.op_type == "Constant" and attribute.name in NUMBERS and TensorProto.FLOAT in by.replaced:
        numbers = np.array(onnx.helper.get_attribute_value(attribute), by.dtype)
        attribute.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(numbers)))
    for tensor in (*([attribute.t] if attribute.HasField("t") else ()), *attribute.tensors):
        if not uses_external_data(tensor):
            tensor.CopyFrom(_tensor(tensor, by))
    sparse_tensors = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
    for sparse in (*sparse_tensors, *attribute.sparse_tensors):
        sparse.values.CopyFrom(_tensor(sparse.values, by))
    for kind in (*([attribute.tp] if attribute.HasField("tp") else ()), *attribute.type_protos):
        _type(kind, by)


def _initializers(graph: onnx.GraphProto, by: Widening) -> None:
    """Convert initializers; an external one is renamed, and a new Cast writes it to a tensor of its old name."""
    casts = {}
    for tensor in graph.initializer:
        if not uses_external_data(tensor):
            tensor.CopyFrom(_tensor(tensor, by))
        elif tensor.data_type in by.replaced:
            stored = f"{tensor.name}::stored"
            casts[tensor.name] = onnx.helper.make_node("Cast", [stored], [tensor.name], to=by.to)
            tensor.name = stored
    if casts:
        present, inputs = list(graph.node), [i for i in graph.input if i.name not in casts]
        del graph.node[:]
        graph.node.extend([*casts.values(), *present])
        del graph.input[:]  # before IR version 4 every initializer was an input as well
        graph.input.extend(inputs)
