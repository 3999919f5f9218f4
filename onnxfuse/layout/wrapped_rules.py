"""Nodes whose channels-last form is a function that transposes: convolutions, pools, Resize, and norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import onnx
import onnx.numpy_helper

from onnxfuse.analysis.shape_info import Shape
from onnxfuse.ir.attributes import int_attribute, ints_attribute, str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import AttributeValue, Constant, Node, Tensor, is_constant, op_of, producer
from onnxfuse.ir.serde import node_proto
from onnxfuse.layout.axes import (
    Perm,
    WeightLayout,
    has_one_pixel,
    spatial_axes,
    to_first,
    to_last,
    weight_perm,
)
from onnxfuse.layout.bodies import Body, body_of_function, body_of_node
from onnxfuse.layout.channel_rules import CHANNEL_RULES
from onnxfuse.layout.conversion import Conversion, Kind, Model, Rule, not_a_convolution, same_operator
from onnxfuse.layout.fusions import CONVOLUTION, GATE, TRANSPOSED_CONVOLUTION
from onnxfuse.layout.neutral_rules import NEUTRAL_RULES, NOT_AN_IMAGE, integers, reduction
from onnxfuse.layout.resize_rules import resize
from onnxfuse.layout.transposed_rules import conv_transpose, fused_conv_transpose
from onnxfuse.layout.writer import Writer, image_rank

MAX_BLOCK: Final = 8  # pixels of a side of the blocks of DepthToSpace and SpaceToDepth that there is a kernel for
NORM: Final = "group_norm"  # whose kernel takes what follows it
MAX_STEM_CHANNELS: Final = 4  # of an image that a convolution reads channels-first: a Transpose would cost more
# Fusions that compute element by element, unless they read slices: their functions stay as they are.
NEUTRAL_FUSIONS: Final = frozenset({"activation", "gated_activation"})


# --- convolutions ------------------------------------------------------------------------------------------------


def convolution(model: Model, node: Node) -> Conversion | str:
    """A Conv becomes a conv_bias_activation without an activation."""
    reason = not_a_convolution(model, dict(zip("xw", node.inputs, strict=False)), node.outputs[0])
    if reason:
        return reason
    bias = len(node.inputs) > 2 and bool(node.inputs[2].name)
    if bias and not is_constant(node.inputs[2]):
        return f"its bias '{node.inputs[2].name}' is not constant"
    operands = {"x": node.inputs[0], "w": node.inputs[1]} | ({"bias": node.inputs[2]} if bias else {})
    names = {tensor.name: name for name, tensor in operands.items()}
    if len(names) < len(operands):
        return "it reads one tensor twice"
    body = body_of_node(node_proto(model.graph, node), names, (), model.graph.opset)
    own: dict[str, AttributeValue] = {**node.attrs, "activation": "none"}
    if isinstance(filters := node.inputs[1].shape[0] if is_constant(node.inputs[1]) else None, int):
        own["m"] = filters
    return _convolution(node, operands, body, own)


def fused_convolution(model: Model, node: Node) -> Conversion | str:
    """A fused node keeps its attributes."""
    operands = _operands(node)
    if reason := not_a_convolution(model, operands, node.outputs[0]):
        return reason
    return _convolution(node, operands, body_of_function(model.functions[node.op]), node.attrs)


def _convolution(
    node: Node, operands: Mapping[str, Tensor], body: Body, attributes: Mapping[str, AttributeValue]
) -> Conversion:
    w, group = operands["w"], int_attribute(node, "group", 1)
    assert is_constant(w)
    filters, depth = w.shape[:2]
    is_stem = group == 1 and depth <= MAX_STEM_CHANNELS and not _is_transposed(operands["x"])
    w_layout: WeightLayout = "hwio" if depth == 1 and filters == group > 1 else "ohwi"
    index = {name: i for i, name in enumerate(operands)}

    def write(writer: Writer) -> None:
        x_first = is_stem and not writer.is_computed_last(operands["x"])
        own: dict[str, AttributeValue] = {**attributes, "w_layout": w_layout}
        if x_first:
            own["x_layout"] = "nchw"
        perms: dict[str, Perm] = {"w": weight_perm(w_layout, len(w.shape))}
        given = {**operands, "w": writer.weight(w, w_layout)}
        for name in ("x", "residual"):
            if name in given and not (name == "x" and x_first):
                given[name], perms[name] = writer.image(given[name]), to_last(len(w.shape))
        writer.call(node, CONVOLUTION, body, given, perms, own)

    reads = tuple(index[name] for name in ("x", "residual") if name in index and not (name == "x" and is_stem))
    return Conversion(node, Kind.CONVOLUTION, reads, (0,), write, reads_either=(index["x"],) if is_stem else ())


def _is_transposed(tensor: Tensor) -> bool:
    """Return whether the model computes a tensor channels-last, and a Transpose makes it channels-first."""
    node = producer(tensor)
    perm = ints_attribute(node, "perm") if node is not None and op_of(node) == "Transpose" else None
    return perm is not None and perm == list(to_first(len(perm)))


# --- fused nodes -------------------------------------------------------------------------------------------------


def fused(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a fused node, by the name of its fusion."""
    fusion = str_attribute(node, "fusion", "")
    if node.op not in model.functions:
        return "the model does not have the function that it calls"
    if node.attrs.get("layout", "nchw") != "nchw":
        return "it is channels-last already"
    if fusion in NEUTRAL_FUSIONS:
        return _element_by_element(model, node)
    if fusion == CONVOLUTION:
        return fused_convolution(model, node)
    if fusion == TRANSPOSED_CONVOLUTION:
        return fused_conv_transpose(model, node)
    operands = _operands(node)
    images = [name for name in model.channels_last.get(fusion, ()) if name in operands]
    if not images or len(node.outputs) != 1:
        return "its fusion has no channels-last form"
    if not all(image_rank(model.shapes, tensor) for tensor in (*(operands[name] for name in images), *node.outputs)):
        return NOT_AN_IMAGE
    return _wrapped(node, fusion, operands, images, body_of_function(model.functions[node.op]), node.attrs)


