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
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of, producer
from onnxfuse.layout.fusions import PRODUCT, SQUEEZE
from onnxfuse.layout.gates import is_pointwise
from onnxfuse.layout.joins import Joined, Joins, is_channels_last, operands_of
from onnxfuse.rewrite.chain_bodies import chained, function_of, with_operands
from onnxfuse.rewrite.replace import attributes_of

MEAN: Final = "global_average_pool"
SECOND: Final = {"w": "w_2", "bias": "bias_2"}  # names of the second product's operands
ACTIVATION: Final = ("activation", "alpha", "beta")
SWAPPED: Final = (1, 0)  # the perm from weights (k, n) to (n, k), which the kernel reads


@dataclass(frozen=True)
class Squeeze:
    """The nodes of a squeeze-and-excite: a mean over an image and two products, with views in between if needed.

    Matrix products need views between images of one pixel and rows.  Convolutions of images of one pixel need none.
    """

    mean: Node
    first: Node
    second: Node
    views: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes; the last one computes the gate."""
        fused = (self.mean, self.first, self.second)
        last = self.views[-1:]
        return (*(node for node in (*fused, *self.views[:-1]) if node not in last), *last)


def squeezes(joins: Joins) -> Iterator[Joined]:
    """Yield each channels-last mean over an image joined with the two products after it that compute a gate.

    The products are convolutions of images of one pixel, or matrix products between views.  The second product has one
    result per channel of the image.  Nothing else reads the tensors between the nodes.  Weights that are transposed for
    the kernel are added to `joins.originals`.
    """
    for one in _squeezes(joins):
        inputs = (one.mean.inputs[0], *_weights(joins, one.first), *_weights(joins, one.second))
        yield Joined(one.nodes, one.second, _body(one, joins), inputs, _attributes(one, joins.shapes))


# --- find squeezes ------------------------------------------------------------------------------------------------


def _squeezes(joins: Joins) -> Iterator[Squeeze]:
    graph, shapes = joins.graph, joins.shapes
    for node in graph.nodes:
        found = _of_images(shapes, node) or _of_rows(joins, node)
        if found is None:
            continue
        image, gate = shapes.shape(found.mean.inputs[0]), shapes.shape(node.outputs[0])
        inner = (tensor for each in found.nodes[:-1] for tensor in each.outputs)
        alone = all(graph.sole_consumer(tensor) in found.nodes for tensor in inner)
        if alone and image and gate and isinstance(gate[-1], int) and image[-1] == gate[-1]:
            yield found


def _of_images(shapes: ShapeInfo, second: Node) -> Squeeze | None:
    """Return the squeeze whose second product is this convolution of images of one pixel; None if there is none."""
    first = producer(second.inputs[0]) if _is_convolution(shapes, second) else None
    mean = producer(first.inputs[0]) if first is not None and _is_convolution(shapes, first) else None
    if first is None or mean is None or not is_channels_last(mean, MEAN):
        return None
    return Squeeze(mean, first, second)


def _is_convolution(shapes: ShapeInfo, node: Node) -> bool:
    plain = operands_of(node) in (["x", "w"], ["x", "w", "bias"])
    return plain and is_pointwise(shapes, node) and str_attribute(node, "activation", "none") != PRELU


def _of_rows(joins: Joins, view: Node) -> Squeeze | None:
    """Return the squeeze that ends in this view from rows to images of one pixel; None if there is none."""
    shapes = joins.shapes
    if op_of(view) not in REGROUPING or not _joins_axes(shapes, view.inputs[:1], view.outputs):
        return None
    if view.outputs[0].name not in joins.originals:
        return None
    second = producer(view.inputs[0])
    first = producer(second.inputs[0]) if second is not None and _is_product(shapes, second) else None
    if second is None or first is None or not _is_product(shapes, first):
        return None
    before = producer(first.inputs[0])
    views: tuple[Node, ...] = (view,)
    if before is not None and op_of(before) in REGROUPING and _joins_axes(shapes, before.outputs, before.inputs[:1]):
        views = (before, view)
        before = producer(before.inputs[0])
    return None if before is None or not is_channels_last(before, MEAN) else Squeeze(before, first, second, views)


def _joins_axes(shapes: ShapeInfo, rows: Sequence[Tensor], images: Sequence[Tensor]) -> bool:
    """Return whether these are rows (n, channels) and channels-last images of one pixel with the same elements."""
    (row, image) = (shapes.shape(tensors[0]) if tensors else None for tensors in (rows, images))
    if row is None or image is None or len(row) != 2 or len(image) < 3:
        return False
    return image == (row[0], *(1,) * (len(image) - 2), row[1])


def _is_product(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node multiplies rows by constant weights, with no fused operator after its activation."""
    plain = operands_of(node) in (["x", "w"], ["x", "w", "bias"]) and len(operands_of(node)) == len(node.inputs)
    is_product = node.domain == DOMAIN and str_attribute(node, "fusion", "") == PRODUCT
    ranks = [shapes.rank(tensor) for tensor in node.inputs]
    return plain and is_product and is_constant(node.inputs[1]) and ranks == [2, 2, 1][: len(ranks)]


# --- write the fused node -----------------------------------------------------------------------------------------


def _is_swapped(node: Node) -> bool:
    """Return whether the weights of a product have the order (k, n)."""
    return str_attribute(node, "weight_layout", "nk") == "kn"


def _weights(joins: Joins, node: Node) -> list[Tensor]:
    """Return the operands of a product other than x; its weights have one row per result."""
    w = node.inputs[1]
    if not _is_swapped(node) or not is_constant(w):
        return list(node.inputs[1:])
    stored = joins.graph.constant(f"{w.name}/nk", np.ascontiguousarray(constant_value(joins.graph, w).T))
    joins.originals[stored.name] = w.name, SWAPPED
    return [stored, *node.inputs[2:]]


def _attributes(one: Squeeze, shapes: ShapeInfo) -> dict[str, AttributeValue]:
    first, second = one.first, one.second
    own: dict[str, AttributeValue] = {name: one.mean.attrs[name] for name in ("layout", "output_ranks")}
    if one.views:
        own["output_ranks"] = [len(shapes.shape(one.nodes[-1].outputs[0]) or ())]
    own |= {name: first.attrs[name] for name in ACTIVATION if name in first.attrs}
    own |= {f"{name}_2": second.attrs[name] for name in ACTIVATION if name in second.attrs}
    operands = [*operands_of(first), *(SECOND[name] for name in operands_of(second)[1:])]
    types: list[int] = second.attrs["output_types"]  # type: ignore[assignment]
    return attributes_of(SQUEEZE, operands, types, own)


def _body(one: Squeeze, joins: Joins) -> onnx.FunctionProto:
    products = [
        chained(_transposed(), joins.bodies[node.op], "w") if _is_swapped(node) else joins.bodies[node.op]
        for node in (one.first, one.second)
    ]
    views = [_reshaped(joins.shapes, view) for view in one.views]
    chain = [joins.bodies[one.mean.op], *views[:-1], products[0], with_operands(products[1], SECOND), *views[-1:]]
    return functools.reduce(chained, chain)


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
