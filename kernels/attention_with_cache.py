"""Attention over a growing cache on the GPU: pasts read and presents written in one launch, or copied in one before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from onnxfuse.kernels import _attention_decode, attention
from onnxfuse.kernels._attention import Attention
from onnxfuse.kernels._attention_cache import Cache, append
from onnxfuse.kernels._gemm import Candidate
from onnxfuse.kernels._types import refuse_choice, required
from onnxfuse.provider.plan import Apart, Device, FusedNode, Plan, Pointer, TensorSpec

ROWS: Final = {"bhsd": 2, "bshd": 1}  # the axis on which a cache grows
PAIRS: Final = (("past_key", "k"), ("past_value", "v"))


def supports(node: FusedNode, input_dtypes: Sequence[str], device: Device) -> str | None:
    """Why this node has no kernel on this device; None where it has one."""
    if len(node.output_dtypes) != 1 + len(PAIRS):
        return f"{node.fusion}: it has {len(node.output_dtypes)} outputs; the kernels write the result and both caches"
    choices = {"cache_layout": tuple(ROWS), "k_layout": attention.LAYOUTS, "v_layout": attention.LAYOUTS}
    for choice, known in choices.items():
        if why := refuse_choice(node, choice, known, known[0]):
            return why
    dtypes = dict(zip(node.operands, input_dtypes, strict=True))
    for (past, new), present in zip(PAIRS, node.output_dtypes[1:], strict=True):
        if not dtypes.get(past) == dtypes.get(new) == present:
            found = f"{past} is {dtypes.get(past)}, {new} {dtypes.get(new)}, and both together {present}"
            return f"{node.fusion}: {found}; required one dtype"
    return attention.supports(_over(node, ("past_key", "past_value")), input_dtypes, device)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The ways to run it, what is expected to be fastest first.  Raises ValueError where shapes do not fit."""
    problem, cache, outputs = cached_attention(node, inputs, device)
    grow = (append(problem, cache, device),) if problem.batch and cache.rows else ()
    apart = _apart(node, cache)
    if 0 in outputs[0].shape:
        return [Plan(outputs, grow, apart=apart)]
    # The launch writes the keys that it reads: all of them, where a diagonal adds to scores and does not replace them.
    at_once = (problem.causal is None or problem.added) and problem.keys == cache.rows
    found = _attention_decode.plans(problem, device, cache)[: attention.MOST - 1] if at_once else []
    for way in attention.ways(problem, device):
        found.append(Candidate(f"attention_append, {way.name}", (*grow, *way.steps), way.scratch))
    if not found:
        sizes = f"heads of {problem.size} and {problem.value_size} elements"
        raise ValueError(f"{node.fusion} '{node.name}': {sizes} do not fit into the shared memory of {device.name}")
    return [Plan(outputs, way.steps, way.scratch, apart) for way in found[: attention.MOST]]


def plan(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> Plan:
    """How it runs for these shapes where nothing was measured.  Raises ValueError where shapes do not fit."""
    return candidates(node, inputs, device)[0]


def cached_attention(
    node: FusedNode, inputs: Sequence[TensorSpec], device: Device
) -> tuple[Attention, Cache, tuple[TensorSpec, ...]]:
    """(attention over the present caches, how they come about, the outputs).  Raises ValueError."""
    pasts = [required(node, inputs, name) for name, _ in PAIRS]
    caches = {"k_layout": _layout(node), "v_layout": _layout(node)}
    new, _ = attention.attention_of(_over(node, ("k", "v")), inputs, device)
    old, _ = attention.attention_of(_over(node, ("past_key", "past_value"), caches), inputs, device)
    sizes = [(each.batch, each.kv_heads, each.size, each.value_size) for each in (old, new)]
    if sizes[0] != sizes[1]:
        found = f"past caches {[list(past.shape) for past in pasts]}; required {new.kv_heads} heads of {new.size} and"
        raise ValueError(f"{node.fusion} '{node.name}': {found} {new.value_size} elements in batches of {new.batch}")
    presents = [_grown(past, ROWS[_layout(node)], new.keys) for past in pasts]
    grown = list(inputs)
    for (_, name), present in zip(PAIRS, presents, strict=True):
        grown[node.operands.index(name)] = present
    problem, y = attention.attention_of(_over(node, ("k", "v"), caches, masks=True), grown, device)
    k, v = (replace(each, pointer=Pointer("output", i)) for i, each in enumerate((problem.k, problem.v), 1))
    same = problem.batch == 1 and (problem.kv_heads == 1 or _layout(node) == "bshd")
    cache = Cache(old.k, old.v, new.k, new.v, old.keys, old.keys + new.keys, same)
    return replace(problem, k=k, v=v, aligned=all(each.aligned for each in inputs)), cache, (y, *presents)


def _over(
    node: FusedNode, caches: tuple[str, str], layouts: Mapping[str, str] | None = None, masks: bool = False
) -> FusedNode:
    """The node as attention over other keys and values, whose operands have these names."""
    names = dict(zip(caches, "kv", strict=True)) | {"q": "q"} | ({"mask": "mask", "bias": "bias"} if masks else {})
    operands = tuple(names.get(name, f"other {name}") for name in node.operands)
    attributes = {**node.attributes, **(layouts or {})}
    return replace(node, operands=operands, attributes=attributes, output_dtypes=node.output_dtypes[:1])


def _apart(node: FusedNode, cache: Cache) -> tuple[Apart, ...]:
    """A past and its present may be one memory where rows keep their place; nothing else that is read is written."""
    places = list(enumerate(name for name, _ in PAIRS))
    return tuple(
        Apart(node.operands.index(past), 1 + present, together=cache.same and own == present)
        for own, past in places
        for present, _ in places
    )


def _layout(node: FusedNode) -> str:
    return str(node.attributes.get("cache_layout", "bhsd"))


def _grown(past: TensorSpec, axis: int, rows: int) -> TensorSpec:
    shape = (*past.shape[:axis], past.shape[axis] + rows, *past.shape[axis + 1 :])
    return replace(past, shape=shape)