def _element_by_element(model: Model, node: Node) -> Conversion | str:
    """All operands are images of one rank; the attribute d, where there is one, is the size of their last axis."""
    if any(name.endswith("_offset") for name in node.attrs):
        return "it reads slices of its last axis"
    ranks = {image_rank(model.shapes, tensor) for tensor in (*node.inputs, *node.outputs)}
    if len(ranks) > 1 or 0 in ranks:
        return NOT_AN_IMAGE
    shape = model.shapes.shape(node.outputs[0])
    changed = {"d": shape[1]} if shape is not None and "d" in node.attrs and isinstance(shape[1], int) else {}
    if "d" in node.attrs and not changed:
        return "its number of channels is not known"
    return same_operator(node, tuple(range(len(node.inputs))), attributes=changed or None)


def _operands(node: Node) -> dict[str, Tensor]:
    return dict(zip(str_attribute(node, "operands", "").split(), node.inputs, strict=True))


def _wrapped(
    node: Node, fusion: str, operands: Mapping[str, Tensor], images: Sequence[str], body: Body,
    attributes: Mapping[str, AttributeValue], kind: Kind = Kind.WRAPPED,
) -> Conversion:  # fmt: skip
    def write(writer: Writer) -> None:
        given = {name: writer.image(tensor) if name in images else tensor for name, tensor in operands.items()}
        perms = {name: to_last(image_rank(writer.shapes, operands[name])) for name in images}
        writer.call(node, fusion, body, given, perms, attributes)

    images_read = {operands[name].name for name in images}
    reads = tuple(i for i, tensor in enumerate(node.inputs) if tensor.name in images_read)
    return Conversion(node, kind, reads, (0,) if attributes.get("keepdims", 1) else (), write, fusion=fusion)


# --- pools, Resize, scales of channels ---------------------------------------------------------------------------


def max_pool(model: Model, node: Node) -> Conversion | str:
    """Indices, the second output, count channels-first elements."""
    if any(tensor.name and (tensor.outputs or model.graph.is_kept(tensor)) for tensor in node.outputs[1:]):
        return "its second output is read"
    return _of_image(model, node, "max_pool")


def _of_image(model: Model, node: Node, fusion: str) -> Conversion | str:
    """An operator of one image becomes a node of that fusion with the same attributes."""
    if not image_rank(model.shapes, node.inputs[0]) or model.shapes.dtype(node.inputs[0]) not in FUSIBLE_FLOATS:
        return NOT_AN_IMAGE
    return _wrapped_operator(model, node, fusion, node.attrs)


def blocks_of_pixels(model: Model, node: Node, fusion: str) -> Conversion | str:
    """A DepthToSpace or SpaceToDepth, of blocks that a thread can hold."""
    size = int_attribute(node, "blocksize", 1)
    if size > MAX_BLOCK:
        return f"its blocks have {size} x {size} pixels; the kernel takes up to {MAX_BLOCK} x {MAX_BLOCK}"
    return _of_image(model, node, fusion)


def _reduced(model: Model, node: Node, fusion: str) -> Conversion | str:
    """A reduction over all spatial axes becomes a pool of whole images; others are neutral."""
    if not (rank := image_rank(model.shapes, node.inputs[0])):
        return NOT_AN_IMAGE
    is_global = {axis % rank for axis in integers(model, node, "axes") or ()} == spatial_axes(rank)
    is_float = model.shapes.dtype(node.inputs[0]) in FUSIBLE_FLOATS
    if not (is_global and is_float):
        return reduction(model, node)
    keepdims = int_attribute(node, "keepdims", 1)
    return _wrapped_operator(model, node, fusion, {} if keepdims else {"keepdims": 0})


