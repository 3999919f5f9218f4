"""Take the sizes of a product of two computed tensors from these, so that only the attention reads its scores."""

from __future__ import annotations

from typing import Final

import numpy as np
from onnx import TensorProto

from onnxfuse.analysis.shape_inference import infer_behind
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import ints_attribute
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import emit

MIN_RANK: Final = 3  # of scores


def sizes_of_products(graph: Graph, shapes: ShapeInfo) -> int:
    """Read every size that a Gather takes of the Shape of a product from an operand of it.  Returns their number."""
    gathers = [node for node in graph.nodes if op_of(node) == "Gather"]
    count = sum(_read_of_operand(graph, shapes, node) for node in gathers)
    if count:
        graph.remove_dead()
        graph.sort()
    return count


def _read_of_operand(graph: Graph, shapes: ShapeInfo, gather: Node) -> bool:
    """Let a Gather of one size of a product read the Shape of an operand; return whether it can."""
    shape = producer(gather.inputs[0])
    product = producer(shape.inputs[0]) if shape is not None and op_of(shape) == "Shape" and not shape.attrs else None
    if product is None or op_of(product) != "MatMul" or any(map(is_constant, product.inputs)):
        return False
    index, size = gather.inputs[1], gather.outputs[0]
    axes = shapes.value(index) if is_constant(index) else None
    found = _operand_of_axis(shapes, product, int(axes.item())) if axes is not None and axes.size == 1 else None
    if axes is None or found is None:
        return False
    operand, axis = found
    stem, write = f"{size.name}_of_operand", (graph, shapes)
    sizes = emit(*write, "Shape", [operand], f"{stem}_shape", (shapes.rank(operand) or 0,), TensorProto.INT64)
    position = graph.constant(f"{stem}_axis", np.full(axes.shape, axis, np.int64))
    made = emit(*write, "Gather", [sizes, position], stem, axes.shape, TensorProto.INT64, {"axis": 0})
    infer_behind(shapes, [node for node in (producer(sizes), producer(made)) if node is not None])
    return graph.replace(size, made)


def _operand_of_axis(shapes: ShapeInfo, product: Node, axis: int) -> tuple[Tensor, int] | None:
    """Return an operand that has the size of an axis of a product, and the axis there; None where it is not known."""
    whole = shapes.shape(product.outputs[0])
    if whole is None or len(whole) < MIN_RANK or not -len(whole) <= axis < len(whole):
        return None
    behind = axis % len(whole) - len(whole)
    for operand in product.inputs[1:] if behind == -1 else product.inputs:
        shape = shapes.shape(operand)
        if shape is not None and len(shape) >= -behind and shape[behind] == whole[behind]:
            return before_transposes(operand, behind + len(shape))
        if behind == -2:
            return None
    return None


def before_transposes(tensor: Tensor, axis: int) -> tuple[Tensor, int]:
    """Return what Transposes make a tensor of, and an axis of it there."""
    while (node := producer(tensor)) is not None and op_of(node) == "Transpose":
        perm = ints_attribute(node, "perm")
        if perm is None:
            break
        tensor, axis = node.inputs[0], perm[axis]
    return tensor, axis
