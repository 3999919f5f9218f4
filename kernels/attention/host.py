"""The plans of attention: of q, k and v as they are, over a cache that grows, and after rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.kernels.attention.implementations import implementations
from onnxfuse.kernels.attention.mma import MAX_HEAD_DIM
from onnxfuse.kernels.attention.operands import attention_of, unsupported
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.attention.with_cache import unsupported_cache, with_cache_candidates
from onnxfuse.kernels.attention.with_rotary_embedding import rotary_candidates, unsupported_rotary
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    if node.fusion == "attention_with_cache":
        return unsupported_cache(node, input_dtypes)
    if node.fusion == "attention_with_rotary_embedding":
        return unsupported_rotary(node, input_dtypes) or unsupported(node, input_dtypes)
    return unsupported(node, input_dtypes)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if node.fusion == "attention_with_cache":
        return with_cache_candidates(node, inputs, device)
    problem, out = attention_of(node, inputs, device)
    if 0 in out.shape:
        return [Plan((out,), ())]
    if node.fusion == "attention_with_rotary_embedding" and problem.keys:
        found = rotary_candidates(node, inputs, problem, out, device)
    else:
        found = [Plan((out,), each.steps, each.scratch) for each in implementations(problem, device)]
    if not found:
        raise ValueError(_no_kernel(node, problem, device))
    return found


def _no_kernel(node: FusedNode, problem: Attention, device: Device) -> str:
    return (
        f"attention '{node.name}': heads of {problem.head_dim} and {problem.head_dim_v} elements of {problem.dtype}; "
        f"the kernels take 1 to {MAX_HEAD_DIM}, as far as the shared memory of {device.name} goes"
    )
