"""Test which regions become channels-last, and what stays as it is around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from layout_models import assert_same, attribute, converted, drawn, nodes, operators, parse, run

from onnxfuse import UsageError, optimize

BLOCK = """(float16[n,3,h,w] x) => (float16[n,8] y)
<float16[8,3,3,3] k1, float16[8,8,3,3] k2, int64[2] spatial = {2,3}>
{ a = Conv <pads = [1,1,1,1]> (x, k1) b = Relu (a) c = Conv <pads = [1,1,1,1]> (b, k2) d = Add (c, b) e = Relu (d)
  y = ReduceMean <keepdims = 0> (e, spatial) }"""
SIZES = {"n": 2, "h": 6, "w": 10}


def layouts(model: onnx.ModelProto, layout: Any = "auto") -> list[str | None]:
    return [attribute(node, "layout") for node in nodes(converted(model, layout), "conv_bias_activation")]


@pytest.mark.parametrize(
    ("dtype", "layout", "expected"),
    [
        ("float16", "auto", ["nhwc", "nhwc"]),
        ("float", "auto", ["nhwc", "nhwc"]),
        ("float16", "nchw", [None, None]),
        ("double", "nhwc", []),  # nothing is fused in double precision
    ],
)
def test_dtypes(dtype: str, layout: str, expected: list[str | None]) -> None:
    assert layouts(parse(BLOCK.replace("float16", dtype)), layout) == expected


def test_auto_weighs_the_transposes() -> None:
    """One convolution reads and writes no more than the Transposes in front of it and behind it would."""
    alone = "(float16[n,16,h,w] x) => (float16[n,16,p,q] y) <float16[16,16,3,3] k> { y = Conv (x, k) }"
    assert operators(converted(parse(alone), "auto")) == {"Conv": 1}
    assert operators(converted(parse(alone), "nhwc")) == {"conv_bias_activation": 1, "Transpose": 2}
    steps = "".join(f"a{i + 1} = Conv (a{i}, k) " for i in range(6))
    many = f"(float16[n,16,h,w] a0) => (float16[n,16,p,q] a6) <float16[16,16,3,3] k> {{ {steps} }}"
    assert operators(converted(parse(many), "auto")) == {"conv_bias_activation": 6, "Transpose": 2}


BETWEEN_LRNS = """(float16[n,16,h,w] x) => (float16[n,16,h,w] y) <float16[16,16,3,3] k>
{ a = LRN <size = 3> (x) b = Abs (a) [conv] c = Conv <pads = [1,1,1,1]> (b, k) d = Exp (c) y = LRN <size = 3> (d) }"""


def test_a_convolution_says_why_it_is_channels_first() -> None:
    """The bytes that decide, and the operator that a Transpose would stand beside."""
    result = converted(parse(BETWEEN_LRNS), "auto")
    (stays,) = result.layout.stays
    assert (stays.node, stays.output) == ("conv", "c") and stays.reason == (
        "Transposes around its region would move 2.1 MB, which is more than 50% of the 1.05 MB that its convolutions "
        "move; most are for 'b', because Abs 'b' is channels-first, as LRN 'a' is: its operator has no channels-last "
        "form"
    )
    assert not converted(parse(BETWEEN_LRNS), "nhwc").layout.stays
    assert not converted(parse(BETWEEN_LRNS), "nchw").layout.stays, "which was asked for"


@pytest.mark.parametrize(
    ("text", "opset", "reason"),
    [
        ("(float[n,8,1,1] x) => (float[n,4,1,1] y) <float[4,8,1,1] k> { y = Conv (x, k) }", 20,
         "it computes one pixel, for which no layout is faster"),
        ("(float[n,8,h,w] x, float[4,8,1,1] k) => (float[n,4,h,w] y) { y = Conv (x, k) }", 20,
         "its weights 'k' are not constant"),
        ("(double[n,8,h,w] x) => (double[n,4,h,w] y) <double[4,8,1,1] k> { y = ConvTranspose (x, k) }", 20,
         "it computes in float64"),
        ("(float[n,8,h,w] x) => (float[n,4,h,w] y) <float[4,8,1,1] k> { y = Conv (x, k) }", 8,
         "the model has opset 8, and layouts need opset 9"),
    ],
)  # fmt: skip
def test_reasons_of_convolutions(text: str, opset: int, reason: str) -> None:
    if "double" in text:
        text = text.replace("[4,8,1,1] k>", "[8,4,1,1] k>")
    assert [one.reason for one in converted(parse(text, opset), "auto").layout.stays] == [reason]


def test_a_gate_alone_is_no_reason() -> None:
    """Products of one pixel gain nothing, though they need no Transpose either."""
    text = """(float16[n,8,1,1] x) => (float16[n,4,1,1] y) <float16[8,8,1,1] k1, float16[4,8,1,1] k2>
    { a = Conv (x, k1) b = Relu (a) y = Conv (b, k2) }"""
    assert layouts(parse(text)) == [None]


NHWC_POOL = """(float[n,h,w,8] x) => (float[n,p,q,8] y) <float[4] scales = {1,1,2,2}, float[8] s>
{ a = Mul (x, s) f = Transpose <perm = [0,3,1,2]> (a)
  m = MaxPool <kernel_shape = [2,2], strides = [2,2]> (f) r = Resize (m, , scales)
  l = Transpose <perm = [0,2,3,1]> (r) y = Mul (l, s) }"""


@pytest.mark.parametrize("layout", ["auto", "nhwc"])
def test_pools_of_a_channels_last_model_need_no_convolution(layout: str) -> None:
    """TensorFlow's images are channels-last; converters put Transposes around each pool and Resize."""
    model = parse(NHWC_POOL)
    result = converted(model, layout)
    assert operators(result) == {"Mul": 2, "max_pool": 1, "resize": 1}
    assert_same(model, result.model, n=2, h=6, w=10)


