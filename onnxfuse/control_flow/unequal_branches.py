"""Finds Ifs before opset 11 whose branches differ in shape; onnxruntime refuses them if it can infer both shapes."""

from __future__ import annotations

from collections.abc import Collection

from onnxfuse.algebra.sizes import Dim, Shape
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.value_infos import BRANCHES_JOINED_SINCE
from onnxfuse.control_flow.body import Body, read_bodies
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node


def keep_unequal_branches(graph: Graph, shapes: ShapeInfo) -> Collection[Node]:
    """Return the Ifs whose branches must stay unchanged, and protect the tensors that these branches read.

    If a branch that computes the target of a Reshape is rewritten, onnxruntime may become able to infer the branch's
    shape.  Before opset 11, onnxruntime then refuses the If, because the other branch has a different shape.
    """
    if graph.opset >= BRANCHES_JOINED_SINCE:
        return ()
    branches: dict[Node, list[Body]] = {}
    for body in read_bodies(graph, shapes, ["If"]):
        branches.setdefault(body.node, []).append(body)
    kept = {node: found for node, found in branches.items() if not _are_equal(*(body.result_shapes for body in found))}
    graph.fixed_names |= {name for found in kept.values() for body in found for name in body.captured}
    return kept.keys()


def _are_equal(first: list[Shape | None], *others: list[Shape | None]) -> bool:
    """Return whether the results of the branches have equal known ranks, and no axis has two different numbers."""
    return all(_is_one(*pair) for other in others for pair in zip(first, other, strict=True))


def _is_one(a: Shape | None, b: Shape | None) -> bool:
    if a is None or b is None or len(a) != len(b):
        return False
    return all(x == y or isinstance(x, Dim) or isinstance(y, Dim) for x, y in zip(a, b, strict=True))
