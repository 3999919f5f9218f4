"""Find the fused nodes that make a model differ: from the names in onnxruntime's message, else by bisection."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx

from onnxfuse.fuse_model import FusedModel
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.protos import copy_without, nodes
from onnxfuse.rewrite.replace import Fused
from onnxfuse.verify.compare import Verification
from onnxfuse.verify.partly_fused import partly_fused

Compare: TypeAlias = Callable[[onnx.ModelProto], Verification]


@dataclass(frozen=True, eq=False)
class FusedNode:
    """A fused node in a graph of the model: the main one, or the body of an If, Loop or Scan."""

    where: str  # the graph's name in reports; "" for the main graph
    fused: Fused
    function: str  # the name of its body, the ONNX function that it calls
    is_transposed: bool  # whether it computes the Transpose of a tensor of the original

    def is_named(self, message: str) -> bool:
        """Return whether a message of onnxruntime names the node or its function."""
        # Node names end with the name of a fusion, so one name can be the end of another: search for whole names.
        names = self.fused.node, self.function
        return any(re.search(rf"(?<![\w/]){re.escape(name)}(?!\w)", message) for name in names)


@dataclass(frozen=True)
class Culprit:
    """A fused node that makes a model differ."""

    node: FusedNode
    reason: str  # a sentence about the difference
    differs_alone: bool  # whether the model differs even if no other node is fused


def find_culprits(result: FusedModel, differs: Verification, compare: Compare) -> list[Culprit]:
    """Return the fused nodes to unfuse so that a model agrees with the original.

    differs  how the model differs
    compare  compares a model with the original

    Finding a culprit that onnxruntime's message names takes two comparisons.  Finding any other takes about two
    comparisons more than the binary logarithm of the number of fused nodes.  If two culprits have the same body, all
    nodes with that body count as culprits.  The list is empty if the model differs even without fused nodes.
    """
    left = list(fused_nodes(result))
    found: list[Culprit] = []
    if not left or _compare_with(compare, result, []).passed is False:
        return found
    good = 0  # the first `good` nodes are known to cause no difference
    while differs.passed is False:
        wrong: Sequence[FusedNode] = [one for one in left if one.is_named(differs.reason)]
        alone = bool(wrong) and _compare_with(compare, result, wrong).passed is False
        if not alone:
            good = _first_bad(left, good, lambda some: _compare_with(compare, result, some).passed is False)
            known = {one.node.function for one in found}
            wrong = [one for one in left if one is left[good] or (one.function == left[good].function in known)]
            alone = _compare_with(compare, result, wrong).passed is False
        found += [Culprit(one, differs.reason, alone) for one in wrong]
        good = sum(one not in wrong for one in left[:good])
        left = [one for one in left if one not in wrong]
        differs = _compare_with(compare, result, left)
    return found


def _first_bad(left: Sequence[FusedNode], good: int, is_bad: Callable[[Sequence[FusedNode]], bool]) -> int:
    """Return the smallest n >= `good` for which the first n + 1 nodes together are bad, by bisection.

    Nodes are bad if a model in which only they are fused differs.  All nodes together must be bad.
    """
    low, high = good, len(left)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(left[:middle]) else (middle, high)
    return low


def _compare_with(compare: Compare, result: FusedModel, kept: Collection[FusedNode]) -> Verification:
    """Compare the model with only the `kept` fused nodes; the others are unfused."""
    names: dict[str, set[str]] = {}
    for one in kept:
        names.setdefault(one.where, set()).add(one.fused.node)
    model = copy_without(result.model, "graph", "functions")
    model.graph.CopyFrom(_partly_fused(result, "", names, frozenset()))
    called = {node.op_type for node in nodes(model.graph) if node.domain == DOMAIN}
    model.functions.extend(f for f in result.model.functions if f.domain != DOMAIN or f.name in called)
    return compare(model)


def _partly_fused(result: FusedModel, where: str, kept: dict[str, set[str]], around: frozenset[str]) -> onnx.GraphProto:
    """Return the fused model's graph, in which only the `kept` fused nodes are left; the others are unfused.

    The same is done in the bodies of If, Loop and Scan.  `kept` holds the names of nodes by graph, and `where` names
    this graph.
    """
    assert result.unfused is not None
    graph = onnx.GraphProto()
    graph.CopyFrom(result.model.graph)
    holders = {name: node for node in graph.node for name in node.output if name}
    inside = around | {tensor.name for tensor in graph.initializer}
    for one in result.bodies:
        node = holders.get(one.body.node.outputs[0].name)
        if node is not None:  # None if no node reads its result
            inner = f"{one.body.where} in {where}" if where else one.body.where
            body, written = node.attribute[one.body.index].g, _partly_fused(one.fused, inner, kept, inside)
            for field in "node", "initializer":
                del getattr(body, field)[:]
                getattr(body, field).extend(getattr(written, field))
    records = {fused.node for fused in result.fusing.fused}
    return partly_fused(graph, result.unfused, result.layout.originals, records - kept.get(where, set()), around)


def fused_nodes(result: FusedModel) -> Iterator[FusedNode]:
    """Yield all fused nodes, in the execution order of each graph."""
    records = {(one.where, one.node): one for one in result.fused}
    for where, graph in result.everywhere():
        for node in graph.model.graph.node:
            fused = records.get((where, node.name))
            if fused is not None and node.domain == DOMAIN:
                yield FusedNode(where, fused, node.op_type, graph.layout.is_transposed(node.output))
