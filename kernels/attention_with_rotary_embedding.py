"""Attention with rotary embedding on the GPU: queries and keys are turned in one launch, and attended to by the next.

A key is read by every tile of 64 to 192 queries, so that to turn it while it is loaded would repeat that work; written
once and read from L2 it costs as many bytes as it has. For 2048 queries of 32 heads and keys of 8, of 64 elements in
fp16, that is 21 MB in one launch instead of two, and with norms instead of four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from onnxfuse.kernels import attention
from onnxfuse.kernels._attention import Attention, Heads
from onnxfuse.kernels._gemm import Candidate
from onnxfuse.kernels._rotary import Rotary, Turned, launch
from onnxfuse.kernels._types import ABSENT, ITEM_BYTES, STORAGE, operand, required, spec
from onnxfuse.kernels.rotary_embedding import check
from onnxfuse.provider.plan import Argument, Device, FusedNode, Launch, Plan, Pointer, TensorMap, TensorSpec

TURNED: Final = ("q", "k")
LENGTH_AXIS: Final = {"packed": 1, "bshd": 1, "seq_first": 0, "bhsd": 2}


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    dtypes = dict(zip(node.operands, input_dtypes, strict=True))
    for name in ("cos", "sin", "q_scale", "k_scale"):
        if name in dtypes and dtypes[name] not in STORAGE:
            return f"{node.fusion}: {name} is {dtypes[name]}; the kernels take {', '.join(STORAGE)}"
    scales = [dtypes.get(f"{name}_scale") for name in TURNED]
    if scales[0] != scales[1]:
        return f"{node.fusion}: q_scale is {scales[0]}, k_scale is {scales[1]}; required one dtype"
    return attention.supports(node, input_dtypes, device)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit."""
    problem, out = attention.attention_of(node, inputs, device)
    if 0 in out.shape:
        return [Plan((out,), ())]
    if not problem.keys:
        return attention.candidates(node, inputs, device)
    places = _places(problem)
    first = launch(_rotary(node, inputs, problem, places), device)
    item = ITEM_BYTES[problem.dtype]
    scratch = tuple(problem.batch * heads.batch * item for heads in places)
    q, k = (replace(heads, pointer=Pointer("scratch", i - len(places))) for i, heads in enumerate(places))
    ready = replace(problem, q=q, k=k)
    found = [_behind(first, scratch, way, out) for way in attention.ways(ready, device)]
    return found or attention.candidates(node, inputs, device)  # which says why there is none


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes where nothing was measured.  Raises ValueError where shapes do not fit."""
    return candidates(node, inputs, device)[0]


def _places(problem: Attention) -> tuple[Heads, Heads]:
    """Where turned queries and as many keys lie in scratch memory: (batch, length, heads, size), as most come."""
    rows = problem.heads * problem.size, problem.kv_heads * problem.size
    q, k = (Heads(Pointer("scratch", i), problem.queries * row, problem.size, row) for i, row in enumerate(rows))
    return q, k


def _rotary(node: FusedNode, inputs: Sequence[TensorSpec], problem: Attention, places: tuple[Heads, Heads]) -> Rotary:
    cos, sin = required(node, inputs, "cos"), required(node, inputs, "sin")
    operator = node.attributes.get("rotary", "rotate_half") == "operator"
    rotated = cos.shape[-1] * (2 if operator else 1)
    check(cos, sin, problem.batch, problem.queries, problem.size, rotated, rotated // 2 if operator else rotated)
    keys = required(node, inputs, "k").shape[LENGTH_AXIS[node.attributes.get("k_layout", "packed")]]
    if keys != problem.queries:
        raise ValueError(f"{node.fusion}: {problem.queries} queries and {keys} keys; required as many")
    scales = [spec(node, inputs, f"{name}_scale") for name in TURNED]
    read = [required(node, inputs, name) for name in TURNED] + [cos, sin, *(scale for scale in scales if scale)]
    pairs = zip(TURNED, (problem.heads, problem.kv_heads), (problem.q, problem.k), places, strict=True)
    return Rotary(
        problem.batch, problem.queries, problem.size, rotated,
        tuple(Turned(count, x, y, _scale(node, name)) for name, count, x, y in pairs),
        operand(node, "cos"), operand(node, "sin"), cos, sin.dtype, problem.dtype, problem.dtype,
        all(tensor.aligned for tensor in read), whole_table=not operator,
        interleaved=operator and bool(node.attributes.get("interleaved", 0)),
        scale_dtype=scales[0].dtype if scales[0] else "", epsilon=float(node.attributes.get("epsilon", 0.0)),
    )  # fmt: skip


def _scale(node: FusedNode, name: str) -> Argument:
    return operand(node, f"{name}_scale") if f"{name}_scale" in node.operands else ABSENT


def _behind(first: Launch, scratch: tuple[int, ...], way: Candidate, out: TensorSpec) -> Plan:
    """The steps of a way after the first one, whose scratch memory comes before theirs."""

    def moved(argument: Argument) -> Argument:
        if isinstance(argument, TensorMap):
            return replace(argument, pointer=_shifted(argument.pointer, len(scratch)))
        return _shifted(argument, len(scratch)) if isinstance(argument, Pointer) else argument

    launches = [step for step in way.steps if isinstance(step, Launch)]
    steps = (replace(step, arguments=tuple(map(moved, step.arguments))) for step in launches)
    return Plan((out,), (first, *steps), (*scratch, *way.scratch))


def _shifted(pointer: Pointer, by: int) -> Pointer:
    return replace(pointer, index=pointer.index + by) if pointer.kind == "scratch" else pointer
