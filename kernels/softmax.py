"""Softmax over the last axis on the GPU: softmax.cu."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels._rows import row_launch, row_plan, tiling
from onnxfuse.kernels._types import (
    ITEM_BYTES,
    STORAGE,
    Defines,
    operand,
    product,
    refuse_dtypes,
    required,
    streamed,
    width,
)
from onnxfuse.provider.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return refuse_dtypes(node, input_dtypes)


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes."""
    x = required(node, inputs, "x")
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    length, rows = x.shape[-1], product(x.shape[:-1])
    if rows * length == 0:
        return Plan((y,), ())
    defines: Defines = {
        "X_T": STORAGE[x.dtype], "Y_T": STORAGE[y.dtype], "ROW": length, "STREAMED": streamed([x, y]),
        "WEIGHTS_CONSTANT": 1,
    }  # fmt: skip
    arguments = [operand(node, "x"), Pointer("output", 0), Scalar(rows, "int64")]
    item_bytes = [ITEM_BYTES[x.dtype]]
    tiles = tiling(rows, length, width([x, y], length), device, item_bytes)
    return row_plan([y], rows, length, row_launch("softmax", tiles, rows, defines, arguments, item_bytes, device))
