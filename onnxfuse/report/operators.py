"""Count the operators of a model before and after optimizing, for the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx

from onnxfuse.ir.domain import is_fused
from onnxfuse.ir.protos import is_constant, nodes, operator_name


@dataclass(frozen=True)
class OperatorCount:
    """The number of nodes of an operator before and after, including nodes in subgraphs."""

    op: str  # such as "Add"; outside of ONNX's own domain, such as "com.microsoft::Gelu"
    before: int
    after: int


def count_operators(before: onnx.GraphProto, after: onnx.GraphProto) -> tuple[OperatorCount, ...]:
    """Return the counts of all operators except fused nodes and Constants, the most frequent ones first."""
    old, new = _counts(before), _counts(after)
    found = (OperatorCount(op, old[op], new[op]) for op in old | new)
    return tuple(sorted(found, key=lambda one: (-one.after, -one.before, one.op)))


def _counts(graph: onnx.GraphProto) -> Counter[str]:
    return Counter(operator_name(node) for node in nodes(graph) if not is_fused(node) and not is_constant(node))
