"""Make one node of the mean over an image and the two small products that compute a gate of its channels from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
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
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of, producer
from onnxfuse.layout.axes import Perm
from onnxfuse.layout.bodies import behind, with_operands
from onnxfuse.layout.gates import is_fused, is_pointwise, operands_of
from onnxfuse.layout.one_node import put_one_node
from onnxfuse.layout.residuals import PRODUCT
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.replace import Fused, LocalFunctions, drop_functions

SQUEEZE: Final = "squeeze_excite"
MEAN: Final = "global_average_pool"
SECOND: Final = {"w": "w_2", "bias": "bias_2"}  # the operands of the second product
ACTIVATION: Final = ("activation", "alpha", "beta")
SWAPPED: Final = (1, 0)  # the perm of weights (k, n), which the kernel reads as (n, k)


@dataclass(frozen=True)
class Squeeze:
    """A mean over an image, two products behind it, and the views between images of one pixel and rows, if any.

    Products of rows stand between views; convolutions of images of one pixel have none.
    """

    mean: Node
    first: Node
    second: Node
    views: tuple[Node, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All of them; the last one computes the gate."""
        fused = (self.mean, self.first, self.second)
        last = self.views[-1:]
        return (*(node for node in (*fused, *self.views[:-1]) if node not in last), *last)


def join_squeezes(
    graph: Graph,
    shapes: ShapeInfo,
    records: Mapping[str, Fused],
    originals: MutableMapping[str, tuple[str, Perm]],
) -> list[Fused]:
    """Replace each channels-last mean over an image, and the two products behind it, by one node.

    The products are convolutions of images of one pixel, or products of rows between views.  The second product has as
    many results as the image has channels, and nothing else reads what lies between the three.  Returns the records of
    the new nodes; `records` are those of the fused nodes, by name.  `originals` are the tensors of the original that
    new ones are Transposes of; weights that are transposed are entered.
    """
    found = list(_squeezes(graph, shapes, originals))
    bodies = {f.name: f for f in graph.functions if f.domain == DOMAIN}
    drop_functions(graph, {node for one in found for node in (one.mean, one.first, one.second)})
    functions, made = LocalFunctions(graph), list[Fused]()
    for one in found:
        attributes = _attributes(one, shapes)
        body = _body(one, bodies, shapes, attributes)
        replaced = [name for node in (one.mean, one.first, one.second) for name in records[node.name].replaces]
        output = records[one.second.name].output
        if one.views:
            gate = one.nodes[-1].outputs[0].name
            replaced += [node_label(node) for node in one.views]
            output = originals[gate][0]
        made.append(Fused(SQUEEZE, one.second.name, tuple(replaced), {}, output))
        inputs = [one.mean.inputs[0], *_weights(graph, one.first, originals), *_weights(graph, one.second, originals)]
        put_one_node(graph, shapes, functions, one.nodes, one.second, body, inputs, attributes)
    if made:
        graph.remove_dead()
        graph.sort()
    return made


# --- what is found -------------------------------------------------------------------------------------------------


def _squeezes(graph: Graph, shapes: ShapeInfo, originals: Mapping[str, tuple[str, Perm]]) -> Iterator[Squeeze]:
    for node in graph.nodes:
        found = _of_images(graph, shapes, node) or _of_rows(graph, shapes, node, originals)
        if found is None:
            continue
        image, gate = shapes.shape(found.mean.inputs[0]), shapes.shape(node.outputs[0])
        inner = (tensor for each in found.nodes[:-1] for tensor in each.outputs)
        alone = all(graph.sole_consumer(tensor) in found.nodes for tensor in inner)
        if alone and image and gate and isinstance(gate[-1], int) and image[-1] == gate[-1]:
            yield found


def _of_images(graph: Graph, shapes: ShapeInfo, second: Node) -> Squeeze | None:
    """Return the squeeze that a convolution of images of one pixel ends."""
    first = producer(second.inputs[0]) if _is_convolution(shapes, second) else None
    mean = producer(first.inputs[0]) if first is not None and _is_convolution(shapes, first) else None
    if first is None or mean is None or not is_fused(mean, MEAN):
        return None
    return Squeeze(mean, first, second)


def _is_convolution(shapes: ShapeInfo, node: Node) -> bool:
    plain = operands_of(node) in (["x", "w"], ["x", "w", "bias"])
    return plain and is_pointwise(shapes, node) and str_attribute(node, "activation", "none") != PRELU


def _of_rows(graph: Graph, shapes: ShapeInfo, view: Node, originals: Mapping[str, tuple[str, Perm]]) -> Squeeze | None:
    """Return the squeeze that a view of rows as images of one pixel ends."""
    if op_of(view) not in REGROUPING or not _joins_axes(shapes, view.inputs[:1], view.outputs):
        return None
    if view.outputs[0].name not in originals:
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
    return None if before is None or not is_fused(before, MEAN) else Squeeze(before, first, second, views)


