"""Rewrites that need no pattern: equivalent graphs get one form, constants are computed, weights are rescaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.passes.folded import Folded

# A pass changes a sorted graph in place, and records the types of the tensors that it adds.  It returns the nodes that
# it folded, or a number of changes.  `graph_pass` makes one of a function: it checks the opset, removes and sorts.
Pass: TypeAlias = Callable[[Graph, ShapeInfo], list[Folded] | int]

__all__ = ["Folded", "Pass"]