def batch_norm(model: Model, node: Node) -> Conversion | str:
    """A BatchNormalization that could not be folded becomes a batch_norm_activation without an activation."""
    if not image_rank(model.shapes, node.inputs[0]) or model.shapes.dtype(node.inputs[0]) not in FUSIBLE_FLOATS:
        return NOT_AN_IMAGE
    if len(node.outputs) > 1 or int_attribute(node, "training_mode", 0):
        return "it is in training mode"
    operands = dict(zip(("x", "scale", "bias", "mean", "var"), node.inputs, strict=True))
    names = {tensor.name: name for name, tensor in operands.items()}
    if len(names) < len(operands):
        return "it reads one tensor twice"
    epsilon = node.attrs.get("epsilon", 1e-5)
    body = body_of_node(node_proto(model.graph, node), names, (), model.graph.opset)
    return _wrapped(node, "batch_norm_activation", operands, ["x"], body, {"activation": "none", "epsilon": epsilon})


def _wrapped_operator(model: Model, node: Node, fusion: str, attributes: Mapping[str, AttributeValue]) -> Conversion:
    """Return the conversion of an operator of one image, whose other inputs are constants that its body holds."""
    graph, x = model.graph, node.inputs[0]
    others: dict[str, Constant] = {t.name: t for t in node.inputs[1:] if t.name and is_constant(t)}
    constants = [onnx.numpy_helper.from_array(constant_value(graph, t), name) for name, t in others.items()]
    proto = node_proto(graph, node)
    del proto.output[1:]
    body = body_of_node(proto, {x.name: "x"}, constants, graph.opset)
    return _wrapped(node, fusion, {"x": x}, ["x"], body, attributes)


def mul(model: Model, node: Node) -> Conversion | str:
    """An image times one number for each of its channels is a channel_scale; other products are neutral.

    So are those that alone read the result of a norm, as in FiLM and AdaIN: the norm's kernel can compute them with the
    Add that follows.
    """
    a, b = node.inputs
    shapes = model.shapes
    if image_rank(shapes, a) == image_rank(shapes, b) > 0 and shapes.dtype(a) in FUSIBLE_FLOATS:
        for x, gate in ((a, b), (b, a)):
            if _is_gate_of(shapes.shape(x), shapes.shape(gate)) and not _follows_a_norm(model, node, x):
                body = body_of_node(
                    node_proto(model.graph, node), {x.name: "x", gate.name: "gate"}, (), model.graph.opset
                )
                operands = {"x": x, "gate": gate}
                attributes: dict[str, AttributeValue] = {"activation": "none"}
                return _wrapped(node, GATE, operands, list(operands), body, attributes, Kind.NEUTRAL)
    return NEUTRAL_RULES["Mul"](model, node)


def _follows_a_norm(model: Model, node: Node, x: Tensor) -> bool:
    norm = producer(x)
    is_norm = norm is not None and norm.domain == DOMAIN and str_attribute(norm, "fusion", "") == NORM
    return is_norm and model.graph.sole_consumer(x) is node


def _is_gate_of(image: Shape | None, gate: Shape | None) -> bool:
    if image is None or gate is None or not has_one_pixel(gate) or has_one_pixel(image):
        return False
    return gate[:2] == image[:2]


WRAPPED_RULES: Final[dict[str, Rule]] = {
    "AveragePool": partial(_of_image, fusion="average_pool"),
    "BatchNormalization": batch_norm,
    "Conv": convolution,
    "ConvTranspose": conv_transpose,
    "DepthToSpace": partial(blocks_of_pixels, fusion="depth_to_space"),
    "GlobalAveragePool": partial(_of_image, fusion="global_average_pool"),
    "GlobalMaxPool": partial(_of_image, fusion="global_max_pool"),
    "MaxPool": max_pool,
    "Mul": mul,
    "ReduceMax": partial(_reduced, fusion="global_max_pool"),
    "ReduceMean": partial(_reduced, fusion="global_average_pool"),
    "Resize": resize,
    "SpaceToDepth": partial(blocks_of_pixels, fusion="space_to_depth"),
    "Upsample": resize,
}


def conversion(model: Model, node: Node) -> Conversion | str:
    """Return how a node becomes channels-last, or why it stays channels-first: the end of a sentence."""
    if node.domain == DOMAIN:
        return fused(model, node)
    op = op_of(node)
    rule = WRAPPED_RULES.get(op) or CHANNEL_RULES.get(op) or NEUTRAL_RULES.get(op)
    if rule is None or not node.inputs or not node.outputs:
        return "its operator has no channels-last form"
    found = rule(model, node)
    if isinstance(found, str) or found.fusion not in model.left_out:
        return found
    return NEUTRAL_RULES[op](model, node) if op in NEUTRAL_RULES else f"the fusion {found.fusion} is left out"
