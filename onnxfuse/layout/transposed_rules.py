"""Transposed convolutions of images: functions that transpose, with kernels that do not."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.ir.attributes import int_attribute, str_attribute
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant
from onnxfuse.ir.serde import node_proto
from onnxfuse.layout.axes import Perm, WeightLayout, to_last, weight_perm
from onnxfuse.layout.bodies import Body, body_of_function, body_of_node
from onnxfuse.layout.conversion import Conversion, Kind, Model, not_a_convolution
from onnxfuse.layout.fusions import TRANSPOSED_CONVOLUTION
from onnxfuse.layout.writer import Writer


def conv_transpose(model: Model, node: Node) -> Conversion | str:
    """A ConvTranspose becomes a conv_transpose_bias_activation without an activation."""
    operands = {name: t for name, t in zip(("x", "w", "bias"), node.inputs, strict=False) if t.name}
    if reason := not_a_convolution(model, operands, node.outputs[0]):
        return reason
    if "bias" in operands and not is_constant(operands["bias"]):
        return f"its bias '{operands['bias'].name}' is not constant"
    names = {tensor.name: name for name, tensor in operands.items()}
    if len(names) < len(operands):
        return "it reads one tensor twice"
    body = body_of_node(node_proto(model.graph, node), names, (), model.graph.opset)
    own: dict[str, AttributeValue] = {**node.attrs, "activation": "none"}
    if is_constant(w := operands["w"]):
        own["m"] = w.shape[1] * int_attribute(node, "group", 1)
    return _conversion(node, operands, body, own)


def fused_conv_transpose(model: Model, node: Node) -> Conversion | str:
    """A fused node keeps its attributes."""
    operands = dict(zip(str_attribute(node, "operands", "").split(), node.inputs, strict=True))
    if reason := not_a_convolution(model, operands, node.outputs[0]):
        return reason
    return _conversion(node, operands, body_of_function(model.functions[node.op]), node.attrs)


def _conversion(
    node: Node, operands: Mapping[str, Tensor], body: Body, attributes: Mapping[str, AttributeValue]
) -> Conversion:
    w = operands["w"]
    assert is_constant(w)
    # Weights are (channels, filters / group, spatial...); in a depthwise one, those of all channels lie together.
    is_depthwise = w.shape[1] == 1 and w.shape[0] == int_attribute(node, "group", 1) > 1
    w_layout: WeightLayout = "hwoi" if is_depthwise else "ihwo"
    images = [name for name in ("x", "residual") if name in operands]

    def write(writer: Writer) -> None:
        given = {**operands, "w": writer.weight(w, w_layout), **{name: writer.image(operands[name]) for name in images}}
        rank = len(w.shape)
        perms: dict[str, Perm] = {**dict.fromkeys(images, to_last(rank)), "w": weight_perm(w_layout, rank)}
        writer.call(node, TRANSPOSED_CONVOLUTION, body, given, perms, {**attributes, "w_layout": w_layout})

    reads = tuple(i for i, name in enumerate(operands) if name in images)
    return Conversion(node, Kind.CONVOLUTION, reads, (0,), write)
