"""Transposed convolutions of images: functions that transpose, with kernels that do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxfuse.ir.attributes import int_attribute, str_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS, dtype_name
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant
from onnxfuse.ir.serde import node_proto
from onnxfuse.layout.axes import RANK, TO_LAST, WEIGHT_PERMS, Perm
from onnxfuse.layout.bodies import Body, body_of_function, body_of_node
from onnxfuse.layout.conversion import Conversion, Kind, Model
from onnxfuse.layout.writer import Writer, is_image_sized

TRANSPOSED_CONVOLUTION: Final = "conv_transpose_bias_activation"


def conv_transpose(model: Model, node: Node) -> Conversion | str:
    """A ConvTranspose becomes a conv_transpose_bias_activation without an activation."""
    operands = {name: t for name, t in zip(("x", "w", "bias"), node.inputs, strict=False) if t.name}
    if "bias" in operands and not is_constant(operands["bias"]):
        return f"its bias '{operands['bias'].name}' is no constant"
    names = {tensor.name: name for name, tensor in operands.items()}
    if len(names) < len(operands):
        return "it reads one tensor twice"
    body = body_of_node(node_proto(model.graph, node), names, (), model.graph.opset)
    own: dict[str, AttributeValue] = {**node.attrs, "activation": "none"}
    if is_constant(w := operands["w"]):
        own["m"] = w.shape[1] * int_attribute(node, "group", 1)
    return _conversion(model, node, operands, body, own)


def fused_conv_transpose(model: Model, node: Node) -> Conversion | str:
    """A fused node keeps its attributes."""
    operands = dict(zip(str_attribute(node, "operands", "").split(), node.inputs, strict=True))
    if "residual" in operands and not is_image_sized(model.shapes, operands["residual"]):
        return f"its residual '{operands['residual'].name}' is no computed tensor of four axes"
    return _conversion(model, node, operands, body_of_function(model.functions[node.op]), node.attrs)


def _conversion(
    model: Model, node: Node, operands: Mapping[str, Tensor], body: Body, attributes: Mapping[str, AttributeValue]
) -> Conversion | str:
    x, w, shapes = operands["x"], operands["w"], model.shapes
    if not is_constant(w):
        return f"its weights '{w.name}' are no constant"
    if not len(w.shape) == shapes.rank(x) == shapes.rank(node.outputs[0]) == RANK:
        return f"it has {len(w.shape) - 2} spatial axes, not 2"
    if is_constant(x):
        return "its image is a constant"
    if (dtype := shapes.dtype(x)) not in FUSIBLE_FLOATS:
        return f"it computes in {dtype_name(dtype)}"
    # Weights are (channels, filters / group, height, width); in a depthwise one, those of all channels lie together.
    is_depthwise = w.shape[1] == 1 and w.shape[0] == int_attribute(node, "group", 1) > 1
    w_layout = "hwoi" if is_depthwise else "ihwo"
    images = [name for name in ("x", "residual") if name in operands]

    def write(writer: Writer) -> None:
        given = {**operands, "w": writer.weight(w, w_layout), **{name: writer.image(operands[name]) for name in images}}
        perms: dict[str, Perm] = {**dict.fromkeys(images, TO_LAST), "w": WEIGHT_PERMS[w_layout]}
        writer.call(node, TRANSPOSED_CONVOLUTION, body, given, perms, {**attributes, "w_layout": w_layout})

    reads = tuple(i for i, name in enumerate(operands) if name in images)
    return Conversion(node, Kind.CONVOLUTION, reads, (0,), write)
