"""A transposed convolution with the bias, activation and residual that follow it."""

from onnxfuse.dsl import Term, attribute, choose, fusion, op, require, scalar, tensor, weight
from onnxfuse.patterns._activations import activation
from onnxfuse.patterns._convolutions import before_activation


@fusion(
    out="n m ...",
    example={
        "x": (2, 4, 6, 7),
        "w": (4, 5, 3, 3),
        "auto_pad": "SAME_UPPER",
        "dilations": [1, 2],
        "kernel_shape": [3, 3],
        "output_padding": [0, 0],
        "output_shape": [8, 9],
        "pads": [1, 0, 1, 0],
        "strides": [2, 1],
    },
)
def conv_transpose_bias_activation(
    x: Term = tensor(),
    w: Term = weight(),
    bias: Term = weight("m", optional=True),
    residual: Term = tensor("n m ...", optional=True),
    alpha: Term = scalar(optional=True),
    beta: Term = scalar(optional=True),
    auto_pad: Term = attribute(),
    dilations: Term = attribute(),
    group: Term = attribute(),
    kernel_shape: Term = attribute(),
    output_padding: Term = attribute(),
    output_shape: Term = attribute(),
    pads: Term = attribute(),
    strides: Term = attribute(),
) -> Term:
    """y = activation(conv_transpose(x, w) + bias + residual), or activation(conv_transpose(x, w) + bias) + residual

    It enlarges images in decoders: w is (channels, filters / group, spatial...), as ONNX has it.  The residual is the
    image of that size which an encoder computed.
    """
    require(
        "an activation or a residual follows the transposed convolution",
        lambda residual, activation: residual is not None or activation != "none",
    )
    product = op.ConvTranspose(
        x,
        w,
        bias,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        output_padding=output_padding,
        output_shape=output_shape,
        pads=pads,
        strides=strides,
    )
    total = before_activation(product, residual)
    activated = activation(total, alpha, beta, none=total)
    return choose("residual_position", before=activated, after=activated + residual)
