"""How a node becomes channels-last: the answer of a rule, and the code that rules share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import onnx
import onnx.numpy_helper

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant
from onnxfuse.ir.serde import node_proto
from onnxfuse.layout.axes import to_last
from onnxfuse.layout.bodies import Body, body_of_node
from onnxfuse.layout.writer import ImageCall, Writer, image_rank

Layout: TypeAlias = Literal["auto", "nchw", "nhwc"]


class Kind(Enum):
    """What becoming channels-last is to a node."""

    CONVOLUTION = auto()  # it gains by that
    WRAPPED = auto()  # its function transposes, and it has a kernel that does not
    NEUTRAL = auto()  # its operator computes the same in either layout


@dataclass(frozen=True)
class Conversion:
    """A node that can be one of channels-last tensors.

    `reads` and `computes` are the indices of the inputs and outputs that become channels-last.  Inputs in
    `reads_either` are read in the layout in which they are computed.
    """

    node: Node
    kind: Kind
    reads: tuple[int, ...]
    computes: tuple[int, ...]
    write: Callable[[Writer], None]
    reads_either: tuple[int, ...] = ()
    fusion: str = ""  # the fusion of the node that it becomes; "" where it stays an operator


@dataclass(frozen=True)
class LayoutOptions:
    """How layouts are assigned: `layout` is as in `optimize`.

    `channels_last` names for each fusion that has a channels-last form the operands that it reads channels-last.
    `exclude` holds nodes that stay channels-first, each by LAYOUT and the name of its first output, and what joins no
    fused node, by the name of that node's fusion and of the output.  `left_out` are fusions that layouts do not make.
    """

    layout: Layout
    channels_last: Mapping[str, Sequence[str]]
    exclude: Collection[tuple[str, str]] = frozenset()
    left_out: Collection[str] = frozenset()


@dataclass(frozen=True)
class Model:
    """A sorted graph and its shapes; `functions` are the functions that fused nodes call, by name."""

    graph: Graph
    shapes: ShapeInfo
    functions: Mapping[str, onnx.FunctionProto]
    options: LayoutOptions


# Returns the conversion of a node, or why it stays channels-first: the end of a sentence that begins with the node.
# None leaves that to the operator's next rule.
Rule: TypeAlias = Callable[[Model, Node], "Conversion | str | None"]
Made: TypeAlias = Callable[[Writer], Tensor]  # writes an operand
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
    """Return the conversion to the same operator, which computes images from the inputs `reads`.

    `attributes` replace those of the node; one of None is removed.  `operands` are other inputs, by index.  With
    `broadcasts`, other constant inputs are broadcast to the images.  Without `computes` every output is an image.
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
    """Return an operand that is a constant."""
    return lambda writer: writer.graph.constant(stem, value)


def fused_node(node: Node, call: ImageCall, images: Collection[str], kind: Kind = Kind.WRAPPED) -> Conversion:
    """Return the conversion to a fused node, whose operands in `images` become channels-last."""

    def write(writer: Writer) -> None:
        given = {name: writer.image(tensor) if name in images else tensor for name, tensor in call.operands.items()}
        perms = {name: to_last(image_rank(writer.shapes, call.operands[name])) for name in images}
        writer.call(node, replace(call, operands=given, perms={} if call.is_channels_last else perms))

    read = {call.operands[name].name for name in images}
    reads = tuple(i for i, tensor in enumerate(node.inputs) if tensor.name in read)
    computes = tuple(range(len(call.body.outputs))) if call.attributes.get("keepdims", 1) else ()
    return Conversion(node, kind, reads, computes, write, fusion=call.fusion)


def body_of(model: Model, node: Node, operands: Mapping[str, Tensor]) -> Body | str:
    """Return a body that holds only this node and its constants, with `operands` as inputs; or why there is none."""
    names = {tensor.name: name for name, tensor in operands.items()}
    if len(names) < len(operands):
        return "it reads one tensor twice"
    return body_of_node(node_proto(model.graph, node), names, constants_of(model, node, names), model.graph.opset)


def constants_of(model: Model, node: Node, besides: Collection[str]) -> list[onnx.TensorProto]:
    """Return the constants that a node reads, but for tensors of these names."""
    others = {t.name: t for t in node.inputs if t.name and t.name not in besides and is_constant(t)}
    return [onnx.numpy_helper.from_array(constant_value(model.graph, t), name) for name, t in others.items()]
