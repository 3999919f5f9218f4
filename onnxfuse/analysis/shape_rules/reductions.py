"""Shape rules of operators that reduce axes, or that select the largest elements along an axis."""

from __future__ import annotations

from onnxfuse.algebra.index_maps import squeezed
from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.rules import RuleTable, ShapeRule, axes_parameter, input_shape, integers, normalize_axis
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.ir.attributes import flag_attribute, int_attribute
from onnxfuse.ir.node import Node

RULES = RuleTable[ShapeRule]()


@RULES.rule(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip
def _reduce(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    shape = input_shape(shapes, node)
    try:
        axes = axes_parameter(shapes, node, len(shape))
    except CannotInfer:
        if flag_attribute(node, "keepdims", True):
            return (None,) * len(shape)
        raise
    if not axes:
        axes = [] if flag_attribute(node, "noop_with_empty_axes", False) else list(range(len(shape)))
    return _without_axes(shape, axes, node)


@RULES.rule("ArgMax", "ArgMin")
def _arg_reduce(shapes: ShapeInfo, node: Node) -> Shape:
    shape = input_shape(shapes, node)
    return _without_axes(shape, [normalize_axis(int_attribute(node, "axis", 0), len(shape))], node)


def _without_axes(shape: Shape, axes: list[int], node: Node) -> Shape:
    if flag_attribute(node, "keepdims", True):
        return tuple(1 if i in axes else size for i, size in enumerate(shape))
    return squeezed(shape, axes)


@RULES.rule("TopK")
def _top_k(shapes: ShapeInfo, node: Node) -> tuple[Size | None, ...]:
    shape: list[Size | None] = list(input_shape(shapes, node))
    try:
        k = integers(shapes, node, "k" if "k" in node.attrs else "K")
    except CannotInfer:
        k = None
    shape[normalize_axis(int_attribute(node, "axis", -1), len(shape))] = k[0] if k else None
    return tuple(shape)
