"""A convolution of an image with weights, both stored in 8 bits: as integers or float8, with scales."""

from onnxfuse.dsl import Term, attribute, choose, fusion, op, or_zeros, rearrange, require, tensor, weight, when
from onnxfuse.patterns._convolutions import EXAMPLE
from onnxfuse.patterns._dequantized import both_scales, dequantized, dequantized_weight, require_few_bits, scaled_sums


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

    The weights have one scale, or one for each of the m channels of y.  The body dequantizes and then multiplies, or it
    multiplies integers and then scales the sums: all by one scale, or each channel by its own.  Float8 numbers (e4m3fn)
    have no zero points.  If integers x have one, the node may have a further operand, w_sums, which the body does not
    read: the sums of the weights, which kernels need to subtract the zero point's share from their sums.
    """
    require_few_bits()
    require(
        "the model has opset {opset}; required 21, from which on Transposes take float8",
        lambda dtypes, opset: not dtypes["x"].startswith("float8") or opset >= 21,
    )
    require("the weights have one scale or {m}; found {scales}", lambda scales, m: scales in (None, m))
    require(
        "sums of integers are scaled as a whole or by channels; found {scales} scales",
        lambda scales, multiplied: scales is None or multiplied != "integers",
    )
    require(
        "weights of sums that are scaled by channels have no zero point",
        lambda multiplied, w_zero_point: multiplied != "channels" or w_zero_point is None,
    )
    attributes = {
        "auto_pad": auto_pad, "dilations": dilations, "group": group, "kernel_shape": kernel_shape, "pads": pads,
        "strides": strides,
    }  # fmt: skip
    numbers = dequantized(x, x_scale, x_zero_point), dequantized_weight(w, w_scale, w_zero_point, 0)
    sums = op.ConvInteger(x, w, or_zeros(x_zero_point, x), or_zeros(w_zero_point, w, dims=""), **attributes)
    scale = both_scales(x_scale, w_scale)
    of_channels = when(rearrange(scale, "scales -> scales 1 1"), "y has two spatial axes", lambda rank: rank == 4)
    return choose(
        "multiplied",
        numbers=op.Conv(*numbers, bias, **attributes),
        integers=scaled_sums(sums, scale),
        channels=scaled_sums(sums, of_channels),
    )
