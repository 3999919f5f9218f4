"""Find sizes of a model's dims for which a plan file has no plans.

A plan says which kernels compute a node, and how they are launched; a plan file has plans for ranges of sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from onnxfuse.algebra.size_parser import parse_size
from onnxfuse.algebra.sizes import evaluate, symbols
from onnxfuse.runtime.call_inputs import dim_names, inputs_of
from onnxfuse.runtime.expressions import Values
from onnxfuse.runtime.fused_calls import Call
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.plan_file import PlanFile, node_identity

OTHER_SIZES: Final = (1, 13, 128)  # sizes that are tried for dynamic dims to which no size is given


@dataclass(frozen=True)
class NoPlan:
    """A fused node without a plan at some size."""

    node: str
    device: Device
    size: int


def without_plans(
    calls: Sequence[Call], file: PlanFile, dims: Collection[str], wanted: Sequence[int]
) -> Iterator[NoPlan]:
    """Yield the nodes that lack a plan at one of the `wanted` sizes of `dims`, each with the first such size.

    dims    names of dims of the model's inputs that all get the wanted size; other dims get each of OTHER_SIZES

    Nodes whose operators the file does not name are left out, because onnxruntime runs their ONNX functions.
    """
    if not wanted:
        return
    operators = {line.split()[0] for line in file.operators}
    known: set[object] = set()
    for device in file.devices:
        for call in calls:
            inputs, node = inputs_of(call), node_identity(call.node)
            if call.op not in operators or inputs is None or (device, node, inputs) in known:
                continue
            known.add((device, node, inputs))
            sizes = _sizes(call, dims, wanted)
            found = [np.full(len(wanted) * len(OTHER_SIZES), False), *(each < 0 for each in sizes)]
            for each in file.templates:
                words = each.words.for_inputs(inputs) if (each.device, each.node) == (device, node) else None
                found += [words.have_plans(sizes)] if words else []
            lacking = ~np.logical_or.reduce(np.broadcast_arrays(*found)).reshape(len(wanted), -1).all(axis=1)
            if lacking.any():
                yield NoPlan(call.node.name, device, wanted[int(np.argmax(lacking))])


def _sizes(call: Call, dims: Collection[str], wanted: Sequence[int]) -> list[Values]:
    """Return an array for each dynamic dim of a node: its sizes for all pairs (wanted size, size from OTHER_SIZES).

    In each pair, the symbols in `dims` have the first size, and all other symbols have the second size.
    """
    points = [(size, other) for size in wanted for other in OTHER_SIZES]
    parsed = [parse_size(name) for name in dim_names(call.shapes)]
    names = {name for size in parsed for name in symbols(size)}
    at = [{name: size if name in dims else other for name in names} for size, other in points]
    return [np.array([evaluate(size, values) for values in at], np.int64) for size in parsed]
