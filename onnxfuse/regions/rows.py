"""The rows of a region with reductions: all reductions must be over the same axes of the same shape.

A row consists of the elements that a reduction combines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from onnxfuse.algebra.operators import EXTREMES, REGROUPING, SOFTMAXES
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import Node
from onnxfuse.region_operators import REDUCTIONS
from onnxfuse.regions.pointwise import POINTWISE
from onnxfuse.regions.steps import Step

DYNAMIC: Final = "DynamicQuantizeLinear"
ONE_AXIS: Final = (*SOFTMAXES, *EXTREMES)


class Kind(Enum):
    """How a value depends on its region's reductions."""

    ELEMENT = "one for each element of the rows"
    ROW = "one for each row"


@dataclass(frozen=True)
class Rows:
    """The shape and the axes over which all reductions of a region reduce."""

    shape: Shape
    axes: tuple[int, ...]

    @property
    def kept(self) -> Shape:
        """The shape of a reduction's result with the reduced axes kept as size 1."""
        return tuple(1 if i in self.axes else size for i, size in enumerate(self.shape))

    @property
    def dropped(self) -> Shape:
        """The shape of a reduction's result without the reduced axes."""
        return tuple(size for i, size in enumerate(self.shape) if i not in self.axes)


def is_reduction(step: Step) -> bool:
    """Return whether a step reduces axes of its operand, as ReduceSum and Softmax do."""
    return step.op in REDUCTIONS


def rows_of(shapes: ShapeInfo, node: Node, steps: Iterable[Step]) -> Rows | None:
    """Return the rows that a node reduces; None if it is not a reduction."""
    reduction = next((step for step in steps if is_reduction(step)), None)
    return Rows(shapes.shape(node.inputs[0]) or (), _axes(reduction)) if reduction is not None else None


def kinds_of(
    shapes: ShapeInfo, nodes: Iterable[Node], forms: Mapping[Node, tuple[Step, ...]]
) -> dict[str, Kind] | None:
    """Return the kinds of all values that depend on a reduction, by name; `nodes` must be in execution order.

    Returns None if the nodes cannot be one region: their reductions have different rows, or a node rearranges the
    results of a reduction.
    """
    rows: Rows | None = None
    kinds: dict[str, Kind] = {}
    for node in nodes:
        reduction = next((step for step in forms[node] if is_reduction(step)), None)
        if reduction is not None:
            shape = shapes.shape(node.inputs[0]) or ()
            found = Rows(shape, _axes(reduction))
            if rows not in (None, found) or kinds.get(node.inputs[0].name) is Kind.ROW:
                return None
            rows = found
            gives_rows = reduction.op in SOFTMAXES or node.op == DYNAMIC
            gives_rows |= node.domain == DOMAIN  # the only fused nodes in regions are norms
            kinds[node.outputs[0].name] = Kind.ELEMENT if gives_rows else Kind.ROW
            if node.op == DYNAMIC:
                kinds |= {tensor.name: Kind.ROW for tensor in node.outputs[1:]}
            continue
        behind = {t.name for t in node.inputs if t.name in kinds}
        if not behind:
            continue
        kind = _kind_behind(shapes, node, rows, kinds) if rows is not None else None
        if kind is None:
            return None
        kinds[node.outputs[0].name] = kind
    return kinds


def _axes(step: Step) -> tuple[int, ...]:
    axes = step.attributes["axis"] if step.op in ONE_AXIS else step.attributes["axes"]
    return tuple(axes) if isinstance(axes, list) else (int(axes),)


def _kind_behind(shapes: ShapeInfo, node: Node, rows: Rows, kinds: Mapping[str, Kind]) -> Kind | None:
    """Return the kind of a node's result if its operands depend on reductions; None if the node rearranges rows."""
    out = shapes.shape(node.outputs[0])
    if out is None or len(node.outputs) > 1:
        return None
    if node.op in REGROUPING:
        is_row = kinds[node.inputs[0].name] is Kind.ROW and _is_row(out, rows)
        return Kind.ROW if is_row else None
    if node.op == "Expand":
        is_along = kinds[node.inputs[0].name] is Kind.ROW and shapes.shape(node.inputs[0]) == rows.kept
        return Kind.ELEMENT if is_along and out == rows.shape else None
    if node.op == "GatherElements":
        return Kind.ROW if _takes_one_of_each_row(shapes, node, rows, kinds) else None
    if node.op not in POINTWISE:
        return None
    read = [(shapes.shape(t) or (), kinds[t.name]) for t in node.inputs if t.name in kinds]
    if out in (rows.shape, rows.kept):
        wanted = {Kind.ELEMENT: rows.shape, Kind.ROW: rows.kept}
        aligned = all(_padded(shape, len(out)) == wanted[kind] for shape, kind in read)
        return (Kind.ELEMENT if out == rows.shape else Kind.ROW) if aligned else None
    is_row = _is_row(out, rows) and all(kind is Kind.ROW and shape == out for shape, kind in read)
    return Kind.ROW if is_row else None


def _takes_one_of_each_row(shapes: ShapeInfo, node: Node, rows: Rows, kinds: Mapping[str, Kind]) -> bool:
    """Return whether a GatherElements takes one element per row, for example the score of each row's label."""
    data, indices = node.inputs
    axis = node.attrs.get("axis", 0)
    is_along = isinstance(axis, int) and rows.axes == (axis % len(rows.shape),)
    is_of_rows = is_along and kinds.get(data.name) is Kind.ELEMENT and shapes.shape(data) == rows.shape
    return is_of_rows and indices.name not in kinds and shapes.shape(indices) == rows.kept


def _is_row(shape: Shape, rows: Rows) -> bool:
    is_single = len(rows.axes) == len(rows.shape) and all(size == 1 for size in shape)
    return shape in (rows.kept, rows.dropped) or is_single


def _padded(shape: Shape, rank: int) -> tuple[Size, ...]:
    return (1,) * (rank - len(shape)) + shape
