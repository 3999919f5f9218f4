"""Rewrites that need no pattern: they give equivalent graphs one form, fold constants, and rescale weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.passes.folded import Folded

# A pass changes a sorted graph in place, and records the types of the tensors that it adds.  It returns the nodes that
# it folded, or the number of changes.  `graph_pass` makes a pass of a function: it first checks the opset, and after
# changes it removes unread nodes and sorts the graph.
Pass: TypeAlias = Callable[[Graph, ShapeInfo], list[Folded] | int]

__all__ = ["Folded", "Pass"]
