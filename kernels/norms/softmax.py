"""The plan of softmax over the last axis: softmax.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxfuse.kernels.norms.any_length import short_rows
from onnxfuse.kernels.norms.rows import row_launch, row_tiling, streamed_rows
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    operand_pointer,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec
from onnxfuse.runtime.symint import is_symbolic


def softmax_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan of softmax for an input of this shape and dtype."""
    x = required_spec(node, inputs, "x")
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    length, rows = x.shape[-1], math.prod(x.shape[:-1])
    if rows * length == 0:
        return Plan((y,), ())
    item_bytes, width = [ITEM_BYTES[x.dtype]], vector_width([x, y], length)
    if is_symbolic(length):
        tiling = short_rows(length, width, device, item_bytes)
    else:
        tiling = row_tiling(rows, length, width, device, item_bytes)
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "Y_T": STORAGE[y.dtype], "ROW": length,
        "STREAMED": streamed_rows([x, y], length, tiling.width), "WEIGHTS_CONSTANT": 1,
        "PRECISE": int(y.dtype == "float32"),
    }  # fmt: skip
    arguments = [operand_pointer(node, "x"), Pointer("output", 0), Scalar(length, "int32"), Scalar(rows, "int64")]
    return Plan((y,), (row_launch("softmax", tiling, rows, defines, arguments, item_bytes, device),))
