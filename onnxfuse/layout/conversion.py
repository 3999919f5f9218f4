"""Conversions of nodes to channels-last, which the rules return, and helper functions that the rules share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import onnx

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_value, take_name
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant
from onnxfuse.ir.serde import node_proto
from onnxfuse.layout.bodies import body_of_node
from onnxfuse.layout.writer import ImageCall, Writer, image_rank

Layout: TypeAlias = Literal["auto", "nchw", "nhwc"]


class Kind(Enum):
    """The ways in which a node becomes channels-last."""

    CONVOLUTION = auto()  # the node is a convolution, which becomes faster
    WRAPPED = auto()  # the function of the fused node has Transposes, but its kernel needs none
    NEUTRAL = auto()  # the same operator works in either layout


@dataclass(frozen=True)
class Conversion:
    """A rule's answer: a node that can become channels-last, and how.

    `reads` and `computes` are the indices of the inputs and outputs that become channels-last.  Inputs in
    `reads_either` are read in the layout in which they are computed.
    """

    node: Node
    kind: Kind
    reads: tuple[int, ...]
    computes: tuple[int, ...]
    write: Callable[[Writer], None]
    reads_either: tuple[int, ...] = ()
    fusion: str = ""  # fusion of the fused node that replaces the node; "" if the node stays an operator


@dataclass(frozen=True)
class LayoutOptions:
    """How layouts are assigned; `layout` has the same values as in `optimize`.

    `channels_last` maps each fusion with a channels-last form to the operands that it reads channels-last.  `exclude`
    holds (LAYOUT, name of the first output) for nodes that stay channels-first.  It also holds (fusion of the fused
    node, name of the output) for operators that must not join that node.  `left_out` holds fusions that must not be
    created.
    """

    layout: Layout
    channels_last: Mapping[str, Sequence[str]]
    exclude: Collection[tuple[str, str]] = frozenset()
    left_out: Collection[str] = frozenset()


@dataclass(frozen=True)
class Model:
    """A sorted graph and its shapes; `functions` maps names to the functions that fused nodes call."""

    graph: Graph
    shapes: ShapeInfo
    functions: Mapping[str, onnx.FunctionProto]
    options: LayoutOptions


# A rule returns the conversion of a node; or why it stays channels-first, as the end of a sentence that begins with the
# node; or None, to let the operator's next rule decide.
Rule: TypeAlias = Callable[[Model, Node], "Conversion | str | None"]
Made: TypeAlias = Callable[[Writer], Tensor]  # a function that writes an operand and returns it
NOT_AN_IMAGE: Final = "it reads no computed tensor of three to five axes"


def same_operator(
    node: Node,
    reads: tuple[int, ...] = (0,),
    *,
    attributes: Mapping[str, AttributeValue | None] | None = None,
    operands: Mapping[int, Made] = MappingProxyType({}),
    broadcasts: bool = False,
    computes: tuple[int, ...] | None = None,
) -> Conversion:
    """Return the conversion to the same operator, which reads channels-last images as its inputs `reads`.

    `attributes` replaces attributes of the node; None removes one.  `operands` replaces other inputs, by index.  With
    `broadcasts`, the remaining constant inputs are broadcast to the images.  Without `computes`, every output is an
    image.
    """
    if computes is None:
        computes = tuple(i for i, tensor in enumerate(node.outputs) if tensor.name)

    def write(writer: Writer) -> None:
        inputs = list(node.inputs)
        for i, tensor in enumerate(node.inputs):
            if i in reads:
                inputs[i] = writer.image(tensor)
            elif broadcasts and is_constant(tensor):
                inputs[i] = writer.broadcast(tensor, image_rank(writer.shapes, node.outputs[0]))
        for i, made in operands.items():
            inputs[i : i + 1] = [made(writer)]
        outputs = [writer.computed(tensor) if i in computes else tensor for i, tensor in enumerate(node.outputs)]
        writer.rewrite(node, inputs, outputs, attributes)

    return Conversion(node, Kind.NEUTRAL, reads, computes, write)


def stored(stem: str, value: Array) -> Made:
    """Return a function that writes a constant operand with this value."""
    return lambda writer: writer.graph.constant(stem, value)


def fused_node(node: Node, call: ImageCall) -> Conversion:
    """Return the conversion to a call of a fused node."""

    def write(writer: Writer) -> None:
        writer.call(node, call)

    kind = Kind.NEUTRAL if call.is_deferred else Kind.WRAPPED
    read = {call.operands[name].name for name in call.images}
    reads = tuple(i for i, tensor in enumerate(node.inputs) if tensor.name in read)
    computes = tuple(range(len(call.body.output))) if call.attributes.get("keepdims", 1) else ()
    return Conversion(node, kind, reads, computes, write, fusion=call.fusion)


def body_of(model: Model, node: Node, operands: Mapping[str, Tensor]) -> onnx.FunctionProto:
    """Return a body with this node, its constants, and the inputs `operands`.

    Where the node reads one tensor several times, its operands must be in the order of these inputs.
    """
    proto, names = node_proto(model.graph, node), dict[str, str]()
    taken = set(proto.input)
    for name, tensor in operands.items():
        key = tensor.name
        if key in names:
            _, again, *_ = (i for i, given in enumerate(proto.input) if given == key)
            proto.input[again] = key = take_name(taken, key)
        names[key] = name
    return body_of_node(proto, names, constants_of(model, node, names), model.graph.opset)


def constants_of(model: Model, node: Node, besides: Collection[str]) -> dict[str, Array]:
    """Return the values of the constants that a node reads, by name, except the tensors named in `besides`."""
    others = (t for t in node.inputs if t.name and t.name not in besides and is_constant(t))
    return {t.name: constant_value(model.graph, t) for t in others}
