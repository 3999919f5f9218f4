"""Rules for Conv and ConvTranspose: the fused nodes' functions have Transposes, but their kernels need none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from onnxfuse.ir.attributes import int_attribute, ints_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS, dtype_name
from onnxfuse.ir.node import AttributeValue, Node, Tensor, is_constant, op_of, producer
from onnxfuse.layout.axes import IMAGE_RANKS, WeightLayout, to_first, weight_perm
from onnxfuse.layout.conversion import Conversion, Kind, Model, body_of
from onnxfuse.layout.fusions import CONVOLUTION, QUANTIZED_CONVOLUTION, TRANSPOSED_CONVOLUTION
from onnxfuse.layout.writer import ImageCall, Writer, image_rank

# A stem is a convolution of an image with at most this many channels.  It reads the image channels-first if no node
# computes the image channels-last, because a Transpose would cost more.
MAX_STEM_CHANNELS: Final = 4
# (is transposed, is depthwise) -> layout; in hwio and hwoi, weights of neighbouring channels are adjacent.  All
# convolutions of integers have ohwi.
WEIGHT_LAYOUTS: Final[Mapping[tuple[bool, bool], WeightLayout]] = {
    (False, False): "ohwi", (False, True): "hwio", (True, False): "ihwo", (True, True): "hwoi",
}  # fmt: skip


def convolution(model: Model, node: Node) -> Conversion | str:
    """Return the conversion of a Conv or ConvTranspose to a fused node without an activation, or why the node stays."""
    operands = {name: t for name, t in zip(("x", "w", "bias"), node.inputs, strict=False) if t.name}
    if reason := _stays(model, operands, node.outputs[0]):
        return reason
    if "bias" in operands and not is_constant(operands["bias"]):
        return f"its bias '{operands['bias'].name}' is not constant"
    body, w = body_of(model, node, operands), operands["w"]
    assert is_constant(w)
    is_transposed = op_of(node) == "ConvTranspose"
    filters = w.shape[1] * int_attribute(node, "group", 1) if is_transposed else w.shape[0]
    own: dict[str, AttributeValue] = {**node.attrs, "activation": "none", "m": filters}
    return _converted(node, ImageCall(TRANSPOSED_CONVOLUTION if is_transposed else CONVOLUTION, body, operands, own))


def fused_convolution(model: Model, node: Node, operands: Mapping[str, Tensor]) -> Conversion | str:
    """Return the conversion of a fused convolution, which keeps its attributes; or why it stays channels-first."""
    if reason := _stays(model, operands, node.outputs[0]):
        return reason
    return _converted(node, ImageCall(str(node.attrs["fusion"]), model.functions[node.op], operands, node.attrs))


def _stays(model: Model, operands: Mapping[str, Tensor], y: Tensor) -> str:
    """Return why a convolution has no channels-last form; "" if it has one."""
    x, w, residual = operands["x"], operands["w"], operands.get("residual")
    if not is_constant(w):
        return f"its weights '{w.name}' are not constant"
    rank = len(w.shape)
    if rank not in IMAGE_RANKS:
        return f"it has {rank - 2} spatial axes, not 1 to {max(IMAGE_RANKS) - 2}"
    if not rank == model.shapes.rank(x) == model.shapes.rank(y):
        return f"the rank of its image '{x.name}' or of its result is not known"
    if is_constant(x):
        return "its image is a constant"
    if (dtype := model.shapes.dtype(y)) not in FUSIBLE_FLOATS:
        return f"it computes in {dtype_name(dtype)}"
    if residual and not image_rank(model.shapes, residual):
        return f"its residual '{residual.name}' is not a computed tensor of three to five axes"
    return ""


def _converted(node: Node, call: ImageCall) -> Conversion:
    """Return the conversion of a convolution to the call of a fused node.

    The image of a stem (see MAX_STEM_CHANNELS) is read in the layout in which the image is computed.
    """
    x, w, group = call.operands["x"], call.operands["w"], int_attribute(node, "group", 1)
    assert is_constant(w)
    is_transposed, has_floats = call.fusion == TRANSPOSED_CONVOLUTION, call.fusion != QUANTIZED_CONVOLUTION
    is_depthwise = has_floats and w.shape[1] == 1 and w.shape[0] == group > 1
    takes_first = call.fusion == CONVOLUTION or (not has_floats and len(w.shape) == 4)
    is_stem = takes_first and group == 1 and w.shape[1] <= MAX_STEM_CHANNELS and not _is_transposed(x)
    w_layout = WEIGHT_LAYOUTS[is_transposed, is_depthwise]
    index = {name: i for i, name in enumerate(call.operands)}

    def write(writer: Writer) -> None:
        x_first = is_stem and not writer.is_computed_last(x)
        images = [name for name in ("x", "residual") if name in index and not (name == "x" and x_first)]
        operands = {**call.operands, "w": writer.weight(w, w_layout)}
        own = {**call.attributes, "w_layout": w_layout, **({"x_layout": "nchw"} if x_first else {})}
        perms = {"w": weight_perm(w_layout, len(w.shape))}
        writer.call(node, ImageCall(call.fusion, call.body, operands, own, images, perms))

    reads = tuple(index[name] for name in ("x", "residual") if name in index and not (name == "x" and is_stem))
    return Conversion(node, Kind.CONVOLUTION, reads, (0,), write, reads_either=(index["x"],) if is_stem else ())


def _is_transposed(tensor: Tensor) -> bool:
    """Return whether the model computes a tensor channels-last and transposes it to channels-first."""
    node = producer(tensor)
    perm = ints_attribute(node, "perm") if node is not None and op_of(node) == "Transpose" else None
    return perm is not None and perm == list(to_first(len(perm)))
