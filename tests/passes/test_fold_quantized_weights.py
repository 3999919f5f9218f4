"""Quantized weights of norms and, where weights alone are quantized, convolutions: folded to onnxruntime's numbers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import apply, assert_same, ops, parse, run

from onnxfuse import optimize
from onnxfuse.passes.fold_quantized_weights import fold_quantized_weights

HEADER = "(float[N,3,h,w] x) => (y)"
RANDOM = np.random.default_rng(0)
# Halfway cases, and values beyond the range of 8 bits.
FLOATS = np.concatenate([np.arange(-130, 131) * 0.005, RANDOM.standard_normal(27)]).astype(np.float32)[-36:]
EDGES = (np.arange(36, dtype=np.float32) - 18) * np.float32(0.5)
INTEGERS = {
    name: RANDOM.integers(-128 if name != "uint8" else 0, 127, (4, 3, 3, 3)) for name in ("int8", "uint8", "int32")
}
SCALES = np.array([0.01, 0.02, 0.003, 1.7], np.float32)


def model(nodes: str, **constants: np.ndarray) -> onnx.ModelProto:
    return parse(f"{HEADER} {{ {nodes} c = Conv(x, w) y = Relu(c) }}", 13, **constants)


def folded_exactly(before: onnx.ModelProto) -> np.ndarray:
    """Return the folded weights, which must be those that onnxruntime computes, bit by bit."""
    after, (folded,) = apply(before, fold_quantized_weights)
    assert [one.kind for one in folded] == ["constant"] * ops(before).count("Linear") and "Linear" not in ops(after)
    found = next(numpy_helper.to_array(t) for t in after.graph.initializer if t.name == "w")
    computed = onnx.ModelProto()
    computed.CopyFrom(before)
    computed.graph.output.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, found.shape))
    np.testing.assert_array_equal(found, run(computed, {"x": np.zeros((1, 3, 5, 5), np.float32)})[1])
    assert_same(before, after, (2, 3, 7, 5))
    return found


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("axis", [None, 0, 1, -3])
def test_stored_quantized(dtype: str, axis: int | None) -> None:
    scale = SCALES[0] if axis is None else SCALES[: 4 if axis == 0 else 3]
    zero = np.full(scale.shape, 7, dtype)
    place = "" if axis is None else f"<axis = {axis}>"
    folded_exactly(model(f"w = DequantizeLinear{place}(q, s, z)", q=INTEGERS[dtype].astype(dtype), s=scale, z=zero))


def test_weights_of_norms_beside_quantized_activations() -> None:
    """No norm runs in integers, but the Conv may."""
    text = (
        "(float[N,3,h,w] x) => (y) { i = QuantizeLinear(x, s) j = DequantizeLinear(i, s) w = DequantizeLinear(q, s) "
        "u = DequantizeLinear(r, s) c = Conv(j, w) y = InstanceNormalization(c, u, u) }"
    )
    before = parse(text, 13, q=np.ones((3, 3, 1, 1), np.uint8), r=np.array([3, 200, 7], np.uint8), s=np.float32(0.1))
    after, (folded,) = apply(before, fold_quantized_weights)
    assert [one.into for one in folded] == ["u"]
    assert_same(before, after, (2, 3, 7, 5))


def test_weights_of_transposed_convolutions_beside_quantized_activations() -> None:
    """onnxruntime has no ConvTranspose of integers."""
    text = (
        "(float[N,3,h,w] x) => (y) { i = QuantizeLinear(x, s) j = DequantizeLinear(i, s) "
        "w = DequantizeLinear<axis = 1>(q, t) y = ConvTranspose(j, w) }"
    )
    before = parse(text, 13, q=INTEGERS["int8"].astype(np.int8)[:3], s=np.float32(0.1), t=SCALES[:3])
    after, (folded,) = apply(before, fold_quantized_weights)
    assert [one.into for one in folded] == ["w"]
    assert_same(before, after, (2, 3, 7, 5))


BETWEEN = (
    "(float[N,3,h,w] x) => (y) { i = QuantizeLinear(x, s) j = DequantizeLinear(i, s) w = DequantizeLinear(q, t) "
    "c = ConvTranspose(j, w) r = Relu(c) o = QuantizeLinear(r, s) y = DequantizeLinear(o, s) }"
)


@pytest.mark.parametrize(
    ("largest", "axis", "is_folded"), [(127, "", True), (126, "", False), (127, "<axis = 1>", False)]
)
def test_weights_that_onnxruntime_would_quantize_again_stay(largest: int, axis: str, is_folded: bool) -> None:
    """It quantizes float weights of a ConvTranspose between quantizers with one scale, for which the largest is 127."""
    weights = np.clip(INTEGERS["int8"][:3], -126, 126).astype(np.int8)
    weights[0, 0, 0, 0] = largest
    scale = SCALES[:3] if axis else SCALES[0]
    text = BETWEEN.replace("DequantizeLinear(q", f"DequantizeLinear{axis}(q")
    before = parse(text, 13, q=weights, s=np.float32(0.1), t=scale)
    after, (folded,) = apply(before, fold_quantized_weights)
    assert [one.into for one in folded] == (["w"] if is_folded else [])
    assert_same(before, after, (2, 3, 7, 5))


@pytest.mark.parametrize("dtype", ["int16", "uint16", "uint8"])
def test_weights_beside_16_bits(dtype: str) -> None:
    """No operator multiplies integers of 16 bits, so that weights of MatMuls are floats."""
    text = (
        "(float[N,6,3] x) => (y) { i = QuantizeLinear(x, s, z) j = DequantizeLinear(i, s, z) "
        "w = DequantizeLinear(q, s) y = MatMul(j, w) }"
    )
    constants = {"q": np.ones((3, 5), np.int8), "s": np.float32(0.01), "z": np.array(7, dtype)}
    before = parse(text, 21, **constants)
    after, (folded,) = apply(before, fold_quantized_weights)
    assert [one.into for one in folded] == (["w"] if "16" in dtype else [])
    assert_same(before, after, (2, 6, 3))


def test_weights_beside_quantized_activations_are_stored_as_integers() -> None:
    """Kernels multiply the integers; onnxruntime finds its integer operators by the DequantizeLinear."""
    text = (
        "(float[N,3,h,w] x) => (y) { i = QuantizeLinear(x, s) j = DequantizeLinear(i, s) q = QuantizeLinear(k, s, z) "
        "w = DequantizeLinear(q, s, z) y = Conv(j, w) }"
    )
    constants = {"k": FLOATS.reshape(4, 3, 3, 1), "s": np.float32(0.1), "z": np.int8(3)}
    before = parse(text, 13, **constants)
    after, (folded,) = apply(before, fold_quantized_weights)
    assert [one.into for one in folded] == ["q"] and ops(after).count("Linear") == 3
    assert_same(before, after, (2, 3, 7, 5))
    _, report = optimize(before)
    assert report.counts["quantized_conv"] == 1 and report.verified.status == "verified"


def test_quantized_weights_that_are_outputs_stay() -> None:
    text = "(float[N,3,h,w] x) => (y, q) { q = QuantizeLinear(k, s) w = DequantizeLinear(q, s) y = Conv(x, w) }"
    before = parse(text, 13, k=FLOATS.reshape(4, 3, 3, 1), s=np.float32(0.1))
    after, (folded,) = apply(before, fold_quantized_weights)
    assert folded == [] and ops(after) == ops(before)


def test_biases_beside_quantized_activations() -> None:
    """onnxruntime quantizes a bias of numbers again where a convolution runs in integers, by the product of the scales.

    With other scales that would round the bias, and before opset 11 onnxruntime would refuse the model.
    """
    text = (
        "(float[N,3,h,w] x) => (y) { i = QuantizeLinear(x, s) j = DequantizeLinear(i, s) w = DequantizeLinear(q, s) "
        "b = DequantizeLinear<axis=0>(r, t) y = Conv(j, w, b) }"
    )
    stored = {"q": np.ones((3, 3, 1, 1), np.uint8), "r": np.array([-300, 70000, 7], np.int32)}
    scale = np.float32(0.1) * np.float32(0.1)
    for opset, scales, count in ((13, [scale] * 3, 1), (13, [scale, scale, 0.02], 0), (10, scale, 0)):
        nodes = text.replace("<axis=0>", "") if opset == 10 else text
        before = parse(nodes, opset, s=np.float32(0.1), t=np.array(scales, np.float32), **stored)
        after, (folded,) = apply(before, fold_quantized_weights)
        assert [one.into for one in folded] == ["b"][:count]
        assert_same(before, after, (2, 3, 7, 5))


def test_stored_without_a_zero_point() -> None:
    folded_exactly(model("w = DequantizeLinear(q, s)", q=INTEGERS["int32"].astype(np.int32), s=SCALES[1]))
    folded_exactly(model("w = DequantizeLinear(q, s)", q=INTEGERS["uint8"].astype(np.uint8), s=SCALES[1]))


@pytest.mark.parametrize("values", [FLOATS, EDGES], ids=["random", "halfway"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_rounded_as_if_quantized(values: np.ndarray, dtype: str) -> None:
    kernel = values.reshape(4, 3, 3, 1)
    constants = {"k": kernel, "s": np.float32(1) if values is EDGES else np.float32(0.0123), "z": np.array(5, dtype)}
    folded_exactly(model("q = QuantizeLinear(k, s, z) w = DequantizeLinear(q, s, z)", **constants))
    each = {"k": kernel, "s": SCALES, "z": np.zeros(4, dtype)}
    folded_exactly(model("q = QuantizeLinear<axis=0>(k, s, z) w = DequantizeLinear<axis=0>(q, s, z)", **each))


def test_in_half_precision_the_product_is_rounded_once() -> None:
    stored, scale = INTEGERS["int8"].astype(np.int8), np.float16(0.0123)
    text = "(float16[N,3,h,w] x) => (y) { w = DequantizeLinear(q, s) y = Conv(x, w) }"
    after, _ = apply(parse(text, 19, q=stored, s=scale), fold_quantized_weights)
    found = next(numpy_helper.to_array(t) for t in after.graph.initializer if t.name == "w")
    np.testing.assert_array_equal(found, (stored.astype(np.float64) * np.float64(scale)).astype(np.float16))


@pytest.mark.parametrize("opset", [19, 21, 23])
def test_float16_that_is_rounded_as_if_quantized(opset: int) -> None:
    """Quotients are of float32 up to opset 22, and of float16 from 23 on; some of these differ in their last bit."""
    random = np.random.default_rng(1)
    given = {"k": random.uniform(-20, 20, (4, 64, 3, 3)).astype(np.float16), "z": np.zeros(4, np.int8)}
    text = "(float16[N,64,h,w] x) => (y) { q = QuantizeLinear<axis=0>(k, s, z) w = DequantizeLinear<axis=0>(q, s, z) "
    before = parse(text + "y = Conv(x, w) }", opset, s=np.array([0.1, 0.03, 0.007, 1.7], np.float16), **given)
    after, (folded,) = apply(before, fold_quantized_weights)
    assert [one.into for one in folded] == ["q", "w"] and ops(after) == "Conv"
    found = next(numpy_helper.to_array(t) for t in after.graph.initializer if t.name == "w")
    before.graph.output.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT16, found.shape))
    np.testing.assert_array_equal(found, run(before, {"x": np.zeros((1, 64, 5, 5), np.float16)})[1])


def test_attributes_of_newer_opsets_stay() -> None:
    """A result of another dtype than the scale, and blocks; their defaults do not matter."""
    constants = {"q": INTEGERS["int8"].astype(np.int8), "s": SCALES[0].astype(np.float16)}
    for attributes, count in (("output_dtype = 1", 0), ("output_dtype = 0, block_size = 0", 1)):
        dtype = "float" if count == 0 else "float16"
        text = f"({dtype}[N,3,h,w] x) => (y) {{ w = DequantizeLinear<{attributes}>(q, s) y = Conv(x, w) }}"
        _, (folded,) = apply(parse(text, 23, **constants), fold_quantized_weights)
        assert len(folded) == count


@pytest.mark.parametrize(
    "nodes",
    [
        "w = DequantizeLinear(q, s) v = MatMul(x, x) c = Conv(v, w) d = DequantizeLinear(q, s) y = Mul(c, d)",
        "w = DequantizeLinear(q, s) i = QuantizeLinear(x, s) j = DequantizeLinear(i, s) y = Conv(j, w)",
        "w = DequantizeLinear(q, s) i, t, z = DynamicQuantizeLinear(x) j = DequantizeLinear(i, t, z) y = Conv(j, w)",
        "w = DequantizeLinear(q, s) y = Conv(w, w)",  # the image
        "w = DequantizeLinear(q, s) y = MatMul(w, x)",  # how a weight is stored is part of a language model
    ],
)
def test_what_stays(nodes: str) -> None:
    used = {"q": np.ones((3, 3, 1, 1), np.uint8), "s": np.float32(0.5)}
    before = parse(f"(float[N,3,h,h] x) => (y) {{ {nodes} }}", 13, **used)
    after, (folded,) = apply(before, fold_quantized_weights)
    kept = [node.op_type for node in after.graph.node].count("DequantizeLinear")
    all_of_it = [node.op_type for node in before.graph.node].count("DequantizeLinear")
    assert (kept, len(folded)) == ((all_of_it, 0) if "Mul(c, d)" not in nodes else (1, 1))
