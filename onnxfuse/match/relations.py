"""What the condition of a pattern may ask about values of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from onnxfuse.analysis.dims import Size, symbols
from onnxfuse.analysis.magnitudes import is_ordinary
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.guards import Relation
from onnxfuse.ir.node import Tensor, is_constant


def is_multiple(value: Tensor, of: Tensor) -> bool:
    """Return whether a value is another one times or over a constant."""
    makers = [node for node in value.inputs if node.op in ("Mul", "Div")]
    return any(t is of for node in makers for t in node.inputs) and any(map(is_constant, makers[0].inputs))


def share_symbols(left: Size, right: Size) -> bool:
    """Return whether two dims depend on a symbol in common, so that they may be equal: [:s] of 512 has min(512, s)."""
    return not {*symbols(left)}.isdisjoint(symbols(right))


def relations(shapes: ShapeInfo) -> Mapping[str, Relation]:
    """Return what may be asked, by name, of the values of a graph of which `shapes` is known."""
    return {"is_multiple": is_multiple, "share_symbols": share_symbols, "is_ordinary": partial(is_ordinary, shapes)}
