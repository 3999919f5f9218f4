"""A convolution with the bias, activation and residual that follow it."""

from onnxfuse.dsl import Term, attribute, fusion, op, scalar, tensor, weight
from onnxfuse.patterns._convolutions import EXAMPLE, finished


@fusion(out="n m ...", epilogue="nhwc", example=EXAMPLE)
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
    """y = activation(conv(x, w) + bias + residual) * column_scale + column_shift; the residual may come last instead

    The residual is added before the activation in a ResNet, and last, in place of column_shift, in the bottlenecks of
    YOLO.  column_scale and column_shift are the affine block after the activations of PaddlePaddle's models; slope is
    the slope of a PRelu.
    """
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
    return finished(product, residual, slope, column_scale, column_shift, alpha, beta)
