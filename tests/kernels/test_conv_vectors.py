"""The vectors of channels of a convolution: their places in a plan, and what does not fit."""

from __future__ import annotations

import pytest
from architectures import H200

from onnxfuse.kernels.conv.operands import conv_of
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.runtime.plan import FusedNode, Pointer, TensorSpec

SHAPES = {
    "x": (2, 9, 9, 16), "w": (24, 3, 3, 16), "bias": (24,), "slope": (24, 1, 1), "column_scale": (24, 1, 1),
    "column_shift": (24, 1, 1),
}  # fmt: skip


def problem(operands: str, activation: str, **shapes: tuple[int, ...]) -> Conv:
    names = tuple(operands.split())
    node = FusedNode("conv_bias_activation", "y", names, {"activation": activation, "layout": "nhwc"}, ("float16",))
    return conv_of(node, [TensorSpec({**SHAPES, **shapes}[name], "float16") for name in names], H200)[0]


def test_slopes_and_a_shift_have_the_same_place() -> None:
    slopes = problem("x w bias slope", "prelu")
    assert (slopes.slope, slopes.extra, slopes.column_scale) == (Pointer("input", 3), Pointer("input", 3), None)
    shifted = problem("x w column_scale column_shift", "relu")
    assert (shifted.column_scale, shifted.extra) == (Pointer("input", 2), Pointer("input", 3))
    assert (shifted.epilogue_defines()["HAS_COLUMN_SHIFT"], shifted.epilogue_defines()["HAS_SLOPE"]) == (1, 0)


@pytest.mark.parametrize(
    ("operands", "activation", "message"),
    [
        ("x w", "prelu", "'y': activation is prelu; required a slope for prelu alone"),
        ("x w slope", "relu", "'y': activation is relu; required a slope for prelu alone"),
        ("x w slope column_shift", "prelu", "'y': slope and column_shift are present; required at most one of them"),
    ],
)
def test_what_kernels_lack_is_refused(operands: str, activation: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"conv_bias_activation {message}"):
        problem(operands, activation)


def test_a_vector_of_another_shape_is_named() -> None:
    with pytest.raises(ValueError, match=r"slope has shape \[24\]; required \[24, 1, 1\]"):
        problem("x w slope", "prelu", slope=(24,))
