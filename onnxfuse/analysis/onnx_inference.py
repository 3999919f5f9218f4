"""Runs onnx's own shape inference on a single node."""

from __future__ import annotations

import onnx
import onnx.shape_inference
from onnx import TensorProto

from onnxfuse.algebra.sizes import Dim, Shape, Size
from onnxfuse.analysis.shape_info import CannotInfer, PartialShape, ShapeInfo
from onnxfuse.analysis.value_infos import EXPAND_BOUNDED_SINCE, ONNX_FAILURES
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.graphsurgeon import export_node
from onnxfuse.ir.node import Node, Tensor, has_subgraph, op_of


def infer_by_onnx(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    """Return the output shapes that onnx infers for a node from the known facts about its inputs.

    Raises CannotInfer where onnx's inference fails.
    """
    found = schema(op_of(node), shapes.graph.opset)
    if found is None or has_subgraph(node):
        raise CannotInfer
    # The shape rules of Slice and Expand infer as much as onnx.  At a Slice of an axis of negative size, onnx ends the
    # process; for an Expand before opset EXPAND_BOUNDED_SINCE, onnx can make 10^9 dimensions.
    if op_of(node) == "Slice" or (op_of(node) == "Expand" and shapes.graph.opset < EXPAND_BOUNDED_SINCE):
        raise CannotInfer
    proto = export_node(node)
    inputs = [tensor for tensor in node.inputs if tensor.name]
    names: dict[str, Size] = {str(size): size for tensor in inputs for size in shapes.shape(tensor) or ()}
    types = {tensor.name: _type_proto(shapes.dtype(tensor), shapes.shape(tensor)) for tensor in inputs}
    data = {tensor.name: value for tensor in inputs if (value := _tensor_proto(shapes, tensor)) is not None}
    imports = [onnx.helper.make_opsetid("", shapes.graph.opset)]
    try:
        outputs = onnx.shape_inference.infer_node_outputs(found, proto, types, data, opset_imports=imports)
    except ONNX_FAILURES:
        raise CannotInfer from None
    return [_shape(outputs.get(tensor.name), names) for tensor in node.outputs]


def _tensor_proto(shapes: ShapeInfo, tensor: Tensor) -> TensorProto | None:
    """Return the value of a tensor as a TensorProto; None unless it is known and has no symbols."""
    value = shapes.value(tensor)
    if value is None or any(isinstance(size, Dim) for size in value.reshape(-1)):
        return None
    return onnx.helper.make_tensor(tensor.name, shapes.dtype(tensor), value.shape, value.reshape(-1).tolist())


def _type_proto(dtype: int, shape: Shape | None) -> onnx.TypeProto:
    sizes = None if shape is None else [size if isinstance(size, int) else str(size) for size in shape]
    return onnx.helper.make_tensor_type_proto(dtype, sizes)


def _shape(found: onnx.TypeProto | None, names: dict[str, Size]) -> PartialShape | None:
    if found is None or not found.tensor_type.HasField("shape"):
        return None
    dims = found.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else names.get(dim.dim_param) for dim in dims)
