"""A convolution of integers of 8 bits: of an image and weights that are dequantized."""

from onnxfuse.dsl import Term, attribute, fusion, op, require, tensor, weight
from onnxfuse.patterns._convolutions import EXAMPLE
from onnxfuse.patterns._dequantized import dequantized, dequantized_weight, require_eight_bits


@fusion(out="n m ...", epilogue="nhwc", example=EXAMPLE)
def quantized_conv(
    x: Term = tensor(),
    x_scale: Term = tensor("1?"),
    x_zero_point: Term = tensor("1?", optional=True),
    w: Term = weight(),
    w_scale: Term = weight("scales?"),
    w_zero_point: Term = weight("scales?", optional=True),
    bias: Term = weight("m", optional=True),
    auto_pad: Term = attribute(),
    dilations: Term = attribute(),
    group: Term = attribute(),
    kernel_shape: Term = attribute(),
    pads: Term = attribute(),
    strides: Term = attribute(),
) -> Term:
    """y = conv((x - x_zero_point) x_scale, (w - w_zero_point) w_scale) + bias

    The weights have one scale, or one for each of the m channels of y.
    """
    require_eight_bits()
    require("the weights have one scale or {m}; found {scales}", lambda scales, m: scales in (None, m))
    return op.Conv(
        dequantized(x, x_scale, x_zero_point),
        dequantized_weight(w, w_scale, w_zero_point, 0),
        bias,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