def _joins_axes(shapes: ShapeInfo, rows: Sequence[Tensor], images: Sequence[Tensor]) -> bool:
    """Return whether these are rows (n, channels), and channels-last images of one pixel with the same elements."""
    (row, image) = (shapes.shape(tensors[0]) if tensors else None for tensors in (rows, images))
    if row is None or image is None or len(row) != 2 or len(image) < 3:
        return False
    return image == (row[0], *(1,) * (len(image) - 2), row[1])


def _is_product(shapes: ShapeInfo, node: Node) -> bool:
    """Return whether a node is a product of rows with constant weights, and with nothing behind its activation."""
    plain = operands_of(node) in (["x", "w"], ["x", "w", "bias"]) and len(operands_of(node)) == len(node.inputs)
    is_product = node.domain == DOMAIN and str_attribute(node, "fusion", "") == PRODUCT
    ranks = [shapes.rank(tensor) for tensor in node.inputs]
    return plain and is_product and is_constant(node.inputs[1]) and ranks == [2, 2, 1][: len(ranks)]


# --- what is written -----------------------------------------------------------------------------------------------


def _is_swapped(node: Node) -> bool:
    """Return whether the weights of a product are (k, n)."""
    return str_attribute(node, "weight_layout", "nk") == "kn"


def _weights(graph: Graph, node: Node, originals: MutableMapping[str, tuple[str, Perm]]) -> list[Tensor]:
    """Return the operands of a product besides x, with a row of weights for each result."""
    w = node.inputs[1]
    if not _is_swapped(node) or not is_constant(w):
        return list(node.inputs[1:])
    stored = graph.constant(f"{w.name}/nk", np.ascontiguousarray(constant_value(graph, w).T))
    originals[stored.name] = w.name, SWAPPED
    return [stored, *node.inputs[2:]]


def _attributes(one: Squeeze, shapes: ShapeInfo) -> dict[str, AttributeValue]:
    first, second = one.first, one.second
    own: dict[str, AttributeValue] = {name: one.mean.attrs[name] for name in ("layout", "output_ranks")}
    if one.views:
        own["output_ranks"] = [len(shapes.shape(one.nodes[-1].outputs[0]) or ())]
    own |= {name: first.attrs[name] for name in ACTIVATION if name in first.attrs}
    own |= {f"{name}_2": second.attrs[name] for name in ACTIVATION if name in second.attrs}
    operands = [*operands_of(first), *(SECOND[name] for name in operands_of(second)[1:])]
    return {
        "fusion": SQUEEZE,
        "operands": " ".join(operands),
        "output_types": second.attrs["output_types"],
        "attributes": " ".join(sorted(own)),
        **own,
    }


def _body(
    one: Squeeze,
    bodies: Mapping[str, onnx.FunctionProto],
    shapes: ShapeInfo,
    attributes: Mapping[str, AttributeValue],
) -> onnx.FunctionProto:
    parts = [bodies[node.op] for node in (one.mean, one.first, one.second)]
    mean, first, second = parts
    if _is_swapped(one.first):
        first = behind(first, "w", _transposed(), ())
    if _is_swapped(one.second):
        second = behind(second, "w", _transposed(), ())
    chain = [mean, first, with_operands(second, SECOND)]
    if len(one.views) > 1:
        chain.insert(1, _reshaped(shapes, one.views[0]))
    if one.views:
        chain.append(_reshaped(shapes, one.views[-1]))
    body, *rest = chain
    for each in rest:
        body = behind(each, "x", body, list(attributes))
    body.input[:] = str(attributes["operands"]).split()
    body.doc_string = ""
    imports = {each.domain: each.version for part in parts for each in part.opset_import}
    del body.opset_import[:]
    body.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in imports.items())
    return body


def _transposed() -> onnx.FunctionProto:
    """Return a function that transposes weights."""
    return helper.make_function(
        DOMAIN, "", ["w"], ["w_kn"], [helper.make_node("Transpose", ["w"], ["w_kn"], perm=SWAPPED)], []
    )


def _reshaped(shapes: ShapeInfo, view: Node) -> onnx.FunctionProto:
    """Return a function that does what a view of images of one pixel or of rows does, for any number of images."""
    shape = shapes.shape(view.outputs[0])
    assert shape is not None  # `_joins_axes` has asked
    sizes = [0, *(size for size in shape[1:] if isinstance(size, int))]
    target = helper.make_tensor("", onnx.TensorProto.INT64, [len(shape)], sizes)
    nodes = [
        helper.make_node("Constant", [], ["shape"], value=target),
        helper.make_node("Reshape", ["x", "shape"], ["reshaped"]),
    ]
    return helper.make_function(DOMAIN, "", ["x"], ["reshaped"], nodes, [])
