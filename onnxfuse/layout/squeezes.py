"""Fuse the mean over an image with the two small products that compute a channel gate from it (squeeze-and-excite)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import helper

from onnxfuse.activations import PRELU
from onnxfuse.algebra.operators import REGROUPING
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of, producer
from onnxfuse.layout.fusions import PRODUCT, SQUEEZE
from onnxfuse.layout.gates import pointwise
from onnxfuse.layout.joins import Call, Joined, Joins
from onnxfuse.rewrite.chain_bodies import chained, function_of, with_operands

MEAN: Final = "global_average_pool"
SECOND: Final = {"w": "w_2", "bias": "bias_2"}  # names for the second product's operands in the fused node
ACTIVATION: Final = ("activation", "alpha", "beta")
SWAPPED: Final = (1, 0)  # the perm from weights (k, n) to (n, k), which the kernel reads


@dataclass(frozen=True)
class Squeeze:
    """The nodes of a squeeze-and-excite: a mean over an image and two products, with views in between if needed.

    Matrix products need views between images of one pixel and rows.  Convolutions of images of one pixel need none.
    """

    mean: Call
    first: Call
    second: Call
    views: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes; the last one computes the gate."""
        return self.mean.node, self.first.node, self.second.node, *self.views


def squeezes(joins: Joins) -> Iterator[Joined]:
    """Yield each channels-last mean over an image joined with the two products after it that compute a gate.

    The products are convolutions of images of one pixel, or matrix products between views.  The second product has one
    result per channel of the image.  Nothing else reads the tensors between the nodes.  Weights that are transposed for
    the kernel are added to `joins.originals`.
    """
    for one in _squeezes(joins):
        second = {SECOND[name]: tensor for name, tensor in _weights(joins, one.second).items()}
        operands = {"x": one.mean.operands["x"], **_weights(joins, one.first), **second}
        yield Joined(one.nodes, one.second, _body(one, joins.shapes), operands, _attributes(one), SQUEEZE)


# --- find squeezes ------------------------------------------------------------------------------------------------


def _squeezes(joins: Joins) -> Iterator[Squeeze]:
    graph, shapes = joins.graph, joins.shapes
    for node in graph.nodes:
        found = _of_images(joins, node) or _of_rows(joins, node)
        if found is None:
            continue
        image, gate = shapes.shape(found.mean.operands["x"]), shapes.shape(node.outputs[0])
        inner = (tensor for each in found.nodes[:-1] for tensor in each.outputs)
        alone = all(graph.sole_consumer(tensor) in found.nodes for tensor in inner)
        if alone and image and gate and isinstance(gate[-1], int) and image[-1] == gate[-1]:
            yield found


def _of_images(joins: Joins, node: Node) -> Squeeze | None:
    """Return the squeeze-and-excite that ends in this convolution of one-pixel images; None if there is none."""
    second = _convolution(joins, node)
    first = _convolution(joins, producer(node.inputs[0])) if second is not None else None
    mean = joins.call(producer(first.operands["x"])) if first is not None else None
    if first is None or second is None or mean is None or not mean.is_channels_last(MEAN):
        return None
    return Squeeze(mean, first, second)


def _convolution(joins: Joins, node: Node | None) -> Call | None:
    call = pointwise(joins, node)
    return call if call is not None and _is_plain(call) and call.activation != PRELU else None


def _is_plain(call: Call) -> bool:
    """Return whether a product has no fused operator after its activation."""
    return list(call.operands) in (["x", "w"], ["x", "w", "bias"])


