"""Evaluate the nodes that a part replaced with their own roundings, and without, which are no fault of the part.

onnxruntime's kernel of a float32 Sigmoid has an error of 1e-7, so that sigmoid(-16) may be half or twice what it is,
and another one where the element lies elsewhere in memory.  In half precision, onnxruntime does not round between most
operators on the CPU; other providers do, and so does a Transpose between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import onnx
import onnx.numpy_helper
from onnx import TensorProto

from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.protos import replace_tensors
from onnxfuse.verify.to_float32 import model_to_float32

DTYPE_ATTRIBUTES: Final = ("to", "dtype")


def model_that_rounds(model: onnx.ModelProto, tensors: Mapping[str, int]) -> onnx.ModelProto:
    """Return a model of half precision in float32, which rounds the tensors that nodes compute to their dtypes.

    `tensors` are those in half precision, each with its onnx.TensorProto.DataType.
    """
    result = model_to_float32(model)
    present = list(result.graph.node)
    del result.graph.node[:]
    for node in present:
        made = [name for name in node.output if name in tensors]
        node.output[:] = [f"{name}::exact" if name in made else name for name in node.output]
        result.graph.node.append(node)
        for name in made:
            cast = onnx.helper.make_node("Cast", [f"{name}::exact"], [f"{name}::half"], to=tensors[name])
            back = onnx.helper.make_node("Cast", [f"{name}::half"], [name], to=TensorProto.FLOAT)
            result.graph.node.extend([cast, back])
    return result


def model_in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without functions and subgraphs that computes in float64 wherever the model does in float32."""
    result = replace_tensors(model, _wide_tensor)
    for value in (*result.graph.input, *result.graph.output, *result.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for attribute in (each for node in result.graph.node for each in node.attribute):
        if attribute.HasField("t"):
            attribute.t.CopyFrom(_wide_tensor(attribute.t))
        if attribute.name in DTYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.DOUBLE
    return result


def _wide_tensor(tensor: TensorProto) -> TensorProto:
    if tensor.data_type != TensorProto.FLOAT:
        return tensor
    return onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor).astype(np.float64), tensor.name)


def wide_arrays(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays, with those of float32 in float64."""
    return {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in arrays.items()}
