"""Replace computed targets of Reshape and Expand, and computed ends of Slice, by equivalent constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.views import tells_empty_axes
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, is_constant, op_of, producer
from onnxfuse.passes.folded import Folded, node_label
from onnxfuse.passes.graph_pass import graph_pass

MAX_INT64 = np.iinfo(np.int64).max  # the end of a Slice that takes the rest of its axis


@graph_pass()
def fold_shapes(graph: Graph, shapes: ShapeInfo) -> list[Folded]:
    """Replace computed shapes by constants; return the nodes that computed them.

    In a Reshape target, 0 keeps a dimension, and one unknown size becomes -1 (see `reshape_target`).
    """
    folded = []
    for node in list(graph.nodes):
        rule = RULES.get(op_of(node))
        if rule is None or len(node.inputs) <= rule[0] or is_constant(node.inputs[rule[0]]):
            continue
        if op_of(node) != "Reshape" and graph.joins_quantizers(node.outputs[0], node.inputs[0]):
            continue  # onnxruntime would remove a no-op whose target is constant
        index, find_constant = rule
        old = node.inputs[index]
        value = shapes.value(old)
        sizes = None if value is None or value.ndim != 1 else find_constant(graph, shapes, node, value.tolist())
        if sizes is not None:
            shape_node = producer(old)
            folded.append(Folded("shape", node_label(shape_node) if shape_node else old.name, node_label(node)))
            dtype = onnx.helper.tensor_dtype_to_np_dtype(shapes.dtype(old) or onnx.TensorProto.INT64)
            node.inputs[index] = graph.constant(f"{old.name}_known", np.array(sizes, dtype))
            if int_attribute(node, "allowzero") and 0 in sizes:
                graph.rewrite(node, "Reshape")
    return folded


def reshape_target(shape: Sequence[Size] | None, wanted: Sequence[Size]) -> list[int] | None:
    """Return the constant target that reshapes a tensor of `shape` to the sizes `wanted`; None if there is none.

    A number stays a number, and a symbolic size that equals the size of the same axis of `shape` becomes 0. One other
    size can become -1, but not if the target has a 0: if the dimension that the 0 keeps is empty, -1 could be any
    number, and runtimes refuse it.
    """
    sizes = shape or ()
    if any(size == 0 and (i >= len(sizes) or sizes[i] != 0) for i, size in enumerate(wanted)):
        return None  # a 0 in the target would copy the size of the source's axis, which is not 0
    return _target(sizes, wanted, infers_a_size=False)


def _target(sizes: Sequence[Size], wanted: Sequence[Size], *, infers_a_size: bool) -> list[int] | None:
    """Return a target like `reshape_target`, but allow a 0 in `wanted` and, with `infers_a_size`, both 0 and -1."""
    target: list[int] = []
    for i, size in enumerate(wanted):
        if isinstance(size, int):
            target.append(size)
        else:
            target.append(0 if i < len(sizes) and sizes[i] == size else -1)
    return target if target.count(-1) <= (infers_a_size or 0 not in target) else None


def _constant_reshape_target(graph: Graph, shapes: ShapeInfo, node: Node, wanted: list[Size]) -> list[int] | None:
    allows_zero = bool(int_attribute(node, "allowzero"))
    if allows_zero and 0 in wanted:
        return None  # a size of 0, which would look like a 0 that keeps a dimension
    source, result = shapes.shape(node.inputs[0]), shapes.shape(node.outputs[0]) or wanted
    if -1 in wanted and not tells_empty_axes(node, wanted, source):
        if allows_zero:
            return None
        result = wanted  # if an axis is empty, -1 can become another size than inferred
    # A known size replaces -1, because -1 is undetermined in an empty tensor.
    pairs = zip(wanted, result, strict=True)
    sizes = [known if size == -1 and known and isinstance(known, int) else size for size, known in pairs]
    return _target(source or (), sizes, infers_a_size=-1 in wanted and not allows_zero)


def _constant_expand_target(graph: Graph, shapes: ShapeInfo, node: Node, wanted: list[Size]) -> list[int] | None:
    """Return the target with 1 for each symbolic size that the input's axis already has; an Expand keeps such axes.

    Returns None if any other size is symbolic.
    """
    shape = shapes.shape(node.inputs[0])
    if shape is None:
        return None
    aligned = [None] * (len(wanted) - len(shape)) + list(shape[max(0, len(shape) - len(wanted)) :])
    target = [size if isinstance(size, int) else 1 for size in wanted]
    fits = all(isinstance(size, int) or size == own for size, own in zip(wanted, aligned, strict=True))
    return target if fits else None


def _constant_slice_ends(graph: Graph, shapes: ShapeInfo, node: Node, wanted: list[Size]) -> list[int] | None:
    """Return the ends with MAX_INT64 for each symbolic end of a forward slice that equals the size of its axis.

    Returns None if any other end is symbolic.
    """
    shape = shapes.shape(node.inputs[0])
    axes = shapes.value(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3].name else np.arange(len(wanted))
    steps = shapes.value(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4].name else np.ones(len(wanted))
    if shape is None or axes is None or steps is None or not len(wanted) == axes.size == steps.size:
        return None
    if not all(isinstance(axis, int) and -len(shape) <= axis < len(shape) for axis in axes.tolist()):
        return None
    ends = []
    for end, axis, step in zip(wanted, axes.tolist(), steps.tolist(), strict=True):
        is_whole = isinstance(step, (int, float)) and step > 0 and shape[axis] == end
        ends.append(end if isinstance(end, int) else int(MAX_INT64) if is_whole else None)
    known = [end for end in ends if end is not None]
    return known if len(known) == len(ends) else None


RULES = {  # by operator: the index of the input, and the function that finds its constant value
    "Reshape": (1, _constant_reshape_target),
    "Expand": (1, _constant_expand_target),
    "Slice": (2, _constant_slice_ends),
}
