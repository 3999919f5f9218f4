"""The plan of softmax over the last axis: softmax.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnxfuse.kernels.norms.rows import row_launch, row_tiling
from onnxfuse.kernels.tensors import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    is_streamed,
    operand_pointer,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec


def softmax_plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """Return the plan for these shapes."""
    x = required_spec(node, inputs, "x")
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    length, rows = x.shape[-1], math.prod(x.shape[:-1])
    if rows * length == 0:
        return Plan((y,), ())
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "Y_T": STORAGE[y.dtype], "ROW": length, "STREAMED": is_streamed([x, y]),
        "WEIGHTS_CONSTANT": 1,
    }  # fmt: skip
    arguments = [operand_pointer(node, "x"), Pointer("output", 0), Scalar(rows, "int64")]
    item_bytes = [ITEM_BYTES[x.dtype]]
    tiling = row_tiling(rows, length, vector_width([x, y], length), device, item_bytes)
    return Plan((y,), (row_launch("softmax", tiling, rows, defines, arguments, item_bytes, device),))
