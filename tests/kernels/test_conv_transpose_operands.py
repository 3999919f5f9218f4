"""The host of transposed convolutions reads attributes as onnxruntime does: which pixels y has, and what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from architectures import H200
from conv_transpose_cases import ConvTransposeCase
from onnx import TensorProto, helper, numpy_helper
from runtimes import open_on_cpu

from onnxfuse.kernels.conv_transpose.operands import conv_transpose_of
from onnxfuse.runtime.plan import FusedNode, TensorSpec

PADS = {"pads": [1, 0, 2, 1]}
EVERY_PAD = (PADS, *({"auto_pad": name} for name in ("VALID", "SAME_UPPER", "SAME_LOWER")), {})


@pytest.mark.parametrize("padding", EVERY_PAD, ids=str)
@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [2, 2]},
        {"strides": [1, 3], "output_padding": [0, 2]},
        {"strides": [3, 2], "dilations": [2, 1], "output_padding": [2, 1]},
        {"strides": [4, 5]},
        {"strides": [2, 2], "output_shape": [9, 13]},
        {"strides": [2, 2], "output_shape": [10, 12]},
        {"strides": [2, 3], "output_shape": [10, 17], "output_padding": [1, 1]},
        {"dilations": [1, 2]},
    ],
    ids=str,
)
def test_sizes_and_values_are_those_of_onnxruntime(padding: dict[str, Any], attributes: dict[str, Any]) -> None:
    x, w = (np.random.default_rng(i).standard_normal(s) for i, s in enumerate(((1, 2, 5, 6), (2, 3, 3, 3))))
    given = {"kernel_shape": [3, 3], **attributes, **padding}
    expected = by_onnxruntime(x, w, given)
    last = np.moveaxis(x, 1, -1), np.moveaxis(w, 1, -1)
    specs = [TensorSpec(value.shape, "float32") for value in last]
    node = FusedNode("conv_transpose_bias_activation", "up", ("x", "w"), {"layout": "nhwc", **given}, ("float32",))
    conv, y = conv_transpose_of(node, specs, H200)
    assert y.shape == (1, *expected.shape[2:], 3)
    whole = [
        (size - 1) * stride + (taps - 1) * dilation + 1
        for size, stride, taps, dilation in zip(conv.sizes, conv.strides, conv.kernel, conv.dilations, strict=True)
    ]
    cut = tuple(
        all_of_it - size - begin for all_of_it, size, begin in zip(whole, conv.y_sizes, conv.pads_begin, strict=True)
    )
    case = ConvTransposeCase(
        1, 2, 3, conv.sizes, conv.kernel, conv.strides, (*conv.pads_begin, *cut), conv.dilations, extra=(),
        activation="none", dtype="float32",
    )  # fmt: skip
    found, _ = case.expect(dict(zip(("x", "w"), last, strict=True)))
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), expected, rtol=1e-5, atol=1e-5)


def by_onnxruntime(x: np.ndarray, w: np.ndarray, attributes: dict[str, Any]) -> np.ndarray:
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(w.astype(np.float32), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (y,) = open_on_cpu(model).run(None, {"x": x.astype(np.float32)})
    assert isinstance(y, np.ndarray)
    return y
