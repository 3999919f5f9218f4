"""Evaluate the nodes that a part replaced with the rounding of each result, which is no fault of the part.

In half precision, onnxruntime does not round between most operators on the CPU; other providers do, and so does a
Transpose between them.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from onnxfuse.verify.widen import model_to_float32


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
