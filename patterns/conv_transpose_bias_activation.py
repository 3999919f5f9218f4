"""A transposed convolution with the bias, activation and residual that follow it."""

from onnxfuse.dsl import Term, attribute, fusion, op, scalar, tensor, weight
from onnxfuse.patterns._convolutions import finished


@fusion(
    out="n m ...",
    epilogue="nhwc",
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
    slope: Term = weight(optional=True),
    column_scale: Term = weight(optional=True),
    column_shift: Term = weight(optional=True),
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
    """y = activation(conv_transpose(x, w) + bias + residual) * column_scale + column_shift

    Decoders enlarge images with this operator.  w is (channels, filters / group, spatial...), as in ONNX.  The residual
    is an image of the enlarged size, which an encoder computed; it may be added in the end, in place of the shift.
    """
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
    return finished(product, residual, slope, column_scale, column_shift, alpha, beta)
