"""What onnx itself tells of a model's tensors: stated shapes, its own inference, and the dtypes of operator schemas."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx
import onnx.shape_inference
import onnx_graphsurgeon as gs
from onnx import TensorProto
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from onnxfuse.model.graph import Node, Tensor, op_of, schema
from onnxfuse.model.protos import overridable
from onnxfuse.shapes.dim_text import is_name, parse_size
from onnxfuse.shapes.dims import UNKNOWN, Dim, Size
from onnxfuse.shapes.rules import SHAPE_RULES, Partial, Shape, Undecided

if TYPE_CHECKING:
    from onnxfuse.shapes.inference import Shapes

SMALL = 1024  # bytes; larger constants stay out of the copy that onnx looks at
FAILURES = (onnx.shape_inference.InferenceError, ValueError, RuntimeError, TypeError)
_DTYPES = {f"tensor({name.lower()})": int(value) for name, value in TensorProto.DataType.items()}
StatedSize: TypeAlias = "Size | str | None"  # a text is a symbol that onnx invented; None is a nameless dimension


class Stated:
    """Shapes and dtypes that the model records, completed by onnx's inference; read only when asked for."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """Run onnx's inference on a copy without the weights; where it fails, the model's records remain."""
        self._own = _dim_names(model.graph)
        light, weights = _without_weights(model)
        try:
            graph = onnx.shape_inference.infer_shapes(light).graph
        except FAILURES:
            graph = light.graph
        self._infos = {info.name: info for info in (*graph.value_info, *graph.output, *graph.input, *weights)}

    def dtype(self, name: str) -> int:
        """The element type; 0 if unknown or no tensor."""
        info = self._infos.get(name)
        return int(info.type.tensor_type.elem_type) if info else 0

    def shape(self, name: str) -> list[StatedSize] | None:
        """The dimensions; None if the rank is unknown."""
        info = self._infos.get(name)
        if info is None or not info.type.tensor_type.HasField("shape"):
            return None
        return [self._size(dim) for dim in info.type.tensor_type.shape.dim]

    def _size(self, dim: onnx.TensorShapeProto.Dimension) -> StatedSize:
        if dim.HasField("dim_value"):
            return int(dim.dim_value) if dim.dim_value >= 0 else None
        name = dim.dim_param
        if name.startswith(UNKNOWN) or not is_name(name):
            return None
        return parse_size(name) if name in self._own else str(name)


def _dim_names(graph: onnx.GraphProto) -> set[str]:
    """The symbols that the model itself names."""
    infos = (*graph.input, *graph.output, *graph.value_info)
    return {dim.dim_param for info in infos for dim in info.type.tensor_type.shape.dim if dim.dim_param}


def _without_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.ValueInfoProto]]:
    """A copy whose big constants, and those that a caller may override, are inputs; and the types of all constants."""
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    light.functions.extend(model.functions)
    source, graph = model.graph, light.graph
    graph.name = source.name
    graph.value_info.extend(source.value_info)
    graph.output.extend(source.output)
    graph.input.extend(source.input)
    for node in source.node:
        if node.op_type == "Constant" and node.ByteSize() > SMALL and node.attribute[0].HasField("t"):
            graph.input.append(_info(node.output[0], node.attribute[0].t))
        else:
            graph.node.append(node)
    inputs = {info.name for info in source.input}
    weights = [_info(tensor.name, tensor) for tensor in source.initializer if tensor.name not in inputs]
    weights += [_info(t.values.name, TensorProto(dims=t.dims, data_type=t.values.data_type))
                for t in source.sparse_initializer]  # fmt: skip
    defaults = overridable(model)
    small = {t.name: t for t in source.initializer if t.name not in defaults and t.ByteSize() <= SMALL}
    graph.initializer.extend(small.values())
    graph.input.extend(info for info in weights if info.name not in small)
    return light, weights


def _info(name: str, tensor: TensorProto) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))


def constant_dtype(tensor: Tensor) -> int:
    """A constant's onnx.TensorProto.DataType; graphsurgeon keeps numpy's dtype, or the number where numpy has none."""
    dtype = tensor.dtype
    return dtype if isinstance(dtype, int) else int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


