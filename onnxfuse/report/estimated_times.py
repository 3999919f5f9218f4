"""Estimate the times of nodes on a GPU where none was there to measure them, by a roofline model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from onnx import TensorProto

from onnxfuse.passes.folded import Folded
from onnxfuse.report.fates import find_fates
from onnxfuse.report.outline import Rewritten
from onnxfuse.report.times import NodeTime, Times
from onnxfuse.report.traffic import Traffic
from onnxfuse.rewrite.replace import Fused

# Measured on an H200 as `onnxfuse bench` measures rates, 2026-11-30; the launch is an Add's in a CUDA graph, in
# benchmarks/results/node_cost-h200-2026-11-29.json.
DEVICE: Final = "NVIDIA H200"
COPY_RATE: Final = 4.0e12  # bytes a second, read and written
# FLOP/s of a product of large matrices; float in TF32, 8 bits in benchmarks/results/float8-h200-2026-11-30.json, double
# in pages-h200-2026-11-30.json.
PRODUCT_RATES: Final = {
    "double": 56e12, "float": 396e12, "float16": 741e12, "bfloat16": 774e12,
    "int8": 1414e12, "uint8": 1414e12, "float8e4m3fn": 1372e12,
}  # fmt: skip
LAUNCH: Final = 1.06e-6  # seconds


def estimated_times(
    before: Traffic, after: Traffic, graph: Rewritten, fused: Sequence[Fused], folded: Iterable[Folded]
) -> Times | None:
    """Return estimates for the nodes of the main graph; None if it had fused nodes before, or none is known.

    A node takes as long as a launch, and its bytes at COPY_RATE or its operations at the rate of products of its first
    input's dtype, whichever take longer; without a rate, its bytes decide.  A fused node has the operations of the
    nodes that it stands for.
    """
    if any(node.is_fused for node in graph.before.nodes) or not (before.rows and after.rows):
        return None
    old, new = {one.node: one for one in before.nodes}, {one.node: one for one in after.nodes}
    fates = find_fates(graph, [one for one in fused if one.where == graph.where], folded)
    flops = dict.fromkeys(range(len(graph.after.nodes)), 0)
    for node, by in zip(graph.before.nodes, fates.stands_for, strict=True):
        if by is not None and node.label in old:
            flops[by] += old[node.label].flops

    def time_of(name: str, op: str, moved: int, count: int, number: int) -> NodeTime:
        dtype = TensorProto.DataType.Name(number).lower()
        least = max(moved / COPY_RATE, count / PRODUCT_RATES.get(dtype, math.inf))
        return NodeTime(name, op, "estimate", LAUNCH + least, moved, count, least / (LAUNCH + least))

    earlier = [(node, one, one.flops) for node in graph.before.nodes if (one := old.get(node.label))]
    later = [(node, one, flops[i]) for i, node in enumerate(graph.after.nodes) if (one := new.get(node.label))]
    sides = [
        tuple(time_of(node.label, node.op, one.bytes, count, one.dtype) for node, one, count in side)
        for side in (earlier, later)
    ]
    dtypes = {TensorProto.DataType.Name(one.dtype).lower() for _, one, count in later if count}
    rates = {dtype: PRODUCT_RATES[dtype] for dtype in dtypes & PRODUCT_RATES.keys()}
    sizes = {name: str(size) for name, size in before.assumed.items()}
    return Times(DEVICE, sizes, sides[0], sides[1], COPY_RATE, dict(sorted(rates.items())), LAUNCH)
