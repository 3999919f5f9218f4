"""Evaluate a half-precision model in float32, rounding each node's result to half precision.

onnxruntime's CPU provider does not round the results of most half-precision operators, unless a Transpose reads them;
other providers round each result.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import TensorProto

from onnxfuse.ir.dtypes import HALF_PRECISION
from onnxfuse.verify.widen import model_to_float32


def model_that_rounds(model: onnx.ModelProto, tensors: Mapping[str, int]) -> onnx.ModelProto:
    """Return a model in float32 that rounds the half-precision results of each node of the main graph.

    tensors  the onnx.TensorProto.DataType of each tensor of `model`, as far as it is known
    """
    result = model_to_float32(model)
    present = list(result.graph.node)
    del result.graph.node[:]
    for node in present:
        made = [] if node.op_type == "Cast" else [name for name in node.output if tensors.get(name) in HALF_PRECISION]
        node.output[:] = [f"{name}::exact" if name in made else name for name in node.output]
        result.graph.node.append(node)
        for name in made:
            cast = onnx.helper.make_node("Cast", [f"{name}::exact"], [f"{name}::half"], to=tensors[name])
            back = onnx.helper.make_node("Cast", [f"{name}::half"], [name], to=TensorProto.FLOAT)
            result.graph.node.extend([cast, back])
    return result
