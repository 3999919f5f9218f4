"""Test transposed convolutions in channels-last regions: they compute the same, and no Transpose is left inside."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
from layout_models import assert_same, attribute, converted, nodes, operators, parse

FUSION = "conv_transpose_bias_activation"
BORDERS = 2  # Transposes: of x and of y
SIZES = {"n": 2, "h": 6, "w": 9}

# Each with the shape of its weights; it computes `b` of 8 channels from `a` of 8.
FORMS = [
    ("strides = [2, 2]", (8, 8, 2, 2)),
    ("strides = [2, 2], pads = [1, 1, 1, 1]", (8, 8, 4, 4)),
    ("strides = [2, 3], pads = [1, 0, 0, 2], output_padding = [1, 2], dilations = [2, 1]", (8, 8, 3, 3)),
    ("strides = [1, 2], group = 2", (8, 4, 3, 2)),
    ("strides = [2, 2], group = 8, pads = [1, 1, 1, 1]", (8, 1, 4, 4)),
    ('strides = [2, 2], auto_pad = "SAME_UPPER"', (8, 8, 3, 3)),
    ('strides = [3, 2], auto_pad = "SAME_LOWER"', (8, 8, 4, 2)),
    ("strides = [2, 2], output_shape = [13, 18]", (8, 8, 3, 3)),
]


def between(form: str, weights: tuple[int, ...], then: str, opset: int = 20) -> onnx.ModelProto:
    """Return a model with a transposed convolution between two others."""
    shape = ",".join(map(str, weights))
    return parse(
        f"""(float[n,8,h,w] x) => (float[n,8,p,q] y)
        <float[8,8,3,3] k1, float[{shape}] k, float[8] s, float[8,8,3,3] k2>
        {{ a = Conv <pads = [1,1,1,1]> (x, k1) {then.format(up=f"ConvTranspose <{form}> (a, k, s)")}
           y = Conv <pads = [1,1,1,1]> (b, k2) }}""",
        opset,
    )


@pytest.mark.parametrize("then", ["b = {up}", "c = {up} b = Relu (c)", "c = {up} t = Sigmoid (c) b = Mul (c, t)"])
@pytest.mark.parametrize(("form", "weights"), FORMS)
def test_every_form(form: str, weights: tuple[int, ...], then: str) -> None:
    model = between(form, weights, then)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, FUSION: 1, "Transpose": BORDERS}
    (node,) = nodes(result, FUSION)
    is_depthwise = weights[1] == 1
    assert attribute(node, "w_layout") == ("hwoi" if is_depthwise else "ihwo")
    assert attribute(node, "activation") == {"b = {up}": "none", "c = {up} b = Relu (c)": "relu"}.get(then, "silu")
    assert attribute(node, "operands") == "x w bias" and attribute(node, "layout") == "nhwc"
    named = set(attribute(node, "attributes").split())
    assert named == {a.name for a in node.attribute} - {"fusion", "operands", "output_types", "attributes"}
    stored = next(t for t in result.model.graph.initializer if t.name == node.input[1])
    channels, filters, *kernel = weights
    assert list(stored.dims) == ([*kernel, filters, channels] if is_depthwise else [channels, *kernel, filters])
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize("opset", range(11, 24))
def test_every_opset(opset: int) -> None:
    model = between(*FORMS[1], "c = {up} b = Relu (c)", opset)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, FUSION: 1, "Transpose": BORDERS}
    assert_same(model, result.model, **SIZES)


def test_a_residual_in_the_region() -> None:
    model = parse(
        """(float[n,8,6,8] x) => (float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,2,2] k2, float[8,8,2,2] k3>
        { a = Conv <pads = [1,1,1,1]> (x, k1) b = Conv <strides = [2,2]> (a, k2)
          c = ConvTranspose <strides = [2,2]> (b, k3) d = Add (c, a) y = Relu (d) }"""
    )
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, FUSION: 1, "Transpose": BORDERS}
    (node,) = nodes(result, FUSION)
    assert (attribute(node, "operands"), attribute(node, "residual_position")) == ("x w residual", "before")
    assert_same(model, result.model, n=2)


def test_a_decoder_is_one_region() -> None:
    """A U-Net: no Transpose stands at a transposed convolution, nor at the Concats of its levels."""
    model = parse(
        """(float[n,3,h,w] x) => (float[n,4,p,q] y)
        <float[8,3,3,3] k0, float[16,8,3,3] k1, float[16,8,2,2] u1, float[8] b1, float[8,16,3,3] k2, float[4,8,1,1] k3>
        { a = Conv <pads = [1,1,1,1]> (x, k0) b = Relu (a)
          p1 = MaxPool <kernel_shape = [2,2], strides = [2,2]> (b)
          c = Conv <pads = [1,1,1,1]> (p1, k1) d = Relu (c)
          e = ConvTranspose <strides = [2,2]> (d, u1, b1)
          f = Concat <axis = 1> (b, e)
          g = Conv <pads = [1,1,1,1]> (f, k2) i = Relu (g) y = Conv (i, k3) }"""
    )
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 4, FUSION: 1, "max_pool": 1, "concat": 1, "Transpose": 1}
    assert_same(model, result.model, n=2, h=8, w=12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "r = ReduceMean <keepdims = 0> (a) m = Mul (k, r) b = ConvTranspose (a, m)",
            "its weights 'm' are not constant",
        ),
        (
            "r = ReduceMean <axes = [0,2,3], keepdims = 0> (a) b = ConvTranspose (a, k, r)",
            "its bias 'r' is not constant",
        ),
    ],
)
def test_where_regions_end(text: str, reason: str) -> None:
    model = parse(
        f"""(float[n,8,h,w] x) => (float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,3,3] k, float[8,8,3,3] k2>
        {{ a = Conv <pads = [1,1,1,1]> (x, k1) {text} y = Conv (b, k2) }}""", 17,
    )  # fmt: skip
    result = converted(model)
    assert any(end.reason.endswith(f"is channels-first: {reason}") for end in result.layout.ends), result.layout.ends
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize(("form", "weights"), FORMS)
def test_onnxruntime_cancels_the_transposes_inside(form: str, weights: tuple[int, ...], tmp_path: Path) -> None:
    """On the CPU the same operators remain, and the Transposes of the borders at most."""
    result = converted(between(form, weights, "c = {up} b = LeakyRelu (c)"))
    found = optimized(result.model, tmp_path / "optimized.onnx")
    assert found["ConvTranspose"] == 1 and found["Conv"] + found["FusedConv"] == BORDERS
    assert found["Transpose"] <= BORDERS, found


def optimized(model: onnx.ModelProto, path: Path) -> Counter[str]:
    """Return how often each operator remains in what onnxruntime runs on the CPU."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(path)
    onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(path).graph.node)
