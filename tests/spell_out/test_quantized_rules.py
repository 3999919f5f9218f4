"""Each rule of operators on integers, before and after the operator is spelled out, in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from runtimes import open_on_cpu
from spelled_models import parsed, spelled

from onnxfuse import optimize

STEPS = "float s = {0.02}, float t = {0.013}, float r = {0.05}, uint8 z = {120}, uint8 v = {131}, int8 i = {-3}"
COLUMNS = "float[6] each = {0.01, 0.02, 0.013, 0.05, 0.004, 0.03}, int8[6] zeros = {0, 0, 0, 0, 0, 0}"
IMAGE, WEIGHTS = "uint8[2,4,7,6] x", "int8[6,4,3,3] w"
EXACT = {
    "product": f"(uint8[3,5,8] x) => (uint8[3,5,6] y) <int8[8,6] w, {STEPS}> "
    "{ y = QLinearMatMul(x, s, z, w, t, i, r, v) }",
    "product_of_int8": f"(int8[3,5,8] x) => (int8[3,5,6] y) <int8[8,6] w, {STEPS}> "
    "{ y = QLinearMatMul(x, s, i, w, t, i, r, i) }",
    "product_of_columns": f"(uint8[5,8] x) => (uint8[5,6] y) <int8[8,6] w, {STEPS}, {COLUMNS}> "
    "{ y = QLinearMatMul(x, s, z, w, each, zeros, r, v) }",
    "product_of_tensors": f"(uint8[2,3,5,8] x, uint8[2,3,8,4] w) => (uint8[2,3,5,4] y) <{STEPS}> "
    "{ y = QLinearMatMul(x, s, z, w, t, v, r, v) }",
    "conv": f"({IMAGE}) => (uint8[2,6,7,6] y) <{WEIGHTS}, {STEPS}> "
    "{ y = QLinearConv <pads = [1, 1, 1, 1]> (x, s, z, w, t, i, r, v) }",
    "conv_of_channels": f"({IMAGE}) => (uint8[2,6,4,3] y) <{WEIGHTS}, {STEPS}, {COLUMNS}, int32[6] b> "
    "{ y = QLinearConv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, s, z, w, each, zeros, r, v, b) }",
    "conv_with_bias": f"({IMAGE}) => (uint8[2,6,3,2] y) <{WEIGHTS}, {STEPS}, int32[6] b> "
    "{ y = QLinearConv <dilations = [2, 2]> (x, s, z, w, t, i, r, v, b) }",
    "conv_in_groups": f"({IMAGE}) => (uint8[2,4,7,6] y) <int8[4,1,1,1] w, {STEPS}> "
    "{ y = QLinearConv <group = 4> (x, s, z, w, t, i, r, v) }",
    "gemm": f"(uint8[5,8] x) => (uint8[5,6] y) <int8[8,6] w, {STEPS}, int32[6] b> "
    "{ y = com.microsoft.QGemm(x, s, z, w, t, i, b, r, v) }",
    "gemm_of_rows": f"(uint8[5,8] x) => (uint8[5,6] y) <int8[6,8] w, {STEPS}, {COLUMNS}, int32[6] b> "
    "{ y = com.microsoft.QGemm <transB = 1> (x, s, z, w, each, zeros, b, r, v) }",
    "gemm_without_bias": f"(uint8[8,5] x) => (uint8[5,6] y) <int8[8,6] w, {STEPS}> "
    "{ y = com.microsoft.QGemm <transA = 1> (x, s, z, w, t, i, , r, v) }",
    "sigmoid": f"({IMAGE}) => (uint8[2,4,7,6] y) <{STEPS}> {{ y = com.microsoft.QLinearSigmoid(x, s, z, t, v) }}",
    "leaky_relu": f"(int8[2,8] x) => (int8[2,8] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearLeakyRelu <alpha = 0.2> (x, s, i, t, i) }",
    "add": f"(uint8[5,8] x, uint8[3,1,8] k) => (uint8[3,5,8] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearAdd(x, s, z, k, t, v, r, z) }",
    "add_of_int8": f"(int8[5,8] x, int8[8] k) => (int8[5,8] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearAdd(x, s, i, k, t, i, r, i) }",
    "mul": f"(uint8[5,8] x, uint8[8] k) => (uint8[5,8] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearMul(x, s, z, k, t, v, r, z) }",
    "where": f"(bool[5,1] c, uint8[5,8] x, uint8[8] k) => (uint8[5,8] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearWhere(c, x, s, z, k, t, v, r, z) }",
    "concat": f"(uint8[5,8] x, uint8[5,3] k) => (uint8[5,11] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearConcat <axis = -1> (r, z, x, s, z, k, t, v) }",
    "softmax": f"(uint8[5,8] x) => (uint8[5,8] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearSoftmax <axis = 1, opset = 17> (x, t, z, r, v) }",
    "average_pool": f"({IMAGE}) => (uint8[2,4,4,3] y) <{STEPS}> {{ y = com.microsoft.QLinearAveragePool "
    "<kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [2, 2]> (x, s, z, r, v) }",
    "average_pool_of_pads": f"({IMAGE}) => (uint8[2,4,9,8] y) <{STEPS}> {{ y = com.microsoft.QLinearAveragePool "
    "<kernel_shape = [3, 3], pads = [2, 2, 2, 2], count_include_pad = 1> (x, s, z, r, v) }",
    "global_average_pool": f"({IMAGE}) => (uint8[2,4,1,1] y) <{STEPS}> "
    "{ y = com.microsoft.QLinearGlobalAveragePool(x, s, z, r, v) }",
}
QUANTIZED = "{ y = com.microsoft.QuantizeLinear "
EXACT |= {
    "quantize": f"(float[5,8] x) => (int8[5,8] y) <{STEPS}> {QUANTIZED} (x, r, i) }}",
    "quantize_columns": f"(float[5,6] x) => (int8[5,6] y) <{STEPS}, {COLUMNS}> {QUANTIZED} (x, each, zeros) }}",
    "quantize_rows": f"(float[6,5] x) => (int8[6,5] y) <{STEPS}, {COLUMNS}> {QUANTIZED} <axis = 0> (x, each, zeros) }}",
}
FLOATS = {
    "dequantize": f"(uint8[5,8] x) => (float[5,8] y) <{STEPS}> {{ y = com.microsoft.DequantizeLinear (x, s, z) }}",
    "dequantize_columns": f"(int8[6,5] x) => (float[6,5] y) <{STEPS}, {COLUMNS}> "
    "{ y = com.microsoft.DequantizeLinear <axis = -2> (x, each) }",
    "dequantize_bias": f"(uint8[5] x) => (float[5] y) <{STEPS}, int32[5] b> "
    "{ d = com.microsoft.DequantizeLinear (b, s) e = DequantizeLinear (x, s, z) y = Add (d, e) }",
    "product_to_float": f"(float[3,5,8] x) => (float[3,5,6] y) <int8[8,6] w, {STEPS}> "
    "{ q, a, o = DynamicQuantizeLinear (x) y = com.microsoft.MatMulIntegerToFloat (q, w, a, t, o, i) }",
    "product_to_float_of_columns": f"(int8[5,8] x) => (float[5,6] y) <int8[8,6] w, {STEPS}, {COLUMNS}, float[6] f> "
    "{ y = com.microsoft.MatMulIntegerToFloat (x, w, s, each, , zeros, f) }",
    "product_of_floats": f"(float[3,5,8] x) => (float[3,5,6] y) <int8[8,6] w, {STEPS}> "
    "{ y = com.microsoft.DynamicQuantizeMatMul (x, w, t, i) }",
    "product_of_floats_of_columns": f"(float[5,8] x) => (float[5,6] y) <int8[8,6] w, {STEPS}, {COLUMNS}, float[6] f> "
    "{ y = com.microsoft.DynamicQuantizeMatMul (x, w, each, , f) }",
    "gemm_of_floats": f"(uint8[5,8] x) => (float[5,6] y) <int8[8,6] w, {STEPS}, int32[1,6] b> "
    "{ y = com.microsoft.QGemm(x, s, z, w, t, i, b) }",
    "gemm_of_a_factor": f"(uint8[5,8] x) => (float[5,6] y) <int8[8,6] w, {STEPS}, int32[6] b> "
    "{ y = com.microsoft.QGemm <alpha = 0.5> (x, s, z, w, t, i, b) }",
}


def with_integers(text: str, opset: int = 17) -> onnx.ModelProto:
    """Return a model whose weights and biases are drawn integers."""
    model, random = parsed(text, opset), np.random.default_rng(7)
    for tensor in model.graph.initializer:
        if tensor.name in "wb":
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            values = random.integers(-128, 128, tuple(tensor.dims)).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return model


def integers(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    random, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        drawn = random.integers(0, 256, [dim.dim_value for dim in kind.shape.dim]).astype(np.uint8)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        numbers = {"b": drawn < 128, "f": random.standard_normal(drawn.shape).astype(np.float32)}
        feeds[value.name] = numbers.get(dtype.kind, drawn.view(np.int8 if dtype == np.int8 else np.uint8))
    return feeds


def both(text: str) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a model, and the model with its operator spelled out."""
    model = with_integers(text)
    result, found = spelled(model)
    assert len(found.spelled) == 1 and not found.stays, found.stays
    return model, result


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_a_rule_computes_the_integers_that_the_operator_does(name: str, optimize: bool) -> None:
    """onnxruntime's graph optimizations find the operator again, so that integers are equal; without, ties may move."""
    model, result = both(EXACT[name])
    before, after = (open_on_cpu(each, optimize=optimize) for each in (model, result))
    for seed in range(4):
        feeds = integers(model, seed)
        (expected,), (value,) = (each.run(None, feeds) for each in (before, after))
        assert value.dtype == expected.dtype and value.shape == expected.shape
        steps = np.abs(value.astype(int) - expected.astype(int))
        assert steps.max() <= 1 and steps.mean() <= (0.0 if optimize else 0.04)


