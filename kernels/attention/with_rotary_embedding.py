"""Attention after rotary embedding: one launch rotates queries and keys before the attention kernel.

Each tile of 64 to 192 queries reads every key, so rotating keys on load would repeat that work for each tile. Instead,
keys are rotated once and read from L2. For 2048 positions, 32 query heads and 8 key heads of 64 elements in fp16, one
launch moves 21 MB; it replaces two launches, or four with norms. A query is read by one block only, so
attention_hopper.cu rotates queries itself; the launch then rotates only keys, 4 MB of the 21.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

from onnxfuse.kernels.attention.implementations import implementations
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.rotary.rotary import Rotary, RotatedHeads, launch
from onnxfuse.kernels.rotary.rotary_embedding import (
    fitting_tables,
    kept_rows,
    rotary_form,
    table_spec,
    unsupported_rows,
)
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, STORAGE, operand_pointer, operand_spec, required_spec
from onnxfuse.runtime.plan import (
    Argument,
    Device,
    FusedNode,
    Launch,
    Plan,
    Pointer,
    Struct,
    TensorMap,
    TensorSpec,
    Value,
)

ArgumentValue = TypeVar("ArgumentValue", Pointer, Value)
ROTATED: Final = ("q", "k")
LENGTH_AXIS: Final = {"packed": 1, "bshd": 1, "seq_first": 0, "bhsd": 2}


def unsupported_rotary(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel rotates the queries and keys of this node; None if one does."""
    if reason := unsupported_rows(node):
        return reason
    dtypes = dict(zip(node.operands, input_dtypes, strict=True))
    for name in ("cos", "sin", "q_scale", "k_scale"):
        if name in dtypes and dtypes[name] not in STORAGE:
            return f"{node.fusion}: {name} is {dtypes[name]}; the kernels take {', '.join(STORAGE)}"
    scales = [dtypes.get(f"{name}_scale") for name in ROTATED]
    if scales[0] != scales[1]:
        return f"{node.fusion}: q_scale is {scales[0]}, k_scale is {scales[1]}; required one dtype"
    return None


def rotary_candidates(
    node: FusedNode, inputs: Sequence[TensorSpec], problem: Attention, out: TensorSpec, device: Device
) -> list[Plan]:
    """Return the plans of a node with at least one key, the expected fastest first; none if no kernel takes the heads.

    Raises ValueError if the tables do not fit.
    """
    results = _rotated_tensors(problem)
    rotary = _rotary(node, inputs, problem, results)
    # The indices are negative because `_after` adds the number of results to the index of every scratch buffer.
    q, k = (replace(heads, pointer=Pointer("scratch", i - len(results))) for i, heads in enumerate(results))
    ways = implementations(replace(problem, q=q, k=k, rotation=rotary), device)
    return [_after(rotary if _reads(each, q.pointer) else _of_keys(rotary), each, out, device) for each in ways]


def _rotated_tensors(problem: Attention) -> tuple[HeadTensor, HeadTensor]:
    """Return scratch tensors for the rotated queries and keys, as (batch, length, heads, head_dim)."""
    rows = problem.heads * problem.head_dim, problem.kv_heads * problem.head_dim
    q, k = (
        HeadTensor(Pointer("scratch", i), problem.queries * row, problem.head_dim, row) for i, row in enumerate(rows)
    )
    return q, k


def _of_keys(rotary: Rotary) -> Rotary:
    """Return the rotation of only the keys, which writes them to the first scratch buffer."""
    keys = rotary.tensors[-1]
    return replace(rotary, tensors=(replace(keys, y=replace(keys.y, pointer=Pointer("scratch", 0))),))


def _reads(attention: Implementation, pointer: Pointer) -> bool:
    """Return whether any launch of `attention` has `pointer` among its arguments."""
    return any(pointer in step.values for step in attention.steps if isinstance(step, Launch))


def _rotary(
    node: FusedNode, inputs: Sequence[TensorSpec], problem: Attention, results: tuple[HeadTensor, HeadTensor]
) -> Rotary:
    cos, sin = table_spec(node, inputs, "cos"), table_spec(node, inputs, "sin")
    form = rotary_form(node, "rotary")
    rotated = cos.shape[-1] * (1 if form.whole_table else 2)
    kept = kept_rows(node)
    cos = fitting_tables(cos, sin, (problem.batch, 1, problem.queries - kept), problem.head_dim, rotated)
    keys = required_spec(node, inputs, "k").shape[LENGTH_AXIS[node.text("k_layout", "packed")]]
    if keys != problem.queries:
        raise ValueError(f"{node.fusion}: {problem.queries} queries and {keys} keys; required as many")
    scales = [operand_spec(node, inputs, f"{name}_scale") for name in ROTATED]
    read = [required_spec(node, inputs, name) for name in ROTATED] + [cos, sin, *(scale for scale in scales if scale)]
    tensors = zip(ROTATED, (problem.heads, problem.kv_heads), (problem.q, problem.k), results, strict=True)
    return Rotary(
        problem.batch, problem.queries, problem.head_dim, rotated,
        tuple(RotatedHeads(count, x, y, _scale(node, name)) for name, count, x, y in tensors),
        operand_pointer(node, "cos"), operand_pointer(node, "sin"), cos, sin.dtype, problem.dtype, problem.dtype,
        all(tensor.aligned for tensor in read), *form, kept=kept,
        scale_dtype=scales[0].dtype if scales[0] else "", epsilon=node.number("epsilon", 0.0),
    )  # fmt: skip


def _scale(node: FusedNode, name: str) -> Value:
    return operand_pointer(node, f"{name}_scale") if f"{name}_scale" in node.operands else ABSENT


def _after(rotary: Rotary, attention: Implementation, out: TensorSpec, device: Device) -> Plan:
    """Return the plan that rotates into the first scratch buffers and then runs the steps of `attention`."""
    results = [tensor.y for tensor in rotary.tensors]
    scratch = [rotary.batch * heads.batch_stride * ITEM_BYTES[rotary.y_dtype] for heads in results]

    def shifted(argument: Argument) -> Argument:
        if isinstance(argument, TensorMap):
            return replace(argument, pointer=_shifted(argument.pointer, len(results)))
        if isinstance(argument, Struct):
            return Struct(tuple(_shifted(field, len(results)) for field in argument.fields))
        return _shifted(argument, len(results))

    launches = [step for step in attention.steps if isinstance(step, Launch)]
    steps = (replace(step, arguments=tuple(map(shifted, step.arguments))) for step in launches)
    return Plan((out,), (launch(rotary, device), *steps), (*scratch, *attention.scratch))


def _shifted(value: ArgumentValue, by: int) -> ArgumentValue:
    """Return a scratch pointer with its index increased by `by`; any other argument unchanged."""
    if isinstance(value, Pointer) and value.kind == "scratch":
        return replace(value, index=value.index + by)
    return value
