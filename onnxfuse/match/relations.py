"""The relations between two values of a graph that the condition of a pattern may ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxfuse.analysis.dims import Size, symbols
from onnxfuse.dsl.guards import Relation
from onnxfuse.ir.node import Tensor, is_constant


def is_multiple(value: Tensor, of: Tensor) -> bool:
    """Return whether a value is another one times or over a constant."""
    makers = [node for node in value.inputs if node.op in ("Mul", "Div")]
    return any(t is of for node in makers for t in node.inputs) and any(map(is_constant, makers[0].inputs))


def share_symbols(left: Size, right: Size) -> bool:
    """Return whether two dims depend on a symbol in common, so that they may be equal: [:s] of 512 has min(512, s)."""
    return not {*symbols(left)}.isdisjoint(symbols(right))


RELATIONS: Final[Mapping[str, Relation]] = {"is_multiple": is_multiple, "share_symbols": share_symbols}
