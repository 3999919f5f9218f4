"""Explain why a fusion that `--only` names matches nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import onnx

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import smallest
from onnxfuse.layout.assign import LayoutResult
from onnxfuse.layout.fusions import CONVOLUTION, LayoutFusion
from onnxfuse.match import Miss
from onnxfuse.rewrite.replace import REGION

MAX_NAMED = 5  # maximum number of operators that a sentence names


def why_unmatched(fusions: Iterable[Fusion], missed: Iterable[Miss], present: Set[str]) -> dict[str, str]:
    """Return for each fusion, by its name, why it matches nothing in a model with the operators `present`."""
    nearest: dict[str, Miss] = {}
    for miss in missed:
        nearest[miss.fusion.name] = max(nearest.get(miss.fusion.name, miss), miss, key=lambda one: one.matched)
    return {fusion.name: _why(fusion, nearest.get(fusion.name), present) for fusion in fusions}


def why_no_region() -> str:
    """Return a sentence for a run in which `--only region` made no region."""
    return f"no two operators side by side are worth a kernel; `onnxfuse explain MODEL {REGION}` says why for each"


def why_no_scan(reasons: Mapping[str, str]) -> str:
    """Return a sentence for a run in which `--only scan` made no scan; `reasons` has a sentence for each candidate."""
    first = next((f"'{node}' does not become a scan: {reason}" for node, reason in reasons.items()), None)
    return first or "the model has no Loop, no Scan and no unrolled steps of a recurrence"


def why_not_made(fusion: LayoutFusion, fusions: Iterable[Fusion], layout: LayoutResult, graph: onnx.GraphProto) -> str:
    """Return why the layout stage, which alone makes nodes of `fusion`, made no such node in this graph."""
    if not any(each.name == CONVOLUTION for each in fusions):
        return f"layouts make it around convolutions; name {CONVOLUTION}, too"
    nearest = next((one for one in (*layout.others, *layout.stays) if one.op in fusion.operators), None)
    if nearest is not None:
        return f"{nearest.op} '{nearest.node}' is channels-first: {nearest.reason}"
    if fusion.operators and not any(node.op_type in fusion.operators for node in graph.node):
        several = len(fusion.operators) > 1
        return f"it needs {'one of ' if several else ''}{', '.join(fusion.operators)}, and the model has none"
    return "no channels-last image is used like that"


def _why(fusion: Fusion, nearest: Miss | None, present: Set[str]) -> str:
    if nearest is not None and nearest.matched:
        agree = f"{nearest.matched} of {nearest.of} nodes agree"
        return f"it comes nearest at '{nearest.node}', where {agree}: {nearest.reason}"
    if lacking := [*filter(present.isdisjoint, fusion.outputs[0].needed_ops)]:
        needed = sorted(smallest(lacking))
        some = f"{', '.join(needed[:MAX_NAMED])}{' and others' if len(needed) > MAX_NAMED else ''}"
        return f"it needs {'one of ' if len(needed) > 1 else ''}{some}, and the model has none"
    return f"no node of the model is how it ends; `onnxfuse show {fusion.name}` prints its pattern"
