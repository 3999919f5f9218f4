"""Let products, convolutions and gates of channels add residuals from which only Transposes separated them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import onnx

from onnxfuse.analysis.shape_info import Shape, ShapeInfo
from onnxfuse.ir.attributes import str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of, producer
from onnxfuse.layout.axes import Perm, to_last
from onnxfuse.layout.bodies import followed_by
from onnxfuse.layout.one_node import put_one_node
from onnxfuse.layout.writer import image_rank
from onnxfuse.passes.emit import emit
from onnxfuse.passes.fold_shapes import reshape_target
from onnxfuse.rewrite.replace import Fused, LocalFunctions

PRODUCT: Final = "gemm_bias_activation"
CONVOLUTION: Final = "conv_bias_activation"
GATE: Final = "channel_scale"
CHANNELS_LAST: Final = (CONVOLUTION, GATE)  # fusions that are channels-last or have no kernel
RESIDUAL: Final = "residual"  # the last operand of all of them
OPS_OF_ONE_RANK: Final = frozenset({"Gemm", "Reshape"})  # in whose bodies x cannot have another number of axes


@dataclass(frozen=True)
class Addition:
    """An Add as fusing left it: what it read, by name, and the perm of the Transposes of that which it reads now."""

    inputs: tuple[str, ...]
    perm: Perm


@dataclass(frozen=True)
class Residual:
    """A fused node and the Add behind it, which become one node."""

    product: Node
    view: Node | None  # a Reshape between them, which moves in front of the product
    add: Node
    residual: Tensor
    residual_before: str  # what the Add read in its place when fusing ended
    perm: Perm  # of the Transpose of that which the residual is
    original: str  # the name that the original has for the sum, maybe in the other layout


def additions(graph: Graph, shapes: ShapeInfo, channels_last: Collection[Node]) -> dict[Node, Addition]:
    """Return the Adds of a graph of which the nodes in `channels_last` are about to become channels-last."""
    return {
        node: Addition(
            tuple(t.name for t in node.inputs),
            to_last(image_rank(shapes, node.outputs[0])) if node in channels_last else (),
        )
        for node in graph.nodes
        if op_of(node) == "Add"
    }


def find_residuals(
    graph: Graph,
    shapes: ShapeInfo,
    before: Mapping[Node, Addition],
    bodies: Mapping[str, onnx.FunctionProto],
    originals: Mapping[str, tuple[str, Perm]],
    excluded: Collection[tuple[str, str]],
) -> list[Residual]:
    """Return the sums of a fused node and a tensor of its shape that fusing had not met as such, in execution order.

    Nothing else may read what the fused node computes.  `before` are the Adds as fusing left them, and `bodies` the
    functions of fused nodes by name.  `originals` are the tensors of the original that new ones are Transposes of.
    `excluded` are sums that stay, each by the name of the fusion and of the sum in the original.
    """
    found: list[Residual] = []
    for add in graph.nodes:
        if add not in before or tuple(t.name for t in add.inputs) == before[add].inputs:
            continue
        output = add.outputs[0].name
        original = originals[output][0] if output in originals else output
        ends = []
        for index in (0, 1):
            node, view = _product(graph, shapes, bodies, add, index)
            if node is not None and (str_attribute(node, "fusion", ""), original) not in excluded:
                other, perm = before[add].inputs[1 - index], before[add].perm
                ends.append(Residual(node, view, add, add.inputs[1 - index], other, perm, original))
        if ends:  # of two, the one that is computed last: the residual is there when it begins
            found.append(max(ends, key=lambda one: graph.position[one.product]))
    return found


def _product(
    graph: Graph, shapes: ShapeInfo, bodies: Mapping[str, onnx.FunctionProto], add: Node, index: int
) -> tuple[Node | None, Node | None]:
    """Return the fused node that can add the other operand to this one, and the Reshape behind it if there is one."""
    value, residual = add.inputs[index], add.inputs[1 - index]
    node, view = producer(value), None
    if node is not None and op_of(node) == "Reshape":
        view, node = node, producer(node.inputs[0])
    if node is None or not _takes_a_residual(node) or node.op not in bodies or is_constant(residual):
        return None, None
    if any(graph.sole_consumer(tensor) is None for tensor in (value, node.outputs[0])):
        return None, None
    shape, dtype = shapes.shape(value), shapes.dtype(value)
    if shape is None or dtype != shapes.dtype(residual):
        return None, None
    if shape != shapes.shape(residual) or shape != shapes.shape(add.outputs[0]):
        return None, None
    if view is not None and _moved_view(shapes, node, view, bodies[node.op]) is None:
        return None, None
    return node, view


def _takes_a_residual(node: Node) -> bool:
    operands = str_attribute(node, "operands", "").split() if node.domain == DOMAIN else []
    if RESIDUAL in operands or len(operands) != len(node.inputs) or len(node.outputs) != 1:
        return False
    fusion = str_attribute(node, "fusion", "")
    return fusion == PRODUCT or (fusion in CHANNELS_LAST and str_attribute(node, "layout", "nchw") == "nhwc")


def _moved_view(
    shapes: ShapeInfo, product: Node, view: Node, body: onnx.FunctionProto
) -> tuple[Shape, list[int]] | None:
    """Return the shape of x, and the target of its Reshape, if that takes the place of the one behind a product.

    None where the rows are not the same, the target is not constant, or the body is of one rank only.
    """
    x, y, result = (shapes.shape(t) for t in (product.inputs[0], product.outputs[0], view.outputs[0]))
    if str_attribute(product, "fusion", "") != PRODUCT or OPS_OF_ONE_RANK & {node.op_type for node in body.node}:
        return None
    if not (x and y and result) or y[-1] != result[-1] or len(result) < 3 or x[:-1] != y[:-1]:
        return None
    shape = (*result[:-1], x[-1])
    target = reshape_target(x, shape)
    return None if target is None else (shape, target)


def add_residuals(
    graph: Graph,
    shapes: ShapeInfo,
    residuals: Collection[Residual],
    bodies: Mapping[str, onnx.FunctionProto],
    known: Collection[str],
    originals: MutableMapping[str, tuple[str, Perm]],
    records: Mapping[str, Fused],
) -> list[Fused]:
    """Replace each fused node and its Add by one node, and return the records of these.

    `known` are the tensors that the graph had before nodes became channels-last; residuals that are new are entered in
    `originals`.  `records` are those of the fused nodes, by name.
    """
    functions, compared, made = LocalFunctions(graph), {*known, *originals}, list[Fused]()
    for one in residuals:
        product, output = one.product, one.add.outputs[0]
        if one.residual.name not in originals and one.residual.name not in known:
            originals[one.residual.name] = one.residual_before, one.perm
        inputs = [*product.inputs, one.residual]
        if one.view is not None:
            inputs[0] = _reshaped_x(graph, shapes, product, one.view, bodies[product.op], compared)
        attributes = _attributes(product, rank=len(shapes.shape(output) or ()))
        name, fusion = product.name, str_attribute(product, "fusion", "")
        body = followed_by(bodies[product.op], "Add", list(attributes), operand=RESIDUAL)
        record = records.get(name) or Fused(fusion, name, (name,), {}, one.original)
        made.append(replace(record, replaces=(*record.replaces, one.add.name or one.original), output=one.original))
        put_one_node(graph, shapes, functions, (product, one.add), product, body, inputs, attributes)
    if made:
        graph.remove_dead()
        graph.sort()
    return made


def _reshaped_x(
    graph: Graph, shapes: ShapeInfo, product: Node, view: Node, body: onnx.FunctionProto, compared: Collection[str]
) -> Tensor:
    """Return the x of a product with the rows of a Reshape behind it.

    Its Reshape takes the place of one in front of the product too, if what that reads is one of `compared`: tensors of
    which the comparison of the product with the original has the values.
    """
    moved = _moved_view(shapes, product, view, body)
    assert moved is not None  # `find_residuals` has asked
    x, (shape, target) = product.inputs[0], moved
    before = producer(x)
    if before is not None and op_of(before) == "Reshape" and graph.sole_consumer(x) is product:
        source = before.inputs[0]
        whole = reshape_target(shapes.shape(source), shape)
        if source.name in compared and shapes.shape(source) == shape:
            return source
        if source.name in compared and shapes.shape(source) is not None and whole is not None:
            x, target = source, whole
    stored = graph.constant(f"{x.name}_shape", np.array(target, np.int64))
    return emit(graph, shapes, "Reshape", [x, stored], f"{x.name}_moved", shape, shapes.dtype(x))


def _attributes(product: Node, rank: int) -> dict[str, AttributeValue]:
    """Return the attributes that fusing writes where a residual follows."""
    own: dict[str, AttributeValue] = {"output_ranks": [rank]}
    if str_attribute(product, "fusion", "") in CHANNELS_LAST:
        has_activation = str_attribute(product, "activation", "none") != "none"
        own["residual_position"] = "after" if has_activation else "before"
    names = {*str_attribute(product, "attributes", "").split(), *own}
    operands = f"{str_attribute(product, 'operands', '')} {RESIDUAL}"
    return {**product.attrs, "operands": operands, "attributes": " ".join(sorted(names)), **own}
