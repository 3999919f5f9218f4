"""A convolution of integers of 8 bits: of an image and weights that are dequantized."""

from onnxfuse.dsl import Term, attribute, choose, fusion, op, or_zeros, require, tensor, weight
from onnxfuse.patterns._convolutions import EXAMPLE
from onnxfuse.patterns._dequantized import dequantized, dequantized_weight, require_eight_bits, scaled_sums


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

    The weights have one scale, or one for each of the m channels of y.  The body multiplies numbers that are
    dequantized, or integers, whose sums are scaled then.
    """
    require_eight_bits()
    require("the weights have one scale or {m}; found {scales}", lambda scales, m: scales in (None, m))
    require(
        "products of integers have one scale; found {scales}",
        lambda scales, multiplied: scales is None or multiplied == "numbers",
    )
    attributes = {
        "auto_pad": auto_pad, "dilations": dilations, "group": group, "kernel_shape": kernel_shape, "pads": pads,
        "strides": strides,
    }  # fmt: skip
    numbers = dequantized(x, x_scale, x_zero_point), dequantized_weight(w, w_scale, w_zero_point, 0)
    integers = x, w, or_zeros(x_zero_point, x), or_zeros(w_zero_point, w)
    return choose(
        "multiplied",
        numbers=op.Conv(*numbers, bias, **attributes),
        integers=scaled_sums(op.ConvInteger(*integers, **attributes), x_scale, w_scale),
    )
