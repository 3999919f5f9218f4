"""Channels-last rules for all operators.

An operator becomes a fused node that has a kernel, or remains the same operator on channels-last images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from onnx import TensorProto

from onnxfuse.algebra.sizes import Shape
from onnxfuse.ir.attributes import int_attribute, str_attribute
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.node import AttributeValue, Node, Tensor, op_of, producer
from onnxfuse.layout.axes import has_one_pixel, spatial_axes
from onnxfuse.layout.channel_rules import concat, split
from onnxfuse.layout.conversion import (
    NOT_AN_IMAGE,
    Conversion,
    Model,
    Rule,
    body_of,
    fused_node,
    same_operator,
)
from onnxfuse.layout.convolutions import convolution, fused_convolution
from onnxfuse.layout.fusions import CONVOLUTIONS, GATE
from onnxfuse.layout.neutral_rules import NEUTRAL_RULES, integers, second_is_read
from onnxfuse.layout.resize_rules import MOVED_INTEGERS, resize
from onnxfuse.layout.writer import ImageCall, image_rank

BFLOAT16_OPSET: Final = 13  # the first opset whose Transpose takes bfloat16
MAX_BLOCK: Final = 8  # largest block side, in pixels, for which DepthToSpace and SpaceToDepth have a kernel
NORM: Final = "group_norm"  # a fusion whose kernel can compute the operators that follow, as an epilogue
# Elementwise fusions: unless they read slices, their functions work unchanged in either layout.
NEUTRAL_FUSIONS: Final = frozenset({"activation", "gated_activation"})


# --- fused nodes -------------------------------------------------------------------------------------------------


def is_channels_last(node: Node) -> bool:
    """Return whether a fused node reads channels-last images."""
    return node.attrs.get("layout", "nchw") != "nchw"


def fused(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a fused node, or why it stays channels-first; this depends on its fusion."""
    fusion = str_attribute(node, "fusion", "")
    if node.op not in model.functions:
        return "the model does not have the function that it calls"
    if is_channels_last(node):
        return "it is channels-last already"
    if fusion in NEUTRAL_FUSIONS:
        return _element_by_element(model, node)
    operands = dict(zip(str_attribute(node, "operands", "").split(), node.inputs, strict=True))
    if fusion in CONVOLUTIONS:
        return fused_convolution(model, node, operands)
    images = [name for name in model.options.channels_last.get(fusion, ()) if name in operands]
    if not images or len(node.outputs) != 1:
        return "its fusion has no channels-last form"
    if not all(image_rank(model.shapes, tensor) for tensor in (*(operands[name] for name in images), *node.outputs)):
        return NOT_AN_IMAGE
    return fused_node(node, ImageCall(fusion, model.functions[node.op], operands, node.attrs, images))


