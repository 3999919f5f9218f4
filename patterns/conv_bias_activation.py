"""A convolution with the bias, activation and residual that follow it."""

from onnxfuse.dsl import Term, attribute, choose, either, fusion, op, rearrange, require, scalar, tensor, weight, when
from onnxfuse.patterns._activations import activation
from onnxfuse.patterns._convolutions import before_activation


def per_channel(value: Term) -> Term:
    """Return a weight of one number for each channel of an image, (m, 1, 1)."""
    return when(rearrange(value, "m 1 1 -> m 1 1"), "the output has two spatial axes", lambda rank: rank == 4)


def shifted(scaled: Term, column_shift: Term) -> Term:
    """Return the sum of an image and a number for each channel."""
    return when(
        scaled + per_channel(column_shift),
        "kernels have either slopes of a PRelu or a shift of channels",
        lambda activation: activation != "prelu",
    )


@fusion(
    out="n m ...",
    epilogue="nhwc",
    example={
        "x": (2, 4, 6, 7),
        "w": (5, 4, 3, 3),
        "auto_pad": "SAME_UPPER",
        "dilations": [1, 2],
        "kernel_shape": [3, 3],
        "pads": [1, 0, 1, 0],
        "strides": [2, 1],
    },
)
def conv_bias_activation(
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
    pads: Term = attribute(),
    strides: Term = attribute(),
) -> Term:
    """y = activation(conv(x, w) + bias + residual) * column_scale + column_shift, or with the residual for the shift

    The residual is added before the activation in a ResNet, and in the end in the bottlenecks of YOLO.  column_scale
    and column_shift are the affine block behind the activations of PaddlePaddle's models, slope is that of a PRelu.
    """
    require(
        "an activation or a residual follows the convolution",
        lambda residual, activation: residual is not None or activation != "none",
    )
    product = op.Conv(
        x,
        w,
        bias,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    total = before_activation(product, residual)
    activated = activation(total, alpha, beta, none=total, prelu=op.PRelu(total, per_channel(slope)))
    scaled = either(activated * per_channel(column_scale), activated)
    return choose("residual_position", before=either(shifted(scaled, column_shift), scaled), after=scaled + residual)
