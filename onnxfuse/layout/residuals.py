"""Fuse residual Adds into products, convolutions and channel gates, if only Transposes were between them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import onnx

from onnxfuse.algebra.sizes import Shape
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.layout.fusions import CONVOLUTION, GATE, PRODUCT
from onnxfuse.layout.joins import Call, Joined, Joins
from onnxfuse.passes.emit import integers, write
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.rewrite.chain_bodies import chained, function_of

CHANNELS_LAST: Final = (CONVOLUTION, GATE)  # fusions that have channels-last kernels only
RESIDUAL: Final = "residual"  # the last operand of every fusion that can add a residual
ADDED: Final = function_of(["x", RESIDUAL], [onnx.helper.make_node("Add", ["x", RESIDUAL], ["t1"], domain="")])
OPS_OF_ONE_RANK: Final = frozenset({"Gemm", "Reshape"})  # with them, an ONNX function works for one rank of x only


@dataclass(frozen=True)
class Addition:
    """A fused node that can add a residual itself.

    If a Reshape follows the node, and x can be reshaped instead of the result, `moved` is the new shape of x.
    """

    call: Call
    residual: Tensor
    moved: Shape | None = None


def residuals(joins: Joins) -> Iterator[Joined]:
    """Yield each fused node joined with an Add that can become its residual, because the shapes are equal.

    The Add must be the only reader of the fused node's result.
    """
    graph, compared = joins.graph, {*joins.known, *joins.originals}
    for add in [node for node in graph.nodes if op_of(node) == "Add"]:
        found = [one for pair in (add.inputs, add.inputs[::-1]) if (one := _addition(joins, add, *pair)) is not None]
        if found:  # of two fused nodes, choose the later one, so that its residual is computed before it
            one = max(found, key=lambda one: graph.position[one.call.node])
            call, operands = one.call, {**one.call.operands, RESIDUAL: one.residual}
            if one.moved:
                operands["x"] = _reshaped(joins, call.node, one.moved, compared)
            position = {"residual_position": "before" if call.activation == "none" else "after"}
            own = position if call.fusion in CHANNELS_LAST else {}
            yield Joined((call.node, add), call, chained(call.body, ADDED), operands, own)


def _addition(joins: Joins, add: Node, value: Tensor, residual: Tensor) -> Addition | None:
    """Return how the fused node that computes `value`, directly or before a Reshape, can add `residual`; else None."""
    shapes, node, view = joins.shapes, producer(value), None
    if node is not None and op_of(node) == "Reshape":
        view, node = node, producer(node.inputs[0])
    call = joins.call(node)
    if node is None or call is None or not _takes_a_residual(call) or is_constant(residual):
        return None
    if (call.fusion, joins.original(add.outputs[0])) in joins.excluded:
        return None
    if any(joins.graph.sole_consumer(tensor) is None for tensor in (value, node.outputs[0])):
        return None
    shape, dtype = shapes.shape(value), shapes.dtype(value)
    if shape is None or dtype != shapes.dtype(residual):
        return None
    if shape != shapes.shape(residual) or shape != shapes.shape(add.outputs[0]):
        return None
    moved = _moved_view(shapes, call, view) if view is not None else None
    return Addition(call, residual, moved) if view is None or moved is not None else None


def _takes_a_residual(call: Call) -> bool:
    if RESIDUAL in call.operands or len(call.node.outputs) != 1:
        return False
    return call.fusion == PRODUCT or (call.fusion in CHANNELS_LAST and call.attributes.get("layout") == "nhwc")


def _moved_view(shapes: ShapeInfo, call: Call, view: Node) -> Shape | None:
    """Return the shape that x must get so that the product computes the result of `view`, a Reshape after it.

    Returns None if x and the product's result have different rows, if the target of the Reshape of x is not constant,
    or if the product's body (its ONNX function) works for one rank only.
    """
    x, y, result = (shapes.shape(t) for t in (call.node.inputs[0], call.node.outputs[0], view.outputs[0]))
    if call.fusion != PRODUCT or OPS_OF_ONE_RANK & {node.op_type for node in call.body.node}:
        return None
    if not (x and y and result) or y[-1] != result[-1] or len(result) < 3 or x[:-1] != y[:-1]:
        return None
    shape = (*result[:-1], x[-1])
    return None if reshape_target(x, shape) is None else shape


def _reshaped(joins: Joins, product: Node, shape: Shape, compared: Collection[str]) -> Tensor:
    """Return the operand x of a product, reshaped to `shape`.

    If x is itself the result of a Reshape whose source is in `compared`, this source is reshaped instead of x.
    `compared` holds the tensors whose values are available when the product is compared with the original.
    """
    graph, shapes, x = joins.graph, joins.shapes, product.inputs[0]
    before = producer(x)
    if before is not None and op_of(before) == "Reshape" and graph.sole_consumer(x) is product:
        source = before.inputs[0]
        if source.name in compared and shapes.shape(source) == shape:
            return source
        if source.name in compared and reshape_target(shapes.shape(source), shape) is not None:
            x = source
    target = integers(graph, f"{x.name}_shape", reshape_target(shapes.shape(x), shape) or [])
    return write(shapes, "Reshape", [x, target], f"{x.name}_moved")