def output_dtype(s: Shapes, node: Node, place: int) -> int:
    """The dtype that the operator's schema, or an attribute, gives an output; 0 where they do not."""
    op, attrs = op_of(node), node.attrs
    if op == "Constant":
        return _constant_node_dtype(node)
    if op == "ConstantOfShape":
        return constant_dtype(attrs["value"]) if "value" in attrs else int(TensorProto.FLOAT)
    for name in ("to", "dtype", "output_dtype"):
        if place == 0 and isinstance(attrs.get(name), int) and attrs[name]:
            return int(attrs[name])
    source = _dtype_source(op, s.graph.opset, place)
    found = (s.dtype(node.inputs[i]) for i in source.inputs if i < len(node.inputs) and node.inputs[i].name)
    return source.fixed or next((dtype for dtype in found if dtype), 0)


def _constant_node_dtype(node: Node) -> int:
    if not node.attrs:  # of a sparse value, which graphsurgeon leaves out
        return 0
    (name,) = node.attrs
    if name == "value":
        return constant_dtype(node.attrs[name])
    kinds = {"value_float": TensorProto.FLOAT, "value_int": TensorProto.INT64, "value_string": TensorProto.STRING}
    return int(kinds[name.removesuffix("s")])


@dataclass(frozen=True)
class _Source:
    """Where an output's dtype comes from: the first present of some inputs, or fixed."""

    inputs: tuple[int, ...] = ()
    fixed: int = 0


@functools.cache
def _dtype_source(op: str, opset: int, place: int) -> _Source:
    if "::" in op:
        return _Source((0,)) if place == 0 and op in SHAPE_RULES else _Source()
    found = schema(op, opset)
    if found is None or not found.outputs:
        return _Source()
    kind = found.outputs[min(place, len(found.outputs) - 1)].type_str
    allowed = next((c.allowed_type_strs for c in found.type_constraints if c.type_param_str == kind), [kind])
    if len(allowed) == 1:
        return _Source(fixed=_DTYPES.get(next(iter(allowed)), 0))
    return _Source(tuple(i for i, formal in enumerate(found.inputs) if formal.type_str == kind))


def infer_by_onnx(s: Shapes, node: Node) -> list[Partial | None]:
    """What onnx infers for one node from what is known of its inputs.  Raises `Undecided` where it fails."""
    found = schema(op_of(node), s.graph.opset)
    if found is None or any(isinstance(value, gs.Graph) for value in node.attrs.values()):
        raise Undecided
    proto = OnnxExporter.export_node(node)
    inputs = [tensor for tensor in node.inputs if tensor.name]
    names: dict[str, Size] = {str(size): size for tensor in inputs for size in s.shape(tensor) or ()}
    types = {tensor.name: _type(s.dtype(tensor), s.shape(tensor)) for tensor in inputs}
    data = {tensor.name: value for tensor in inputs if (value := _integers(s, tensor)) is not None}
    imports = [onnx.helper.make_opsetid("", s.graph.opset)]
    try:
        outputs = onnx.shape_inference.infer_node_outputs(found, proto, types, data, opset_imports=imports)
    except FAILURES:
        raise Undecided from None
    return [_shape(outputs.get(tensor.name), names) for tensor in node.outputs]


def _integers(s: Shapes, tensor: Tensor) -> TensorProto | None:
    value = s.value(tensor)
    if value is None or any(isinstance(size, Dim) for size in value.reshape(-1)):
        return None
    return onnx.helper.make_tensor(tensor.name, s.dtype(tensor), value.shape, value.reshape(-1).tolist())


def _type(dtype: int, shape: Shape | None) -> onnx.TypeProto:
    sizes = None if shape is None else [size if isinstance(size, int) else str(size) for size in shape]
    return onnx.helper.make_tensor_type_proto(dtype, sizes)


def _shape(found: Any, names: dict[str, Size]) -> Partial | None:
    if found is None or not found.tensor_type.HasField("shape"):
        return None
    dims = found.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else names.get(dim.dim_param) for dim in dims)
