"""GroupNorm of channels-first tensors on the GPU: group_norm.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels._rows import row_launch, row_plan, tiling
from onnxfuse.kernels._types import (
    ITEM_BYTES,
    STORAGE,
    constant,
    operand,
    product,
    refuse_choice,
    refuse_dtypes,
    require_size,
    required,
    streamed,
    width,
)
from onnxfuse.provider.plan import Device, FusedNode, Plan, Pointer, Scalar, TensorSpec

ACTIVATIONS: Final = ("none", "silu")


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    return refuse_dtypes(node, input_dtypes) or refuse_choice(node, "activation", ACTIVATIONS, "none")


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes.  Raises ValueError where shapes do not fit together."""
    x, scale, bias = (required(node, inputs, name) for name in ("x", "scale", "bias"))
    batch, channels = x.shape[:2]
    groups, spatial = int(node.attributes["groups"]), product(x.shape[2:])
    if channels % groups:
        raise ValueError(f"group_norm: {channels} channels do not make {groups} groups")
    require_size(node, "scale", scale, channels)
    require_size(node, "bias", bias, channels)
    y = TensorSpec(x.shape, node.output_dtypes[0], x.aligned)
    rows, length = batch * groups, channels // groups * spatial
    if rows * length == 0:
        return Plan((y,), ())
    item_bytes = [ITEM_BYTES[x.dtype]]
    tiles = tiling(rows, length, width([x, y], spatial, weights=[scale, bias]), device, item_bytes)
    defines = {
        "X_T": STORAGE[x.dtype], "SCALE_T": STORAGE[scale.dtype], "BIAS_T": STORAGE[bias.dtype],
        "Y_T": STORAGE[y.dtype], "ROW": length, "STREAMED": streamed([x, y]), "GROUPS": groups, "SPATIAL": spatial,
        "CHANNELS": channels // groups, "WEIGHTS_CONSTANT": constant([scale, bias]),
        "ACTIVATION": node.attributes.get("activation", "none"), "PRECISE": 1,
    }  # fmt: skip
    epsilon = Scalar(float(node.attributes.get("epsilon", 1e-5)), "float32")
    pointers = [*(operand(node, name) for name in ("x", "scale", "bias")), Pointer("output", 0)]
    arguments = [*pointers, epsilon, Scalar(rows, "int64")]
    launch = row_launch("group_norm", tiles, rows, defines, arguments, item_bytes, device)
    return row_plan([y], rows, length, launch)
