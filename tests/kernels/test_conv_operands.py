"""What the host of convolutions reads off a node: sizes and padding as ONNX defines them, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from architectures import A100, H200, T4
from onnx import TensorProto, helper
from runtimes import run

from onnxfuse.activations import ACTIVATIONS, PRELU
from onnxfuse.kernels.conv import cudnn, host, matrix
from onnxfuse.kernels.conv.operands import conv_of, unsupported
from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Pointer, TensorSpec

OPERANDS = ("x", "w", "bias", "residual")
SHAPES = {"x": (2, 9, 7, 12), "w": (6, 3, 3, 4), "bias": (6,), "residual": (2, 9, 7, 6)}
ATTRIBUTES: Mapping[str, Any] = {"layout": "nhwc", "group": 3, "pads": [1, 1, 1, 1]}


@pytest.fixture(autouse=True)
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave cuDNN and cuBLASLt out of plans, also where an earlier test of this process opened stand-ins of them."""
    for library in (cudnn, cublaslt):
        monkeypatch.setattr(library, "_is_available", lambda: False)


def node(operands: Sequence[str] = OPERANDS[:2], dtype: str = "float16", **attributes: Any) -> FusedNode:
    given = {**ATTRIBUTES, "group": 3, **attributes}
    return FusedNode("conv_bias_activation", "y", tuple(operands), given, (dtype,))


def specs(operands: Sequence[str] = OPERANDS[:2], **shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec({**SHAPES, **shapes}[name], "float16") for name in operands]


# ---- padding as ONNX defines it ----------------------------------------------------------------------------------