def _element_by_element(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of an elementwise fused node, or why the node stays channels-first.

    All operands must be images of one rank.  The attribute d, if there is one, is the size of their last axis.
    """
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


# --- pools, Resize, scales of channels ---------------------------------------------------------------------------


def _of_image(
    model: Model, node: Node, fusion: str, why_not: Callable[[Model, Node], str] = lambda model, node: ""
) -> Conversion | str:
    """Return the conversion of an operator that reads one image to this fusion, unless `why_not` returns a reason."""
    if reason := why_not(model, node):
        return reason
    dtypes = FUSIBLE_FLOATS | MOVED_INTEGERS if op_of(node) == "MaxPool" else FUSIBLE_FLOATS
    if not image_rank(model.shapes, node.inputs[0]) or model.shapes.dtype(node.inputs[0]) not in dtypes:
        return NOT_AN_IMAGE
    return _fused(model, node, fusion, {"x": node.inputs[0]}, node.attrs)


def _has_large_blocks(model: Model, node: Node) -> str:
    """Return why a DepthToSpace or SpaceToDepth with large blocks has no kernel (a thread holds one block); else ""."""
    size = int_attribute(node, "blocksize", 1)
    too_large = f"its blocks have {size} x {size} pixels; the kernel takes up to {MAX_BLOCK} x {MAX_BLOCK}"
    return too_large if size > MAX_BLOCK else ""


def _reduced(model: Model, node: Node, fusion: str) -> Conversion | str | None:
    """Return the conversion of a reduction over all spatial axes to a global pool."""
    rank, x = image_rank(model.shapes, node.inputs[0]), node.inputs[0]
    is_global = rank and {axis % rank for axis in integers(model, node, "axes") or ()} == spatial_axes(rank)
    if not is_global or model.shapes.dtype(x) not in FUSIBLE_FLOATS:
        return None
    return _fused(model, node, fusion, {"x": x}, {} if int_attribute(node, "keepdims", 1) else {"keepdims": 0})


def batch_norm(model: Model, node: Node) -> Conversion | str:
    """Return the conversion to a batch_norm_activation, for a BatchNormalization that could not be folded."""
    if not image_rank(model.shapes, node.inputs[0]) or model.shapes.dtype(node.inputs[0]) not in FUSIBLE_FLOATS:
        return NOT_AN_IMAGE
    if len(node.outputs) > 1 or int_attribute(node, "training_mode", 0):
        return "it is in training mode"
    operands = dict(zip(("x", "scale", "bias", "mean", "var"), node.inputs, strict=True))
    own: dict[str, AttributeValue] = {"activation": "none", "epsilon": node.attrs.get("epsilon", 1e-5)}
    return _fused(model, node, "batch_norm_activation", operands, own)


def mul(model: Model, node: Node) -> Conversion | str | None:
    """Return the conversion of a Mul of an image by one number per channel to a channel_scale.

    A Mul that is the only reader of a norm's result, as in FiLM and AdaIN, stays: the norm's kernel can compute the Mul
    together with the Add that follows.
    """
    shapes, (a, b) = model.shapes, node.inputs
    if image_rank(shapes, a) == image_rank(shapes, b) > 0 and shapes.dtype(a) in FUSIBLE_FLOATS:
        for x, gate in ((a, b), (b, a)):
            if _is_gate_of(shapes.shape(x), shapes.shape(gate)) and not _follows_a_norm(model, node, x):
                return _fused(model, node, GATE, {"x": x, "gate": gate}, {"activation": "none"})
    return None


def _fused(
    model: Model, node: Node, fusion: str, operands: Mapping[str, Tensor], attributes: Mapping[str, AttributeValue]
) -> Conversion:
    """Return the conversion of a node to a fused node whose body (the ONNX function that it calls) is the operator."""
    body, is_gate = body_of(model, node, operands), fusion == GATE
    images = list(operands) if is_gate else ["x"]
    return fused_node(node, ImageCall(fusion, body, operands, attributes, images, is_deferred=is_gate))


def _follows_a_norm(model: Model, node: Node, x: Tensor) -> bool:
    norm = producer(x)
    is_norm = norm is not None and norm.domain == DOMAIN and str_attribute(norm, "fusion", "") == NORM
    return is_norm and model.graph.sole_consumer(x) is node


def _is_gate_of(image: Shape | None, gate: Shape | None) -> bool:
    if image is None or gate is None or not has_one_pixel(gate) or has_one_pixel(image):
        return False
    return gate[:2] == image[:2]


FUSED_RULES: Final[dict[str, Rule]] = {
    "AveragePool": partial(_of_image, fusion="average_pool"),
    "BatchNormalization": batch_norm,
    "Concat": concat,
    "Conv": convolution,
    "ConvTranspose": convolution,
    "DepthToSpace": partial(_of_image, fusion="depth_to_space", why_not=_has_large_blocks),
    "GlobalAveragePool": partial(_of_image, fusion="global_average_pool"),
    "GlobalMaxPool": partial(_of_image, fusion="global_max_pool"),
    "MaxPool": partial(_of_image, fusion="max_pool", why_not=second_is_read),
    "Mul": mul,
    "ReduceMax": partial(_reduced, fusion="global_max_pool"),
    "ReduceMean": partial(_reduced, fusion="global_average_pool"),
    "Resize": resize,
    "SpaceToDepth": partial(_of_image, fusion="space_to_depth", why_not=_has_large_blocks),
    "Split": split,
    "Upsample": resize,
}


def conversion(model: Model, node: Node) -> Conversion | str:
    """Return how a node becomes channels-last, or why it stays channels-first, as the end of a sentence.

    A node becomes a fused node if there is a kernel, else the same operator if that works in either layout.
    """
    moved = (*node.inputs, *node.outputs)
    if model.graph.opset < BFLOAT16_OPSET and any(model.shapes.dtype(t) == TensorProto.BFLOAT16 for t in moved):
        return f"Transpose takes no bfloat16 before opset {BFLOAT16_OPSET}"
    if node.domain == DOMAIN:
        return fused(model, node)
    answer = "its operator has no channels-last form"
    rules = (FUSED_RULES.get(op_of(node)), NEUTRAL_RULES.get(op_of(node))) if node.inputs and node.outputs else ()
    for rule in rules:
        found = rule(model, node) if rule else None
        if isinstance(found, str) or (found and found.fusion not in model.options.left_out):
            return found
        answer = f"the fusion {found.fusion} is left out" if found else answer
    return answer
