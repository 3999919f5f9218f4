"""Attention over a growing cache of keys and values.

Either one launch computes the attention and writes the present caches, or a first launch writes the caches and the
attention follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, cast

from onnxfuse.kernels.attention import decode
from onnxfuse.kernels.attention.cache import Cache, append
from onnxfuse.kernels.attention.implementations import MAX_IMPLEMENTATIONS, implementations
from onnxfuse.kernels.attention.operands import LAYOUTS, attention_of, operands_of, unsupported
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.epilogue_node import moved
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ITEM_BYTES, element_count, required_spec, unsupported_choice
from onnxfuse.runtime.plan import Device, FusedNode, NoAlias, Plan, Pointer, TensorSpec
from onnxfuse.runtime.symint import expect_equal, for_later_plans, is_symbolic, maximum

ROW_AXIS: Final = {"bhsd": 2, "bshd": 1}  # axis along which a cache grows, by layout
PASTS: Final = (("past_key", "k"), ("past_value", "v"))  # (operand of a past cache, operand with its new rows)
SCORE_OPERANDS: Final = ("mask", "bias", "slopes", "positions", "sinks")


def unsupported_cache(node: FusedNode, input_dtypes: Sequence[str]) -> str | None:
    """Return why no kernel computes attention over the node's caches; None if one does."""
    choices = {"cache_layout": tuple(ROW_AXIS), "k_layout": LAYOUTS, "v_layout": LAYOUTS}
    for choice, known in choices.items():
        if why := unsupported_choice(node, choice, known, known[0]):
            return why
    dtypes = dict(zip(node.operands, input_dtypes, strict=True))
    for (past, new), present in itertools.zip_longest(PASTS, node.output_dtypes[1:]):
        present = present or dtypes.get(past)
        if not dtypes.get(past) == dtypes.get(new) == present:
            found = f"{past} is {dtypes.get(past)}, {new} is {dtypes.get(new)} and the present cache is {present}"
            return f"{node.fusion}: {found}; required one dtype"
    return unsupported(_attention_over(node, ("past_key", "past_value")), input_dtypes)


