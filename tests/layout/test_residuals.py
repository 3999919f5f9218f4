"""Test which Adds become residuals of products and convolutions once the Transposes between them have vanished."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from layout_models import assert_same, attribute, converted, nodes, operators, parse

import onnxfuse.layout.residuals as residuals
from onnxfuse import optimize
from onnxfuse.layout.assign import LAYOUT

WEIGHTS = """float[8,3,2,2] k0, float[8,1,3,3] kd, float[8] g, float[8] b, float[8,16] w1, float[16] b1,
 float[16,8] w2, float[8] b2, float[8,8] w3, float[4,8,1,1] k1"""
CONVOLUTIONS = "a = Conv <strides = [2,2]> (x, k0) d = Conv <group = 8, pads = [1,1,1,1]> (a, kd)"
START = f"""{CONVOLUTIONS} t = Transpose <perm = [0,2,3,1]> (d) l = LayerNormalization (t, g, b)
  m1 = MatMul (l, w1) a1 = Add (m1, b1) r = Relu (a1)
  m2 = MatMul (r, w2) p = Add (m2, b2) """
BACK = "u = Transpose <perm = [0,3,1,2]> (p)"
BLOCK = f"{START} {BACK} s = Add (u, a) y = Conv (s, k1)"  # of a ConvNeXt, as exporters write it
SIZES = {"n": 2, "h": 10, "w": 12}


def model(
    body: str = BLOCK, inputs: str = "", outputs: str = "", weights: str = "", sizes: str = "h,w", dtype: str = "float"
) -> onnx.ModelProto:
    """Return a model of an image x, whose first output is y, an image of four channels."""
    text = f"""(float[n,3,{sizes}] x{inputs}) => (float[n,4,j,k] y{outputs}) <{WEIGHTS}{weights}> {{ {body} }}"""
    return parse(text.replace("float[", f"{dtype}["))


def products(result: Any) -> list[str]:
    """Return the operands of each product."""
    return [attribute(node, "operands") for node in nodes(result, "gemm_bias_activation")]


def test_a_product_adds_the_residual_of_its_block() -> None:
    before = model()
    result = converted(before)
    expected = {"conv_bias_activation": 3, "layer_norm": 1, "gemm_bias_activation": 2, "Transpose": 1}
    assert operators(result) == expected  # the Transpose is that of the output
    assert products(result) == ["x w bias", "x w bias residual"]
    node = nodes(result, "gemm_bias_activation")[1]
    assert list(node.input) == ["r", "w2", "b2", "a/nhwc"] and list(node.output) == ["s/nhwc"]
    record = next(one for one in result.fusing.fused if one.node == node.name)
    assert (record.replaces, record.output) == (("p", "m2", "s"), "s")
    assert result.layout.nodes == 3
    assert sorted(f.name for f in result.model.functions) == sorted({n.op_type for n in nodes_of_fusions(result)})
    assert_same(before, result.model, **SIZES)


def nodes_of_fusions(result: Any) -> list[onnx.NodeProto]:
    return [node for node in result.model.graph.node if node.domain == "onnxfuse"]


def test_the_node_is_what_fusing_writes() -> None:
    """Its attributes and its function equal those of the same product in front of an Add without a Transpose."""
    direct = parse("""(float[n,e,f,16] r, float[n,e,f,8] a) => (float[n,e,f,8] s) <float[16,8] w2, float[8] b2>
    { m2 = MatMul (r, w2) p = Add (m2, b2) s = Add (p, a) }""")
    written = converted(direct)
    found = converted(model())
    (old,), new = nodes(written, "gemm_bias_activation"), nodes(found, "gemm_bias_activation")[1]
    assert {a.name: a for a in old.attribute} == {a.name: a for a in new.attribute}
    (function,) = written.model.functions
    other = next(f for f in found.model.functions if f.name == new.op_type)
    function.name = other.name
    assert function == other


def test_it_is_verified() -> None:
    _, report = optimize(model(), layout="nhwc")
    assert report.verified.status == "verified" and not report.dropped
    assert report.counts == {"conv_bias_activation": 3, "gemm_bias_activation": 2, "layer_norm": 1}
    assert report.verified.equal_parts == 6


@pytest.mark.parametrize(
    ("end", "inputs", "outputs"),
    [
        pytest.param(f"{BACK} s = Add (u, a) i = Conv (u, k1) j = Conv (s, k1) y = Concat <axis = 2> (i, j)", "", "",
                     id="two readers"),
        pytest.param(f"{BACK} s = Add (u, a) y = Conv (s, k1)", "", ", float[n,e,f,8] p", id="a graph output"),
        pytest.param(f"{BACK} s = Add (u, v) y = Conv (s, k1)", ", float[n,8,1,1] v", "", id="broadcasting"),
        pytest.param(f"{BACK} s = Add (u, v) y = Conv (s, k1)", ", float[n,8,i,j] v", "", id="sizes that may be 1"),
        pytest.param(f"""{BACK} v = Cast <to = 1> (u) c = Cast <to = 1> (a) i = Add (v, c) s = Cast <to = 10> (i)
                         y = Conv (s, k1)""", "", "", id="another dtype"),
        pytest.param("q = Add (p, z) u = Transpose <perm = [0,3,1,2]> (q) s = Add (u, a) y = Conv (s, k1)",
                     ", float[n,5,6,8] z", "", id="a residual already"),
    ],
)  # fmt: skip
def test_what_stays_an_add(end: str, inputs: str, outputs: str) -> None:
    sizes, dtype = "10,12" if "z" in inputs else "h,w", "float16" if "Cast" in end else "float"
    before = model(START + end, inputs, outputs, sizes=sizes, dtype=dtype)
    result = converted(before)
    assert operators(result)["Add"] == 1
    assert ["residual" in operands for operands in products(result)] == [False, "z" in inputs]


def test_of_two_products_one_adds_the_other() -> None:
    text = """t = Transpose <perm = [0,2,3,1]> (d) m1 = MatMul (t, w1) a1 = Add (m1, b1) r = Relu (a1)
      m2 = MatMul (r, w2) p = Add (m2, b2) u = Transpose <perm = [0,3,1,2]> (p)
      m3 = MatMul (t, w3) q = Add (m3, b2) v = Transpose <perm = [0,3,1,2]> (q)
      s = Add (v, u) y = Conv (s, k1)"""
    before = model(CONVOLUTIONS + text)
    result = converted(before)
    assert operators(result)["Add"] == 0
    assert sorted(products(result)) == ["x w bias", "x w bias", "x w bias residual"]
    assert_same(before, result.model, **SIZES)


@pytest.mark.parametrize(("activation", "position"), [("Relu", "after"), ("Identity", "before")])
def test_a_convolution_adds_a_residual(activation: str, position: str) -> None:
    """The sum is an output of the graph and has its layout, as the residual has."""
    body = f"{CONVOLUTIONS} c = {activation} (d) t = Transpose <perm = [0,2,3,1]> (c) z = Add (t, v) y = Conv (a, k1)"
    before = model(body, ", float[n,5,6,8] v", ", float[n,5,6,8] z", sizes="10,12")
    result = converted(before)
    assert operators(result)["Add"] == 0
    node = next(n for n in nodes(result, "conv_bias_activation") if "residual" in attribute(n, "operands"))
    assert attribute(node, "residual_position") == position and list(node.output) == ["z"]
    assert "residual_position" in attribute(node, "attributes").split()
    assert_same(before, result.model, n=2)
    _, report = optimize(before, layout="nhwc")
    assert report.verified.status == "verified" and not report.dropped


ROWS = """t = Transpose <perm = [0,2,3,1]> (d) i = Reshape (t, rows)
  l = LayerNormalization (i, g, b) e = Softmax (l) m2 = MatMul (e, w3) p = Add (m2, b2)
  v = Reshape (p, image) u = Transpose <perm = [0,3,1,2]> (v) s = Add (u, a) y = Conv (s, k1)"""


@pytest.mark.parametrize(
    ("rows", "image", "adds"),
    [
        pytest.param("0,30,8", "0,5,6,8", 0, id="of each image"),
        pytest.param("-1,8", "-1,5,6,8", 1, id="of all images"),  # the body is a Gemm, which has two axes
        pytest.param("0,15,16", "0,5,6,8", 1, id="of other lengths"),
    ],
)
def test_rows_of_an_image(rows: str, image: str, adds: int) -> None:
    """As behind the attention of a UNet: the Reshape behind the product moves in front of it."""
    body, weights = ROWS, f", int64[{rows.count(',') + 1}] rows = {{{rows}}}, int64[4] image = {{{image}}}"
    if "16" in rows:
        body = body.replace("LayerNormalization (i, g, b)", "Identity (i)").replace("w3", "w16").replace("b2", "b1")
        weights += ", float[16,16] w16"
    before = model(CONVOLUTIONS + body, weights=weights, sizes="10,12")
    result = converted(before)
    assert operators(result)["Add"] == adds
    assert_same(before, result.model, n=2)
    optimized, report = optimize(before, layout="nhwc")
    assert report.verified.status == "verified" and not report.dropped and not report.verified.not_compared
    again, second = optimize(optimized, layout="nhwc", verify=False)
    assert again == optimized and second.counts == {}


def test_an_operand_that_a_convolution_reads_too() -> None:
    """Behind its Transpose in the original: the product is compared with what reads the operand in front of that."""
    body = f"""{START} {BACK} i = Conv (u, k1)
      m3 = MatMul (p, w3) q = Add (m3, b2) v = Transpose <perm = [0,3,1,2]> (q) s = Add (a, v) j = Conv (s, k1)
      y = Concat <axis = 2> (i, j)"""
    before = model(body)
    assert products(converted(before)) == ["x w bias", "x w bias", "x w bias residual"]
    _, report = optimize(before, layout="nhwc")
    assert report.verified.status == "verified" and not report.dropped


def test_a_wrong_residual_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum then stays channels-first, so that Transposes stay between it and the product."""
    right = residuals.chained

    def wrong(*arguments: Any, **named: Any) -> onnx.FunctionProto:
        body = right(*arguments, **named)
        body.node[-1].op_type = "Sub"
        return body

    monkeypatch.setattr(residuals, "chained", wrong)
    optimized, report = optimize(model(), layout="nhwc", regions=False)
    (dropped,) = report.dropped
    assert dropped.fusion == LAYOUT and "its output 's' is " in dropped.reason
    assert report.verified.status == "verified"
    assert [list(node.output) for node in optimized.graph.node if node.op_type == "Add"] == [["s"]]
    body = f"{CONVOLUTIONS} t = Transpose <perm = [0,2,3,1]> (d) z = Add (t, v) y = Conv (a, k1)"
    _, report = optimize(model(body, ", float[n,5,6,8] v", ", float[n,5,6,8] z", sizes="10,12"), layout="nhwc")
    (dropped,) = report.dropped
    assert dropped.fusion == "conv_bias_activation" and "its output 'z' is " in dropped.reason
    assert report.verified.status == "verified"
    assert report.counts == {"conv_bias_activation": 3, "region": 1}  # the sum and the Transpose to y share a launch