@pytest.mark.parametrize("opset", [10, 13, 19, 21, 23, 24])
@pytest.mark.parametrize(("name", "fusion"), [("product", "quantized_gemm"), ("conv", "quantized_conv")])
def test_a_product_is_fused_in_every_opset(name: str, fusion: str, opset: int) -> None:
    _, report = optimize(with_integers(EXACT[name], opset))
    assert [one.fusion for one in report.fused if one.fusion != "region"] == [fusion]
    assert report.verified.status == "verified" and not report.dropped


@pytest.mark.parametrize("name", ["product_to_float", "product_of_floats", "product_of_floats_of_columns"])
def test_products_that_onnxruntime_joined_with_scales_or_quantizers_are_fused(name: str) -> None:
    _, report = optimize(with_integers(FLOATS[name]))
    assert report.counts == {"quantized_gemm": 1, "region": 1}
    assert report.verified.status == "verified" and not report.dropped


@pytest.mark.parametrize("name", FLOATS)
def test_a_product_of_integers_may_have_floats_as_its_result(name: str) -> None:
    model, result = both(FLOATS[name])
    for seed in range(2):
        feeds = integers(model, seed)
        (expected,), (value,) = (open_on_cpu(each, optimize=False).run(None, feeds) for each in (model, result))
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize(("scale", "stays"), [("inf", True), ("-inf", True), ("nan", True), ("-1e38", True),
                                              ("5e9", True), ("4e9", False)])  # fmt: skip
def test_a_product_with_a_scale_that_is_too_large_stays(scale: str, stays: bool) -> None:
    """onnxruntime multiplies the sum of integers by it, and the numbers would be summed to NaN (fuzzer, 1031004763).

    Numbers of a finite scale may be infinite, too (1050000919).
    """
    held = EXACT["product"].replace("t = {0.013}", f"t = {{{scale}}}")
    node = held.replace(f"float t = {{{scale}}}, ", "").replace(
        "{ y", f"{{ t = Constant <value = float {{{scale}}}> () y"
    )
    for text in (held, node):
        _, found = spelled(with_integers(text))
        reasons = [each.reason for each in found.stays]
        assert bool(found.spelled) is not stays
        assert reasons == ["the scale 't' is not finite, or so large that sums of the numbers may be NaN"] * stays
