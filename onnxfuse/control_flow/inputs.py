"""The types of a body's inputs, as known from the inputs of its Loop or Scan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import onnx
from onnx import TensorProto

from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.attributes import int_attribute, ints_attribute
from onnxfuse.ir.node import Node, Tensor, op_of

Known: TypeAlias = "tuple[Shape | None, int]"  # (shape, dtype); None: unknown rank; 0: unknown dtype

FIRST_SCAN_WITHOUT_BATCH = 9  # the first opset in which a Scan has no batch axis


def known_inputs(shapes: ShapeInfo, node: Node, body: onnx.GraphProto) -> dict[str, Known]:
    """Return the shape and dtype of each of the body's own inputs, by name.

    Carried inputs, which each iteration computes for the next, get the shape of their initial values; `infer_repeated`
    finds out which of their sizes hold in every iteration.
    """
    names = [value.name for value in body.input]
    declared = {value.name: value.type.tensor_type for value in body.input}
    known: dict[str, Known] = {name: (None, int(kind.elem_type)) for name, kind in declared.items()}
    if op_of(node) == "Scan" and shapes.graph.opset < FIRST_SCAN_WITHOUT_BATCH:
        return known
    for name, tensor in carried(node, names).items():
        known[name] = _type_of(shapes, tensor, declared[name])
    if op_of(node) == "Loop":
        for name, dtype in zip(names[:2], (int(TensorProto.INT64), int(TensorProto.BOOL)), strict=False):
            dims = declared[name].shape.dim
            # The iteration number and the condition are scalars; some exporters declare them with the shape [1].
            single = declared[name].HasField("shape") and len(dims) <= 1
            known[name] = ((1,) * len(dims) if single else None), dtype
    elif op_of(node) == "Scan":
        for name, (tensor, axis) in scanned(node, names).items():
            shape, dtype = _type_of(shapes, tensor, declared[name])
            at = axis if shape is None or axis >= 0 else axis + len(shape)
            known[name] = (None if shape is None else (*shape[:at], *shape[at + 1 :])), dtype
    return known


def _type_of(shapes: ShapeInfo, tensor: Tensor, declared: onnx.TypeProto.Tensor) -> Known:
    if not tensor.name:
        return None, int(declared.elem_type)
    return shapes.shape(tensor), shapes.dtype(tensor) or int(declared.elem_type)


def carried(node: Node, names: list[str]) -> Mapping[str, Tensor]:
    """Return the inputs of a body that each iteration computes for the next, each with its initial value."""
    if op_of(node) == "Loop":
        return dict(zip(names[2:], node.inputs[2:], strict=False))
    if op_of(node) == "Scan":
        return dict(zip(names, node.inputs[: _first_scanned(node)], strict=False))
    return {}


def leading_results(node: Node) -> int:
    """Return the number of a body's results before the carried ones: 1 for a Loop (its condition), 0 for a Scan."""
    return 1 if op_of(node) == "Loop" else 0


def scanned(node: Node, names: list[str]) -> Mapping[str, tuple[Tensor, int]]:
    """Return the inputs of a Scan's body that are slices; each is mapped to the sliced tensor and the axis."""
    if op_of(node) != "Scan":
        return {}
    first = _first_scanned(node)
    count = len(node.inputs) - first
    axes = ints_attribute(node, "scan_input_axes", [0] * count)
    return {name: (t, axis) for name, t, axis in zip(names[first:], node.inputs[first:], axes, strict=False)}


def _first_scanned(node: Node) -> int:
    return max(0, len(node.inputs) - int_attribute(node, "num_scan_inputs", 0))
