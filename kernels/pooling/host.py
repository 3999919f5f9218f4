"""The plans of max_pool, average_pool and global_average_pool of channels-last tensors."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels.pooling.global_mean import global_mean_plans
from onnxfuse.kernels.pooling.tiles import window_plans
from onnxfuse.kernels.pooling.windows import unsupported_window
from onnxfuse.kernels.tensors import unsupported_choice, unsupported_dtype
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    refusal = unsupported_dtype(node, input_dtypes) or unsupported_choice(node, "layout", ("nhwc",), "nchw")
    if refusal is None and len({*input_dtypes, *node.output_dtypes}) > 1:
        refusal = f"{node.fusion}: x is {input_dtypes[0]} and y is {node.output_dtypes[0]}; the kernel takes one dtype"
    if refusal is None and node.fusion != "global_average_pool":
        refusal = unsupported_window(node)
    return refusal


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if node.fusion == "global_average_pool":
        return global_mean_plans(node, inputs, device)
    return window_plans(node, inputs, device)
