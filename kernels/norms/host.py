"""The plans of norms and softmax; each fusion has a .cu file of its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.kernels import epilogue_node
from onnxfuse.kernels.epilogue_node import Joined, also_joined, is_joined
from onnxfuse.kernels.norms.group_norm import group_norm_plan
from onnxfuse.kernels.norms.group_norm_nhwc import group_norm_nhwc_plans
from onnxfuse.kernels.norms.norm import norm_candidates
from onnxfuse.kernels.norms.softmax import softmax_plan
from onnxfuse.kernels.tensors import unsupported_choice, unsupported_dtype
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.symint import for_later_plans

GROUP_NORM_ACTIVATIONS: Final = ("none", "silu")
GROUP_NORM_LAYOUTS: Final = ("nchw", "nhwc")


@also_joined
def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    refusal = unsupported_dtype(node, input_dtypes)
    if refusal is None and node.fusion == "group_norm":
        refusal = unsupported_choice(node, "activation", GROUP_NORM_ACTIVATIONS, "none") or unsupported_choice(
            node, "layout", GROUP_NORM_LAYOUTS, "nchw"
        )
    return refusal


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if not is_joined(node):
        return _plans(node, inputs, device)
    both = epilogue_node.joined(node)
    found = _plans(both.product, inputs, device, both)
    with for_later_plans(*(inputs[0].shape if found else ())):
        return [*found, *epilogue_node.in_two_steps(both, inputs, device, candidates)]


def _plans(node: FusedNode, inputs: Sequence[TensorSpec], device: Device, both: Joined | None = None) -> list[Plan]:
    """Return the plans of a node; with `both`, their kernels also run the operators that were fused into the node."""
    if node.fusion == "softmax":
        return [softmax_plan(node, inputs, device)]
    if node.fusion != "group_norm":
        return norm_candidates(node, inputs, device, both)
    if node.text("layout", "nchw") == "nhwc":
        return group_norm_nhwc_plans(node, inputs, device, both)
    plan = group_norm_plan(node, inputs, device, both)
    return [] if plan is None else [plan]
