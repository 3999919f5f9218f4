"""Shape rules of operators that slide windows over images, change resolution, or attend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from onnxfuse.model.graph import Node, attribute, constant_value, op_of, producer
from onnxfuse.shapes.bounds import maximum
from onnxfuse.shapes.dims import Size
from onnxfuse.shapes.rules import Partial, Shape, Undecided, has, numbers, rule, shape_in

if TYPE_CHECKING:
    from onnxfuse.shapes.inference import Shapes


@rule("Conv", "ConvInteger", "QLinearConv", "com.microsoft::FusedConv", "com.microsoft::NhwcFusedConv")
def _conv(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    if op_of(n) == "com.microsoft::NhwcFusedConv":
        raise Undecided
    image, weight = shape_in(s, n), shape_in(s, n, 3 if op_of(n) == "QLinearConv" else 1)
    kernel = n.attrs.get("kernel_shape") or weight[2:]
    return (image[0], weight[0], *_windows(n, image[2:], kernel))


@rule("MaxPool", "AveragePool", "LpPool")
def _pool(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    image = shape_in(s, n)
    return (*image[:2], *_windows(n, image[2:], n.attrs["kernel_shape"]))


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(s: Shapes, n: Node) -> Shape:
    image = shape_in(s, n)
    return (*image[:2], *([1] * (len(image) - 2)))


def _windows(n: Node, spatial: Shape, kernel: Any) -> list[Size | None]:
    rank = len(spatial)
    strides, dilations = (n.attrs.get(name) or [1] * rank for name in ("strides", "dilations"))
    pads = n.attrs.get("pads") or [0] * 2 * rank
    mode = n.attrs.get("auto_pad", "NOTSET")
    sizes: list[Size | None] = []
    for i, size in enumerate(spatial):
        reach = (kernel[i] - 1) * dilations[i] + 1
        if mode.startswith("SAME"):
            sizes.append((size + strides[i] - 1) // strides[i])
        elif n.attrs.get("ceil_mode"):
            sizes.append(_ceiled(size, reach, strides[i], pads[i], pads[i + rank]))
        else:
            padding = 0 if mode == "VALID" else pads[i] + pads[i + rank]
            sizes.append((size + padding - reach) // strides[i] + 1)
    return sizes


def _ceiled(size: Size, reach: int, stride: int, before: int, after: int) -> Size | None:
    """With `ceil_mode` a last window may start in the image or in the padding before it, but not behind."""
    count = (size + before + after - reach + stride - 1) // stride + 1
    if isinstance(count, int) and isinstance(size, int):
        return count - 1 if (count - 1) * stride >= size + before else count
    return count if after + stride <= reach else None


@rule("ConvTranspose")
def _conv_transpose(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    image, weight = shape_in(s, n), shape_in(s, n, 1)
    spatial = image[2:]
    rank = len(spatial)
    strides, dilations = (n.attrs.get(name) or [1] * rank for name in ("strides", "dilations"))
    extra, pads = n.attrs.get("output_padding") or [0] * rank, n.attrs.get("pads") or [0] * 2 * rank
    kernel = n.attrs.get("kernel_shape") or weight[2:]
    sizes: list[Size | None] = []
    for i, size in enumerate(spatial):
        window = (kernel[i] - 1) * dilations[i] + 1 + extra[i]
        same = n.attrs.get("auto_pad", "NOTSET").startswith("SAME")  # size * stride, but nothing is added to be that
        margin = maximum(0, window - strides[i]) if same else pads[i] + pads[i + rank]
        sizes.append((size - 1) * strides[i] + window - margin)
    return (image[0], weight[1] * n.attrs.get("group", 1), *(n.attrs.get("output_shape") or sizes))


@rule("Pad")
def _pad(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    shape: list[Size | None] = list(shape_in(s, n))
    axes = numbers(s, n, "axes") if has(n, 3) else None
    axes = list(range(len(shape))) if axes is None else [axis % len(shape) for axis in axes]
    try:
        pads = numbers(s, n, "pads" if s.graph.opset > 1 else "paddings") or []
    except Undecided:
        return tuple(None if i in axes else size for i, size in enumerate(shape))
    for i, axis in enumerate(axes):
        shape[axis] = shape_in(s, n)[axis] + pads[i] + pads[i + len(axes)]
    return tuple(shape)


@rule("Resize", "Upsample")
def _resize(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    shape: list[Size | None] = list(shape_in(s, n))
    axes = [axis % len(shape) for axis in n.attrs.get("axes") or range(len(shape))]
    if n.attrs.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return tuple(None if i in axes else size for i, size in enumerate(shape))
    sizes = numbers(s, n, "sizes") if has(n, 3) else None
    if sizes:
        new: list[Size | None] = list(sizes)
    else:
        new = [_scaled(shape_in(s, n)[axis], scale) for axis, scale in zip(axes, _scales(s, n), strict=True)]
    for axis, size in zip(axes, new, strict=True):
        shape[axis] = size
    return tuple(shape)


def _scales(s: Shapes, n: Node) -> list[Any]:
    """Constant scales may be fractions; computed ones only count where they are whole."""
    scales = attribute(s.graph, n, "scales")
    maker = None if isinstance(scales, list) or scales is None else producer(scales)
    if maker is not None and op_of(maker) == "Constant" and "value" in maker.attrs:
        return list(constant_value(s.graph, maker.attrs["value"]).tolist())
    return scales if isinstance(scales, list) else numbers(s, n, "scales") or []


def _scaled(size: Size, scale: Any) -> Size | None:
    if isinstance(size, int) and isinstance(scale, int | float):
        return math.floor(size * scale)
    if not isinstance(scale, float) or scale.is_integer():
        return size * (int(scale) if isinstance(scale, float) else scale)
    inverse = 1 / scale
    return size // int(inverse) if inverse.is_integer() else None


@rule("DepthToSpace", "SpaceToDepth")
def _blocks(s: Shapes, n: Node) -> Shape:
    batch, channels, height, width = shape_in(s, n)
    block = n.attrs["blocksize"]
    if op_of(n) == "DepthToSpace":
        return (batch, channels // block**2, height * block, width * block)
    return (batch, channels * block**2, height // block, width // block)


@rule("Attention")
def _attention(s: Shapes, n: Node) -> list[Partial | None]:
    query, key, value = _heads(s, n, 0, "q_num_heads"), _heads(s, n, 1, "kv_num_heads"), _heads(s, n, 2, "kv_num_heads")
    length = key[2] + (shape_in(s, n, 4)[2] if has(n, 4) else 0)
    batch, heads, rows, _ = query
    flat = len(shape_in(s, n)) == 3
    result = (batch, rows, heads * value[3]) if flat else (batch, heads, rows, value[3])
    return [result, (*key[:2], length, key[3]), (*value[:2], length, value[3]), (batch, heads, rows, length)]


def _heads(s: Shapes, n: Node, place: int, name: str) -> Shape:
    """An input of an attention as (batch, heads, length, size of a head)."""
    shape = shape_in(s, n, place)
    if len(shape) == 4:
        return shape
    count = n.attrs[name]
    return (shape[0], count, shape[1], shape[2] // count)


@rule("com.microsoft::MultiHeadAttention", "com.microsoft::Attention", "com.microsoft::GroupQueryAttention",
      "com.microsoft::DecoderMaskedMultiHeadAttention")  # fmt: skip
def _contrib_attention(s: Shapes, n: Node) -> list[Partial | None]:
    query = shape_in(s, n)
    if len(query) != 3:
        raise Undecided
    if op_of(n) == "com.microsoft::Attention":
        hidden = (n.attrs.get("qkv_hidden_sizes") or [shape_in(s, n, 1)[1] // 3])[-1]
    elif op_of(n) == "com.microsoft::GroupQueryAttention":
        heads, pairs = n.attrs["num_heads"], n.attrs["kv_num_heads"]
        hidden = query[2] if has(n, 1) else query[2] // (heads + 2 * pairs) * heads
    else:
        value = shape_in(s, n, 2) if has(n, 2) else query
        hidden = value[2] if len(value) == 3 else value[1] * value[3]
    return [(*query[:2], hidden)]
