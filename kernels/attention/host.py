"""The plans of attention nodes: plain attention, attention over a growing cache, and attention after rotary embedding.

A node without a cache can include the elementwise operators that follow the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnxfuse.kernels import epilogue_node
from onnxfuse.kernels.attention.disentangled import unsupported_disentangled, with_positions
from onnxfuse.kernels.attention.group_query import group_query_candidates, unsupported_group_query
from onnxfuse.kernels.attention.implementations import implementations
from onnxfuse.kernels.attention.mma import MAX_HEAD_DIM
from onnxfuse.kernels.attention.operands import attention_of, unsupported
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.attention.with_cache import unsupported_cache, with_cache_candidates
from onnxfuse.kernels.attention.with_rotary_embedding import rotary_candidates, unsupported_rotary
from onnxfuse.kernels.epilogue_node import Joined, also_joined, is_joined
from onnxfuse.kernels.epilogue_program import EpilogueProgram, epilogue_program
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.symint import for_later_plans


@also_joined
def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel runs this node on this device; None if one does."""
    if node.fusion == "attention_with_cache":
        return unsupported_cache(node, input_dtypes)
    if node.fusion == "group_query_attention":
        return unsupported_group_query(node, input_dtypes)
    if node.fusion == "disentangled_attention":
        return unsupported_disentangled(node, input_dtypes)
    if node.fusion == "attention_with_rotary_embedding":
        return unsupported_rotary(node, input_dtypes) or unsupported(node, input_dtypes)
    return unsupported(node, input_dtypes)


def lengths(node: FusedNode, outputs: Sequence[TensorSpec]) -> dict[str, int]:
    """Return the largest values of operands that hold lengths, by name; `outputs` are the outputs of a plan."""
    if node.fusion != "group_query_attention":
        return {}
    rows = outputs[1].shape[2]  # the rows of a present cache
    return {"seqlens_k": max(0, rows - 1)}


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    if is_joined(node):
        return _joined_candidates(epilogue_node.joined(node), inputs, device)
    if node.fusion == "attention_with_cache":
        return with_cache_candidates(node, inputs, device)
    if node.fusion == "group_query_attention":
        return group_query_candidates(node, inputs, device)
    problem, out = attention_of(node, inputs, device)
    if 0 in out.shape:
        return [Plan((out,), ())]
    found = _plans(node, inputs, problem, out, device)
    if not found:
        raise ValueError(_no_kernel(node, problem, device))
    return found


def _plans(
    node: FusedNode, inputs: Sequence[TensorSpec], problem: Attention, out: TensorSpec, device: Device
) -> list[Plan]:
    if node.fusion == "disentangled_attention":
        problem = with_positions(node, inputs, problem)
    if node.fusion == "attention_with_rotary_embedding" and problem.keys:
        return rotary_candidates(node, inputs, problem, out, device)
    return [Plan((out,), each.steps, each.scratch) for each in implementations(problem, device)]


def _joined_candidates(both: Joined, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans of an attention with fused operators, which run in the attention's kernel or a second launch.

    The kernels store an output that has q's dtype. If there is none, the program stores all outputs.
    """
    problem, out = attention_of(both.product, inputs[: both.own], device)
    strides = problem.out.batch_stride, problem.out.head_stride, problem.out.row_stride
    made = epilogue_program(both, replace(out, dtype=problem.dtype), inputs, False, strides=strides)
    if made is None:
        return epilogue_node.in_two_steps(both, inputs, device, candidates)
    if 0 in out.shape:
        return [Plan(made[1], ())]
    found = _with_program(both, inputs, problem, made, device)
    with for_later_plans(*problem.sizes):
        return [*found, *epilogue_node.in_two_steps(both, inputs, device, candidates)]


def _with_program(
    both: Joined,
    inputs: Sequence[TensorSpec],
    problem: Attention,
    made: tuple[EpilogueProgram, tuple[TensorSpec, ...]],
    device: Device,
) -> list[Plan]:
    """Return the plans whose kernels contain the operators that follow the attention."""
    program, outputs = made
    problem = replace(
        problem,
        aligned=all(each.aligned for each in inputs),
        out=replace(problem.out, pointer=program.y),
        out_dtype="",
        program=program,
    )
    found = _plans(both.product, inputs[: both.own], problem, outputs[0], device)
    if not found:
        raise ValueError(_no_kernel(both.product, problem, device))
    return [replace(each, outputs=outputs) for each in found]


def _no_kernel(node: FusedNode, problem: Attention, device: Device) -> str:
    return (
        f"attention '{node.name}': heads of {problem.head_dim} and {problem.head_dim_v} elements of {problem.dtype}; "
        f"the kernels take 1 to {MAX_HEAD_DIM}, as far as the shared memory of {device.name} goes"
    )