def with_cache_candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for these shapes, the expected fastest first.  Raises ValueError if shapes do not fit."""
    problem, cache, outputs = cached_attention(node, inputs, device)
    copy = (append(problem, cache, device),) if problem.batch and cache.rows else ()
    no_alias = _no_alias(node, cache)
    if 0 in outputs[0].shape:
        return [of_outputs(node, Plan(outputs, copy, no_alias=no_alias))]
    # A single launch writes only the keys that it reads, so it must read all keys. Under a causal mask it reads all
    # keys only with add_masked_score.
    reads_all_keys = (problem.causal is None or problem.add_masked_score) and problem.keys == cache.rows
    found = decode.implementations(problem, device, cache)[: MAX_IMPLEMENTATIONS - 1] if reads_all_keys else []
    with for_later_plans(*problem.sizes) if found else nullcontext():
        for each in implementations(problem, device):
            found.append(Implementation(f"attention_append, {each.name}", (*copy, *each.steps), each.scratch))
    if not found:
        sizes = f"heads of {problem.head_dim} and {problem.head_dim_v} elements"
        raise ValueError(f"{node.label}: {sizes} do not fit into the shared memory of {device.name}")
    plans = (Plan(outputs, each.steps, each.scratch, no_alias) for each in found[:MAX_IMPLEMENTATIONS])
    return [of_outputs(node, each) for each in plans]


def of_outputs(node: FusedNode, plan: Plan) -> Plan:
    """Return the plan with present caches moved to scratch memory if the node does not output them."""
    count, before = len(node.output_dtypes), len(plan.scratch)
    if count == len(plan.outputs):
        return plan

    def to(pointer: Pointer) -> Pointer:
        is_present = pointer.kind == "output" and pointer.index >= count
        return replace(pointer, kind="scratch", index=before + pointer.index - count) if is_present else pointer

    sizes = tuple(element_count(each) * ITEM_BYTES[each.dtype] for each in plan.outputs[count:])
    no_alias = tuple(each for each in plan.no_alias if each.output < count)
    return Plan(plan.outputs[:count], tuple(moved(each, to) for each in plan.steps), (*plan.scratch, *sizes), no_alias)


def cached_attention(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device
) -> tuple[Attention, Cache, tuple[TensorSpec, ...]]:
    """Return (attention over the present caches, the Cache that describes how to fill them, the output specs).

    Raises ValueError if shapes do not fit.
    """
    pasts = [required_spec(node, inputs, name) for name, _ in PASTS]
    caches = {"k_layout": _cache_layout(node), "v_layout": _cache_layout(node)}
    (q, *new), (_, *old) = (
        operands_of(_attention_over(node, ("k", "v")), inputs),
        operands_of(_attention_over(node, ("past_key", "past_value"), caches), inputs),
    )
    sizes = [[(each.heads, each.head_dim) for each in tensors] for tensors in (old, new)]
    if not expect_equal(old[0].batch, q.batch) or sizes[0] != sizes[1]:
        found = f"past caches {[list(past.shape) for past in pasts]}"
        required = f"{new[0].heads} heads of {new[0].head_dim} and {new[1].head_dim} elements in batches of {q.batch}"
        raise ValueError(f"{node.label}: {found}; required {required}")
    presents = [_present(past, ROW_AXIS[_cache_layout(node)], new[0].length) for past in pasts]
    grown = list(inputs)
    for (_, name), present in zip(PASTS, presents, strict=True):
        grown[node.operands.index(name)] = present
    problem, y = attention_of(_attention_over(node, ("k", "v"), caches, masks=True), grown, device)
    k, v = (replace(each, pointer=Pointer("output", i)) for i, each in enumerate((problem.k, problem.v), 1))
    # For a dynamic batch this is an expression with value 1 or 0, which adds no guard (a condition on the sizes) to the
    # plan; a batch of 0 counts as 1.
    one_batch = cast(bool, 1 // maximum(problem.batch, 1)) if is_symbolic(problem.batch) else problem.batch <= 1
    same_offsets = one_batch if problem.kv_heads == 1 or _cache_layout(node) == "bshd" else False
    item = ITEM_BYTES[problem.dtype]
    tensors = zip(("past_key", "past_value", "k", "v"), (*old, *new), strict=True)
    heads = [each.at(Pointer("input", node.operands.index(name)), item) for name, each in tensors]
    past_rows = old[0].length
    cache = Cache(heads[0], heads[1], heads[2], heads[3], past_rows, past_rows + new[0].length, same_offsets)
    return replace(problem, k=k, v=v, aligned=all(each.aligned for each in inputs)), cache, (y, *presents)


def _attention_over(
    node: FusedNode, caches: tuple[str, str], layouts: Mapping[str, str] | None = None, masks: bool = False
) -> FusedNode:
    """Return the node as plain attention; its keys and values are the operands named in `caches`."""
    kept = ("q", *(SCORE_OPERANDS if masks else ()))
    names = {**dict(zip(caches, "kv", strict=True)), **{name: name for name in kept}}
    operands = tuple(names.get(name, f"other {name}") for name in node.operands)
    attributes = {**node.attributes, **(layouts or {})}
    return replace(node, operands=operands, attributes=attributes, output_dtypes=node.output_dtypes[:1])


def _no_alias(node: FusedNode, cache: Cache) -> tuple[NoAlias, ...]:
    """Return the constraints that no past cache overlaps a present cache.

    A past cache is allowed to have the address of its own present cache if rows have the same offsets in both.
    """
    pasts = list(enumerate(name for name, _ in PASTS))
    return tuple(
        NoAlias(node.operands.index(past), 1 + present, same_start=cache.same_offsets if own == present else False)
        for own, past in pasts
        for present, _ in pasts
    )


def _cache_layout(node: FusedNode) -> str:
    return node.text("cache_layout", "bhsd")


def _present(past: TensorSpec, axis: int, rows: int) -> TensorSpec:
    shape = (*past.shape[:axis], past.shape[axis] + rows, *past.shape[axis + 1 :])
    return replace(past, shape=shape)
