"""The plans of pools of channels-last tensors: over windows, and over all pixels of an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels.image_quantizers import unsupported_dtypes
from onnxfuse.kernels.pooling.global_pools import global_plans
from onnxfuse.kernels.pooling.tiles import window_plans
from onnxfuse.kernels.pooling.windows import unsupported_window
from onnxfuse.kernels.tensors import INTEGERS, STORAGE, unsupported_choice
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec

GLOBAL: Final = ("global_average_pool", "global_max_pool")


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    supported = (*STORAGE, *(INTEGERS if node.fusion == "max_pool" else ()))
    refusal = unsupported_dtypes(node, input_dtypes, supported)
    refusal = refusal or unsupported_choice(node, "layout", ("nhwc",), "nchw")
    if refusal is None and node.fusion not in GLOBAL:
        refusal = unsupported_window(node)
    return refusal


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if node.fusion in GLOBAL:
        return global_plans(node, inputs, device)
    return window_plans(node, inputs, device)
