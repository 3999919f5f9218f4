"""Rewrite rules for convolutions."""

from __future__ import annotations

from typing import Final

from onnx import TensorProto

from onnxfuse.algebra.operators import CONVOLUTIONS
from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, either, known, op, rearrange, scalar, size, tensor, weight
from onnxfuse.patterns._activations import activation, spelled

# Activations that ONNX has as one operator, or that are a product of x and one operator.
ONE_OPERATOR: Final = (
    "relu", "silu", "hard_swish", "scaled_hard_swish", "mish", "sigmoid", "tanh", "softplus", "clip", "leaky_relu",
    "elu", "hard_sigmoid",
)  # fmt: skip


@rewrite(out="batch (down across) channels", example={"pads": [0, 0, 0, 0], "dilations": [1, 1], "auto_pad": "NOTSET"})
def conv_to_matmul(
    image: Term = tensor("batch depth height width"),
    kernel: Term = weight("channels depth rows columns"),
    bias: Term = tensor("channels", optional=True),
    pads: Term = attribute(),
    dilations: Term = attribute(),
    auto_pad: Term = attribute(),
    kernel_shape: Term = attribute(),
) -> Rules:
    """A convolution whose windows do not overlap, as in the patch embedding of vision transformers, becomes a MatMul.

    The convolution computes (batch, channels, patches), which is then transposed.  The MatMul computes (batch, patches,
    channels) directly, so that later operators can be fused into it.
    """
    require("{down} windows of {rows} rows cover the height {height}", lambda height, down, rows: height == down * rows)
    require(
        "{across} windows of {columns} columns cover the width {width}",
        lambda width, across, columns: width == across * columns,
    )
    require(
        "the number of windows must be known", lambda down, across: isinstance(down, int) and isinstance(across, int)
    )
    require(
        "nothing may be padded", lambda pads, auto_pad: not any(pads or ()) and auto_pad in ("NOTSET", "VALID", None)
    )
    require("the windows must be dense", lambda dilations: set(dilations or [1]) == {1})
    require("a window must have several pixels", lambda rows, columns: (rows, columns) != (1, 1))
    down, across, rows, columns = size("down"), size("across"), size("rows"), size("columns")
    computed = op.Conv(
        image, kernel, bias, strides=[rows, columns], pads=pads, dilations=dilations, auto_pad=auto_pad,
        kernel_shape=kernel_shape,
    )  # fmt: skip
    # (batch depth down rows across columns) becomes (batch down across depth rows columns) by two Transposes of four
    # axes each, because runtimes have kernels that swap the middle two of four axes.
    x = op.Transpose(op.Reshape(image, shape=[-1, rows, across, columns]), perm=[0, 2, 1, 3])
    x = op.Reshape(x, shape=[-1, size("depth"), down * across, rows * columns])
    x = op.Transpose(x, perm=[0, 2, 1, 3])
    x = op.Reshape(x, shape=[-1, down * across, size("depth") * rows * columns])
    product = op.MatMul(x, rearrange(kernel, "channels depth rows columns -> (depth rows columns) channels"))
    yield (
        rearrange(computed, "batch channels down across -> batch (down across) channels"),
        either(product + bias, product),
    )


IMAGE: Final = "batch channels height width"


@rewrite(out=IMAGE)
def spread_affine(
    activated: Term = tensor(IMAGE),
    image: Term = tensor(IMAGE),
    residual: Term = tensor(IMAGE, optional=True),
    slope: Term = tensor("channels 1 1", optional=True),
    alpha: Term = scalar(optional=True),
    beta: Term = scalar(optional=True),
    approximate: Term = attribute(),
    number: Term = scalar(),
    row: Term = weight("1 channels 1 1"),
    scale: Term = weight("channels 1 1", optional=True),
) -> Rules:
    """Numbers that scale and shift the activation of a convolution are repeated into vectors over its channels.

    PaddlePaddle models have such an affine block of two learnt numbers after an activation, where it cannot be folded
    into the convolution's weights.  The fused convolution takes vectors over channels, of shape (channels, 1, 1).
    """
    require("a convolution must compute the image", lambda image, is_made_by: is_made_by(image, *CONVOLUTIONS))
    require("there must be several channels", lambda channels: isinstance(channels, int) and channels > 1)
    total = either(image + residual, image)
    usual = (*spelled(ONE_OPERATOR, total, alpha, beta).values(), op.Gelu(total, approximate=approximate))
    shifted = known(activated, either(*usual))
    scaled = known(activated, either(*usual, op.PRelu(total, slope)))
    repeated, squeezed = op.Expand(number, shape=[size("channels"), 1, 1]), op.Squeeze(row, axes=[0])
    yield scaled * number, scaled * repeated
    yield scaled * row, scaled * squeezed
    shifted = either(shifted * scale, shifted)
    yield shifted + number, shifted + repeated
    yield shifted + row, shifted + squeezed


