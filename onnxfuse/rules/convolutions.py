"""Rewrite rules for convolutions."""

from __future__ import annotations

from typing import Final

from onnxfuse.dsl.declaration import Rewrite, Rules, require, rewrite
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import attribute, either, op, rearrange, size, tensor, weight


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
    """A convolution whose windows do not overlap, as in the patch embedding of vision transformers, is a MatMul.

    The convolution computes (batch, channels, patches), which is then transposed.  The MatMul computes (batch, patches,
    channels) directly, so that later operators can be fused into it.
    """
    require("{down} windows of {rows} rows cover the height {height}", lambda height, down, rows: height == down * rows)
    require(
        "{across} windows of {columns} columns cover the width {width}",
        lambda width, across, columns: width == across * columns,
    )
    require("the number of windows is known", lambda down, across: isinstance(down, int) and isinstance(across, int))
    require("nothing is padded", lambda pads, auto_pad: not any(pads or ()) and auto_pad in ("NOTSET", "VALID", None))
    require("the windows are dense", lambda dilations: set(dilations or [1]) == {1})
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


PATCHES: Final[tuple[Rewrite, ...]] = conv_to_matmul