def _of_rows(joins: Joins, view: Node) -> Squeeze | None:
    """Return the squeeze-and-excite that ends with `view`, a view of rows as images of one pixel; None if none does."""
    shapes = joins.shapes
    if op_of(view) not in REGROUPING or not _joins_axes(shapes, view.inputs[:1], view.outputs):
        return None
    second = _product(joins, producer(view.inputs[0])) if view.outputs[0].name in joins.originals else None
    first = _product(joins, producer(second.operands["x"])) if second is not None else None
    if first is None or second is None:
        return None
    before, views = producer(first.operands["x"]), [view]
    if before is not None and op_of(before) in REGROUPING and _joins_axes(shapes, before.outputs, before.inputs[:1]):
        views = [before, view]
        before = producer(before.inputs[0])
    mean = joins.call(before)
    return Squeeze(mean, first, second, tuple(views)) if mean is not None and mean.is_channels_last(MEAN) else None


def _joins_axes(shapes: ShapeInfo, rows: Sequence[Tensor], images: Sequence[Tensor]) -> bool:
    """Return whether `rows[0]` has the shape (n, channels), and `images[0]` has (n, 1, ..., 1, channels)."""
    (row, image) = (shapes.shape(tensors[0]) if tensors else None for tensors in (rows, images))
    if row is None or image is None or len(row) != 2 or len(image) < 3:
        return False
    return image == (row[0], *(1,) * (len(image) - 2), row[1])


def _product(joins: Joins, node: Node | None) -> Call | None:
    """Return a node if it multiplies rows by constant weights, with no fused operator after its activation."""
    call = joins.call(node)
    if call is None or call.fusion != PRODUCT or not _is_plain(call) or not is_constant(call.operands["w"]):
        return None
    ranks = [joins.shapes.rank(tensor) for tensor in call.operands.values()]
    return call if ranks == [2, 2, 1][: len(ranks)] else None


# --- write the fused node -----------------------------------------------------------------------------------------


def _is_swapped(product: Call) -> bool:
    """Return whether the weights of a product have the order (k, n)."""
    return product.attributes.get("weight_layout") == "kn"


def _weights(joins: Joins, product: Call) -> dict[str, Tensor]:
    """Return the operands of a product other than x, with weights that have one row per result."""
    operands, w = {name: tensor for name, tensor in product.operands.items() if name != "x"}, product.operands["w"]
    if not _is_swapped(product) or not is_constant(w):
        return operands
    stored = joins.graph.constant(f"{w.name}/nk", np.ascontiguousarray(constant_value(joins.graph, w).T))
    joins.originals[stored.name] = w.name, SWAPPED
    return {**operands, "w": stored}


def _attributes(one: Squeeze) -> dict[str, AttributeValue]:
    first, second = one.first, one.second
    own = {"layout": one.mean.attributes["layout"]}
    own |= {name: first.attributes[name] for name in ACTIVATION if name in first.attributes}
    return own | {f"{name}_2": second.attributes[name] for name in ACTIVATION if name in second.attributes}


def _body(one: Squeeze, shapes: ShapeInfo) -> onnx.FunctionProto:
    products = [
        chained(_transposed(), product.body, "w") if _is_swapped(product) else product.body
        for product in (one.first, one.second)
    ]
    views = [_reshaped(shapes, view) for view in one.views]
    return functools.reduce(
        chained, [one.mean.body, *views[:-1], products[0], with_operands(products[1], SECOND), *views[-1:]]
    )


def _transposed() -> onnx.FunctionProto:
    """Return a function that transposes weights."""
    return function_of(["w"], [helper.make_node("Transpose", ["w"], ["w_kn"], perm=SWAPPED)])


def _reshaped(shapes: ShapeInfo, view: Node) -> onnx.FunctionProto:
    """Return a function that reshapes images of one pixel to rows or back, for any number of images."""
    shape = shapes.shape(view.outputs[0])
    assert shape is not None  # not None: `_joins_axes` checked it
    sizes = [0, *(size for size in shape[1:] if isinstance(size, int))]
    target = helper.make_tensor("", onnx.TensorProto.INT64, [len(shape)], sizes)
    nodes = [
        helper.make_node("Constant", [], ["shape"], value=target),
        helper.make_node("Reshape", ["x", "shape"], ["reshaped"]),
    ]
    return function_of(["x"], nodes)