@pytest.mark.parametrize(("view", "pool"), [("Transpose <perm = [0,3,1,2]> (a)", 1), ("Reshape (a, sizes)", 0)])
def test_a_mean_over_a_transposed_image_is_a_pool(view: str, pool: int) -> None:
    text = f"""(float[n,4,6,8] x) => (float[n,8] y) <int64[2] spatial = {{2,3}}, int64[4] sizes = {{-1,8,4,6}}>
    {{ a = Abs (x) f = {view} y = ReduceMean <keepdims = 0> (f, spatial) }}"""
    model = parse(text)
    result = converted(model, "auto")
    assert operators(result).get("global_average_pool", 0) == pool
    assert_same(model, result.model, n=2)


def test_pools_between_channels_first_images_stay() -> None:
    text = "(float[n,8,h,w] x) => (float[n,8,p,q] y) { a = Abs (x) y = MaxPool <kernel_shape = [2,2]> (a) }"
    assert operators(converted(parse(text), "nhwc")) == {"Abs": 1, "MaxPool": 1}


def test_two_regions() -> None:
    """Each begins and ends by itself, where an operator between them has no channels-last form."""
    text = """(float[n,8,h,w] x) => (float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,3,3] k2>
    { a = Conv (x, k1) b = LRN <size = 3> (a) y = Conv (b, k2) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": 4, "LRN": 1}
    assert [end.tensor for end in result.layout.ends] == ["x", "b", "a", "y"]
    assert_same(model, result.model, **SIZES)


def test_an_output_inside_a_region() -> None:
    """It keeps its name, shape and layout, and the region goes on."""
    text = """(float[n,8,h,w] x) => (float[n,8,h,w] b, float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,3,3] k2>
    { a = Conv <pads = [1,1,1,1]> (x, k1) b = Relu (a) y = Conv (b, k2) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": 3}
    assert [o.name for o in result.model.graph.output] == ["b", "y"]
    reasons = {end.tensor: end.reason for end in result.layout.ends}
    assert reasons == {
        "x": "'x' is an input of the graph", "b": "'b' is an output of the graph", "y": "'y' is an output of the graph",
    }  # fmt: skip
    assert_same(model, result.model, **SIZES)


def test_a_tensor_that_a_subgraph_reads() -> None:
    """Subgraphs stay as they are, so that their tensors stay channels-first."""
    text = """(float[n,8,h,w] x, bool c) => (float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,3,3] k2>
    { a = Conv <pads = [1,1,1,1]> (x, k1)
      b = If (c) <then_branch = t () => (float[n,8,h,w] s) { s = Identity (a) },
                  else_branch = e () => (float[n,8,h,w] s) { s = Neg (a) }>
      d = Add (a, b)
      y = Conv (d, k2) }"""
    model = parse(text)
    result = converted(model)
    assert "a subgraph reads 'a'" in [end.reason for end in result.layout.ends]
    assert_same(model, result.model, **SIZES)


def test_an_operand_from_outside_is_transposed() -> None:
    text = """(float[n,8,h,w] x, float[n,8,h,w] z) => (float[n,8,p,q] y) <float[8,8,3,3] k1, float[8,8,3,3] k2>
    { a = Conv <pads = [1,1,1,1]> (x, k1) b = Mul (a, z) y = Conv (b, k2) }"""
    model = parse(text)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 2, "Transpose": 3, "Mul": 1}
    assert_same(model, result.model, **SIZES)


def test_static_sizes_and_one_of_each_dynamic_size() -> None:
    for dims in ("n,8,6,10", "2,8,h,10", "2,8,6,w", "n,8,h,w"):
        text = f"""(float[{dims}] x) => (float[{dims}] y) <float[8,8,3,3] k1, float[8,8,3,3] k2, float[8] s>
        {{ a = Conv <pads = [1,1,1,1]> (x, k1) b = MaxPool <kernel_shape = [3,3], pads = [1,1,1,1]> (a)
           y = Conv <pads = [1,1,1,1]> (b, k2, s) }}"""
        model = parse(text)
        result = converted(model)
        assert operators(result) == {"conv_bias_activation": 2, "max_pool": 1, "Transpose": 2}
        assert_same(model, result.model, **SIZES)


def test_leaving_the_fusion_out_keeps_the_model_channels_first() -> None:
    model = parse(BLOCK)
    assert optimize(model, skip=["conv_bias_activation"], verify=False)[1].layout.nodes == 0
    assert optimize(model, only=["layer_norm"], verify=False)[1].layout.nodes == 0


def test_functions_are_numbered_and_none_is_left_over() -> None:
    result = converted(parse(BLOCK))
    called = [node.op_type for node in result.model.graph.node if node.domain == "onnxfuse"]
    assert called == ["conv_bias_activation", "conv_bias_activation_2", "global_average_pool"]
    assert sorted(f.name for f in result.model.functions) == called


def test_the_result_is_deterministic_and_is_left_alone() -> None:
    model = parse(BLOCK)
    first = converted(model).model
    assert first == converted(model).model
    again = converted(first).model
    assert operators(converted(first)) == operators(converted(model))
    feeds = drawn(model, **SIZES)
    np.testing.assert_array_equal(run(first, feeds)[0], run(again, feeds)[0])


def test_layouts_are_three() -> None:
    with pytest.raises(UsageError, match="layout is 'auto', 'nchw' or 'nhwc', not 'nhcw'"):
        optimize(parse(BLOCK), layout="nhcw")  # type: ignore[arg-type]