def windows() -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield sizes, taps, strides and dilations of one to three axes, where total padding is even, odd and zero."""
    for size, taps, stride, dilation in itertools.product((7, 8), (1, 2, 3, 4), (1, 2, 3), (1, 2)):
        if (taps - 1) * dilation < size:
            yield (size,), (taps,), (stride,), (dilation,)
    yield (9, 8), (3, 2), (2, 1), (1, 1)
    yield (9, 8), (4, 3), (1, 3), (2, 1)
    yield (5, 6, 7), (3, 2, 4), (2, 1, 3), (1, 1, 1)


def conv_model(sizes: tuple[int, ...], kernel: tuple[int, ...], **attributes: Any) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, *sizes])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, [4, 3, *kernel])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Conv", ["x", "w"], ["y"], **attributes)], "conv", [x, w], [y])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("auto_pad", ["VALID", "SAME_UPPER", "SAME_LOWER"])
def test_padding_is_that_of_onnx(auto_pad: str) -> None:
    """The sizes are those of onnx's shape inference; onnxruntime computes the same with the padding written out.

    It refuses `SAME` with dilations.
    """
    compared = 0
    for sizes, kernel, strides, dilations in windows():
        window = {"strides": list(strides), "dilations": list(dilations)}
        model = conv_model(sizes, kernel, auto_pad=auto_pad, **window)
        shapes = {"x": (2, *sizes, 3), "w": (4, *kernel, 3)}
        conv, y = conv_of(node(group=1, auto_pad=auto_pad, **window), specs(**shapes), H200)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output[0].type.tensor_type.shape
        assert [y.shape[0], y.shape[-1], *y.shape[1:-1]] == [dim.dim_value for dim in inferred.dim]
        random = np.random.default_rng(0)
        inputs = {"x": random.standard_normal((2, 3, *sizes)), "w": random.standard_normal((4, 3, *kernel))}
        inputs = {name: value.astype(np.float32) for name, value in inputs.items()}
        pads = [*conv.pads_begin, *conv.pads_end]
        found, reason = run(model, inputs)
        assert found is not None or ("SAME" in auto_pad and set(dilations) != {1}), reason
        written_out, reason = run(conv_model(sizes, kernel, pads=pads, **window), inputs)
        assert written_out is not None, reason
        assert written_out[0].shape[2:] == conv.y_sizes
        if found is not None:
            np.testing.assert_array_equal(found[0], written_out[0])
            compared += 1
    assert compared >= 20


def test_pads_are_all_beginnings_and_then_all_ends() -> None:
    conv, y = conv_of(node(pads=[1, 2, 3, 0], strides=[2, 1]), specs(), H200)
    assert (conv.pads_begin, conv.pads_end) == ((1, 2), (3, 0))
    assert conv.y_sizes == (6, 7) and y.shape == (2, 6, 7, 6)


def test_absent_attributes_are_the_defaults_of_conv() -> None:
    plain = FusedNode("conv_bias_activation", "y", OPERANDS[:2], {"layout": "nhwc"}, ("float16",))
    conv, y = conv_of(plain, specs(w=(8, 3, 3, 12)), H200)
    assert (conv.pads_begin, conv.pads_end, conv.strides, conv.dilations) == ((0, 0), (0, 0), (1, 1), (1, 1))
    assert (conv.group, conv.activation, conv.residual_first, conv.bias, conv.residual) == (1, "none", True, None, None)
    assert y.shape == (2, 7, 5, 8)


def test_a_filter_larger_than_the_image_has_no_output() -> None:
    conv, y = conv_of(node(pads=[0] * 4), specs(w=(6, 10, 3, 4)), H200)
    assert conv.y_sizes == (0, 5) and y.shape == (2, 0, 5, 6)
    assert [plan.steps for plan in host.candidates(node(pads=[0] * 4), specs(w=(6, 10, 3, 4)), H200)] == [()]


def test_layouts_say_where_channels_and_filters_are() -> None:
    operands = ("x", "w", "residual", "bias")
    given = specs(operands, x=(2, 12, 9, 7), w=(3, 3, 4, 6))
    conv, _ = conv_of(node(operands, x_layout="nchw", w_layout="hwio", residual_position="after"), given, H200)
    assert (conv.n, conv.c, conv.m, conv.sizes, conv.kernel) == (2, 12, 6, (9, 7), (3, 3))
    assert conv.x_nchw and conv.w_hwio and not conv.residual_first
    assert (conv.bias, conv.residual) == (Pointer("input", 3), Pointer("input", 2))


def test_kernel_shape_may_be_given() -> None:
    assert conv_of(node(kernel_shape=[3, 3]), specs(), H200)[0].kernel == (3, 3)


# ---- what is refused ---------------------------------------------------------------------------------------------

NOT_FITTING = [
    ({}, {"x": (2, 12), "w": (8, 12)}, "'y': x has shape [2, 12] and w [8, 12]; required one rank, of at least 3"),
    ({}, {"w": (8, 3, 4)}, "x has shape [2, 9, 7, 12] and w [8, 3, 4]; required one rank, of at least 3"),
    ({"group": 2}, {}, "x has 12 channels, w 4 for each of 2 groups and 6 filters; required as many channels as all"),
    ({"group": 0}, {}, "w 4 for each of 0 groups"),
    (
        {},
        {"w": (8, 3, 3, 4)},
        "8 filters; required as many channels as all groups have, and as many filters",
    ),
    ({"kernel_shape": [3, 5]}, {}, "w has taps [3, 3]; required kernel_shape, which is [3, 5]"),
    ({"strides": [1]}, {}, "strides is [1]; required 2 positive integers"),
    ({"strides": [0, 1]}, {}, "strides is [0, 1]; required 2 positive integers"),
    ({"dilations": 2}, {}, "dilations is 2; required 2 positive integers"),
    ({"pads": [1, 1]}, {}, "pads are [1, 1]; required 4 integers of at least 0"),
    ({"pads": [1, 1, -1, 1]}, {}, "pads are [1, 1, -1, 1]; required 4 integers of at least 0"),
]


@pytest.mark.parametrize(("attributes", "shapes", "sentence"), NOT_FITTING)
def test_shapes_that_do_not_fit_are_refused(
    attributes: dict[str, Any], shapes: dict[str, tuple[int, ...]], sentence: str
) -> None:
    for of in (conv_of, host.candidates):
        with pytest.raises(ValueError) as caught:
            of(node(**attributes), specs(**shapes), H200)
        assert "conv_bias_activation 'y': " in str(caught.value) and sentence in str(caught.value)


@pytest.mark.parametrize(("name", "shape", "required"), [("bias", (7,), [6]), ("residual", (2, 9, 7, 1), [2, 9, 7, 6])])
def test_operands_of_another_shape_are_refused(name: str, shape: tuple[int, ...], required: list[int]) -> None:
    operands = ("x", "w", name)
    with pytest.raises(ValueError) as caught:
        conv_of(node(operands), specs(operands, **{name: shape}), H200)
    expected = f"conv_bias_activation 'y': {name} has shape {list(shape)}; required {required}"
    assert str(caught.value) == expected


def test_a_missing_operand_is_named() -> None:
    with pytest.raises(ValueError, match="operand w is missing; present are x"):
        conv_of(node(("x",)), specs(("x",)), H200)


def test_what_no_kernel_takes_is_named() -> None:
    shapes = {"x": (1, 2, 2, 2, 2, 8), "w": (8, 1, 1, 1, 1, 8)}
    with pytest.raises(ValueError, match=r"^conv_bias_activation 'y': no kernel takes Conv\(n=1, c=8, m=8"):
        host.candidates(node(group=1, pads=[1] * 8, strides=[2] * 4), specs(**shapes), H200)


UNSUPPORTED = [
    ({"layout": "nchw"}, "layout is nchw; the kernel has nhwc"),
    ({"x_layout": "chwn"}, "x_layout is chwn; the kernel has nhwc, nchw"),
    ({"w_layout": "oihw"}, "w_layout is oihw; the kernel has ohwi, hwio"),
    ({"residual_position": "twice"}, "residual_position is twice; the kernel has before, after"),
    ({"activation": "sine"}, f"activation is sine; the kernel has {', '.join((*ACTIVATIONS, PRELU))}"),
    ({"auto_pad": "SAME"}, "auto_pad is SAME; the kernel has NOTSET, VALID, SAME_UPPER, SAME_LOWER"),
]


@pytest.mark.parametrize(("attributes", "sentence"), UNSUPPORTED)
def test_attributes_without_a_kernel_are_refused(attributes: dict[str, str], sentence: str) -> None:
    fused = node(**attributes)
    assert host.supports(fused, ("float16", "float16"), H200) == f"conv_bias_activation: {sentence}"


def test_a_node_of_no_layout_is_channels_first() -> None:
    fused = FusedNode("conv_bias_activation", "y", ("x", "w"), {}, ("float16",))
    assert unsupported(fused, ("float16", "float16"), H200) == (
        "conv_bias_activation: layout is nchw; the kernel has nhwc"
    )


@pytest.mark.parametrize(
    ("dtypes", "y", "sentence"),
    [
        (("float64", "float64"), "float64", "x is float64; the kernel takes float32, float16, bfloat16"),
        (("float16", "float32"), "float16", "w is float32; required float16, as x"),
        (("float16", "float16"), "float32", "the output is float32; required float16, as x"),
    ],
)
def test_other_and_mixed_dtypes_are_refused(dtypes: tuple[str, str], y: str, sentence: str) -> None:
    assert unsupported(node(dtype=y), dtypes, H200) == f"conv_bias_activation: {sentence}"


def test_bfloat16_needs_matrix_units_that_have_it() -> None:
    fused, dtypes = node(dtype="bfloat16"), ("bfloat16", "bfloat16")
    assert unsupported(fused, dtypes, T4) == (
        "conv_bias_activation: x is bfloat16, which needs compute capability 80; found 75"
    )
    assert unsupported(fused, dtypes, A100) is None
    for dtype in ("float16", "float32"):
        assert unsupported(node(dtype=dtype), (dtype, dtype), T4) is None


# ---- a pointwise convolution is a matrix product -----------------------------------------------------------------


def test_a_pointwise_convolution_runs_as_a_product() -> None:
    given = specs(OPERANDS, w=(6, 1, 1, 12))
    pointwise = node(OPERANDS, group=1, pads=[0] * 4, activation="relu")
    conv, _ = conv_of(pointwise, given, H200)
    gemm = matrix.as_gemm(conv)
    assert (gemm.m, gemm.n, gemm.k, gemm.transposed) == (2 * 9 * 7, 6, 12, True)
    assert (gemm.bias, gemm.residual, gemm.residual_first) == (conv.bias, conv.residual, True)
    assert matrix.implementations(conv, H200)
    for other in (
        replace(conv, w_hwio=True), replace(conv, strides=(2, 1)), replace(conv, x_nchw=True),
        replace(conv, pads_begin=(1, 0)), replace(conv, pads_end=(0, 1)), replace(conv, kernel=(1, 2)),
    ):  # fmt: skip
        assert matrix.implementations(other, H200) == []


@pytest.mark.parametrize(("device", "dtype", "tf32"), [(H200, "float32", False), (T4, "float16", True)])
def test_a_pointwise_convolution_that_no_product_takes_runs_as_a_convolution(
    device: Device, dtype: str, tf32: bool
) -> None:
    """Without cuBLASLt no kernel of the products takes float32 that must stay exact, nor runs on a T4."""
    pointwise = node(dtype=dtype, group=1, pads=[0] * 4)
    given = [TensorSpec((2, 40, 40, 12), dtype), TensorSpec((6, 1, 1, 12), dtype)]
    device = replace(device, tf32=tf32)
    assert matrix.implementations(conv_of(pointwise, given, device)[0], device) == []
    for plan in host.candidates(pointwise, given, device):
        assert isinstance(plan.steps[0], Launch) and plan.steps[0].kernel.source == "conv_mma"