@rewrite(out="batch channels width")
def row_of_an_image(
    image: Term = tensor("batch channels 1 width"),
    row: Term = weight("1 channels 1"),
    alpha: Term = scalar(optional=True),
    beta: Term = scalar(optional=True),
) -> Rules:
    """A bias, factor or activation moves before the Squeeze of a convolution's result of one row (Keras' Conv1D)."""
    require("a convolution must compute the image", lambda image, is_made_by: is_made_by(image, *CONVOLUTIONS))
    squeeze = "batch channels 1 width -> batch channels width"
    squeezed, vector = rearrange(image, squeeze), op.Unsqueeze(row, axes=[2])
    yield squeezed + row, rearrange(image + vector, squeeze)
    yield squeezed * row, rearrange(image * vector, squeeze)
    yield activation(squeezed, alpha, beta), rearrange(activation(image, alpha, beta), squeeze)


CHANNELS_LAST: Final = "batch channels height width -> batch height width channels"
PIXEL: Final = "batch channels 1 1 -> batch 1 1 channels"


@rewrite(out="batch 1 1 channels")
def pixel_of_an_image(
    image: Term = tensor("batch channels 1 1"), alpha: Term = scalar(optional=True), beta: Term = scalar(optional=True)
) -> Rules:
    """An activation moves before the Transpose of a convolution's result of one pixel, as in squeeze-and-excite."""
    require("a convolution must compute the image", lambda image, is_made_by: is_made_by(image, *CONVOLUTIONS))
    yield activation(rearrange(image, PIXEL), alpha, beta), rearrange(activation(image, alpha, beta), PIXEL)


@rewrite(out="batch 1 1 channels")
def mean_of_an_image(image: Term = tensor(IMAGE)) -> Rules:
    """The mean over a channels-last image that a Transpose makes, as in Keras, becomes a mean before the Transpose."""
    mean = op.ReduceMean(image, axes=[2, 3], keepdims=1)
    yield op.ReduceMean(rearrange(image, CHANNELS_LAST), axes=[1, 2], keepdims=1), rearrange(mean, PIXEL)


@rewrite(out="batch height width channels")
def gated_image(image: Term = tensor(IMAGE), gate: Term = tensor("batch channels 1 1")) -> Rules:
    """The product of an image and a number per channel is computed before the Transposes of both."""
    yield op.Mul(rearrange(image, CHANNELS_LAST), rearrange(gate, PIXEL)), rearrange(op.Mul(image, gate), CHANNELS_LAST)


@rewrite(out=IMAGE)
def scales_of_channels(
    sums: Term = tensor(IMAGE), x_scale: Term = tensor("1?"), w_scale: Term = weight("channels 1 1")
) -> Rules:
    """The scales per channel of an integer convolution become a vector, as kernels read them."""
    require("integers must be added", lambda sums, is_made_by: is_made_by(sums, "ConvInteger"))
    require("scales must be float32", lambda dtypes: dtypes["w_scale"] == "float32")
    numbers = op.Cast(sums, to=TensorProto.FLOAT)
    scales = op.Mul(x_scale, rearrange(w_scale, "channels 1 1 -> channels"))
    yield numbers * op.Mul(x_scale, w_scale), numbers * rearrange(scales, "channels -> channels 1 1")


IMAGES: Final[tuple[Rewrite, ...]] = (
    *conv_to_matmul, *row_of_an_image, *pixel_of_an_image, *mean_of_an_image, *gated_image,
)  # fmt: skip
AFFINE: Final[tuple[Rewrite, ...]] = (*scales_of_channels, *spread_affine)
