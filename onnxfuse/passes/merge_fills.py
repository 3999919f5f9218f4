"""Fill scores with a number once, where a model fills them under one mask and then under another with the same number.

`Where(a, Where(b, scores, number), number)` is `Where(And(a, b), scores, number)`, whatever the number is.  Conditions
that say where scores are filled are negated where one of them is a causal mask, which a fused attention then knows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from onnx import TensorProto

from onnxfuse.analysis.index_formulas import AtMostZero
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.graph import Graph, constant_number
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.passes.emit import emit

FIRST_OPSET: Final = 9  # whose Where broadcasts


class Fill(NamedTuple):
    """A Where that leaves scores as they are, or puts a number in their place."""

    node: Node
    condition: Tensor
    scores: Tensor
    number: float
    inverted: bool  # the number is put where the condition is true


def merge_fills(graph: Graph, shapes: ShapeInfo) -> int:
    """Merge the Wheres in front of every Softmax that fill with one number.  Returns the number of merged ones."""
    if graph.opset < FIRST_OPSET:
        return 0
    pairs = [pair for node in graph.nodes if op_of(node) == "Softmax" for pair in _pairs(graph, node.inputs[0])]
    if not pairs:
        return 0
    analysis = IndexAnalysis(graph, shapes)
    count = sum(_merge(graph, shapes, analysis, *pair) for pair in pairs)
    if count:
        graph.remove_dead()
        graph.sort()
    return count


def _pairs(graph: Graph, tensor: Tensor) -> list[tuple[Fill, Fill]]:
    """Return the last two Wheres that make a tensor, if they fill with one number and nothing else reads the first."""
    outer = _fill(graph, tensor)
    inner = None if outer is None or graph.sole_consumer(outer.scores) is None else _fill(graph, outer.scores)
    return [(outer, inner)] if outer and inner and outer.number == inner.number else []


def _fill(graph: Graph, tensor: Tensor) -> Fill | None:
    node = producer(tensor)
    if node is None or op_of(node) != "Where":
        return None
    condition, yes, no = node.inputs
    for scores, other, inverted in ((yes, no, False), (no, yes, True)):
        if (number := constant_number(graph, other)) is not None:
            return Fill(node, condition, scores, number, inverted)
    return None


def _merge(graph: Graph, shapes: ShapeInfo, analysis: IndexAnalysis, outer: Fill, inner: Fill) -> bool:
    """Write both as one, if the shapes are known and the number is no NaN; return whether they are."""
    found = [shapes.shape(each.condition) for each in (outer, inner)]
    known = [shape for shape in found if shape is not None]
    end, dtype = outer.node.outputs[0], shapes.dtype(outer.node.outputs[0])
    shape = shapes.shape(end)
    if len(known) < len(found) or shape is None or shape != shapes.shape(outer.scores):
        return False
    try:
        mask_shape = broadcast(shapes, *known)
    except CannotInfer:
        return False
    inverted = outer.inverted and inner.inverted
    if any(isinstance(analysis.value(each.condition), AtMostZero) for each in (outer, inner)):
        inverted = False
    stem = f"{end.name}_filled"
    conditions = [each.condition if each.inverted == inverted else _not(graph, shapes, each) for each in (outer, inner)]
    op = "Or" if inverted else "And"
    mask = emit(graph, shapes, op, conditions, f"{stem}_mask", mask_shape, TensorProto.BOOL)
    number = outer.node.inputs[1 if outer.inverted else 2]
    branches = [number, inner.scores] if inverted else [inner.scores, number]
    return graph.replace(end, emit(graph, shapes, "Where", [mask, *branches], stem, shape, dtype))


def _not(graph: Graph, shapes: ShapeInfo, fill: Fill) -> Tensor:
    condition = fill.condition
    return emit(graph, shapes, "Not", [condition], f"{condition.name}_kept", shapes.shape(condition), TensorProto.BOOL)
