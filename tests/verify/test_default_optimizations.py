"""Test that the reference is what the file means, and what is told of onnxruntime's own graph optimizations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser

from onnxfuse import optimize
from onnxfuse.verify.compare import Verification, compare

BREAKS = "onnxruntime's graph optimizations break the original: "
CHANGES = "onnxruntime's graph optimizations change output 'y' of the original: it "


def model(text: str, opset: int = 17, **weights: np.ndarray) -> onnx.ModelProto:
    result = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> g {text}')
    result.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    return result


# onnxruntime makes a Clip with the wrong limits of these two.
RELU_CLIP = """(double[b, 4] x) => (double[b, 4] y) <double low = {-1}, double high = {1}>
    { r = Relu (x)  y = Clip (r, low, high) }"""
# onnxruntime makes a LayerNormalization of these, whose scale may not make its result larger.
SCALE_GROWS = """(float[b, 1] x) => (float[b, 2] y, float[b, 1] z)
    <float[2] scale = {0.5, -2}, float two = {2}, float epsilon = {0.00001}>
    { m = ReduceMean <axes = [-1]> (x)  c = Sub (x, m)  q = Pow (c, two)  v = ReduceMean <axes = [-1]> (q)
      a = Add (v, epsilon)  s = Sqrt (a)  d = Div (c, s)  y = Mul (scale, d)  z = Neg (x) }"""
# onnxruntime multiplies the filters by infinity, of which some are 0.
CONV_TIMES_INFINITY = """(float[b, 3, 5, 5] x) => (float[b, 2, 3, 3] y, float[b, 3, 5, 5] z) <float infinity = {inf}>
    { c = Conv (x, w)  y = Mul (c, infinity)  z = Neg (x) }"""


def filters() -> np.ndarray:
    weight = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype(np.float32)
    weight[0, :2] = 0
    return weight


def optimized(source: onnx.ModelProto) -> Verification:
    _, report = optimize(source)
    assert not report.dropped
    assert report.to_json()["verified"]["notes"] == list(report.verified.notes)
    lines = "\n".join(map(str, report.table().renderables))
    assert all(" ".join(note.split()[:6]) in " ".join(lines.split()) for note in report.verified.notes)
    return report.verified


def test_models_that_onnxruntime_breaks_are_verified(tmp_path: Path) -> None:
    verified = optimized(model(RELU_CLIP, 14))
    assert (verified.status, verified.equal_parts) == ("verified", 1)
    assert verified.notes[0].startswith(BREAKS) and "Clip 'min' input" in verified.notes[0]
    verified = optimized(model(SCALE_GROWS))
    assert verified.passed and [one.name for one in verified.outputs] == ["z"], "y is 0 for any x"
    assert verified.notes[0].startswith(BREAKS) and "SimplifiedLayerNormalization" in verified.notes[0]
    _, report = optimize(model(SCALE_GROWS))
    report.write(tmp_path / "report.html")
    assert "graph optimizations break the original" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_onnxruntime_changes_is_told_by_the_output() -> None:
    verified = optimized(model(CONV_TIMES_INFINITY, w=filters()))
    assert verified.passed and [one.name for one in verified.outputs] == ["z"], "y is infinite everywhere"
    assert verified.notes[0].startswith(f"{CHANGES}differs in NaN at ")


def test_nothing_is_told_of_rounding() -> None:
    random = np.random.default_rng(1)
    weights = {f"w{i}": random.standard_normal((64, 64)).astype(np.float32) for i in range(3)}
    text = """(float[b, 64] x) => (float[b, 64] y)
        { a = MatMul (x, w0)  b0 = Tanh (a)  c = MatMul (b0, w1)  d = Erf (c)  e = MatMul (d, w2)  y = Softmax (e) }"""
    source = model(text, **weights)
    assert compare(source, source).notes == ()


def test_what_onnxruntime_breaks_in_the_optimized_model_alone_fails() -> None:
    """The original has no Relu in front of its Clip."""
    source = model(RELU_CLIP.replace("Relu (x)", "Max (x, zero)").replace("low =", "zero = {0}, double low ="), 14)
    found = compare(source, model(RELU_CLIP, 14))
    assert found.passed is False
    assert found.reason.startswith("onnxruntime's graph optimizations break the optimized model, not the original: ")
    assert compare(model(RELU_CLIP, 14), source).passed is True


def test_what_onnxruntime_changes_in_the_optimized_model_alone_fails() -> None:
    """The factor of the original is an input, so onnxruntime cannot fold it into the filters."""
    text = CONV_TIMES_INFINITY.replace(" x)", " x, float infinity)").replace(" <float infinity = {inf}>", "")
    source = model(text, w=filters())
    constant = model(text.replace("(c, infinity)", "(c, k)").replace("<>", "<float k = {inf}>"), w=filters())
    constant.graph.initializer.append(onnx.numpy_helper.from_array(np.array(np.inf, np.float32), "k"))
    feeds = {"x": np.ones((1, 3, 5, 5), np.float32), "infinity": np.array(np.inf, np.float32)}
    found = compare(source, constant, inputs=feeds)
    assert found.passed is False
    assert found.reason.startswith("with onnxruntime's graph optimizations output 'y' differs in NaN at ")


# onnxruntime makes one quantizer of both where nothing else reads the result of the first.
TWO_QUANTIZERS = """(float[b, 8] x) => (float[b, 8] y, float[b, 8] z)
    <float s = {0.4}, float t = {0.3}, uint8 m = {128}>
    { q = QuantizeLinear (x, s, m)  d = DequantizeLinear (q, s, m)  READER
      p = QuantizeLinear (d, t, m)  y = DequantizeLinear (p, t, m) }"""


def test_what_onnxruntime_changes_once_unused_nodes_are_gone_is_told() -> None:
    unused, used = (model(TWO_QUANTIZERS.replace("READER", f"z = Abs (x)  {each}"), 19) for each in ("n = Neg (d)", ""))
    found = compare(unused, used)
    assert (found.status, len(found.notes)) == ("verified", 1)
    told = "onnxruntime's graph optimizations change output 'y' of the original without the nodes that nothing reads: "
    assert found.notes[0].startswith(told)
    limits = "low = Constant <value_float = -128.0> ()  high = Constant <value_float = 127.0> ()"
    rounded = f"{limits}  o = Div (x, s)  r = Round (o)  i = Clip (r, low, high)  z = Mul (i, s)"
    source, apart = (model(TWO_QUANTIZERS.replace("READER", each), 19) for each in ("z = Identity (d)", rounded))
    found = compare(source, apart)
    assert found.passed is False
    assert found.reason.startswith("with onnxruntime's graph optimizations output 'y' is off by ")


def test_products_with_weights_of_8_bits_round_as_on_a_gpu() -> None:
    """onnxruntime would round x to 8 bits in one of the two models, in which nothing else reads the scale."""
    text = """(float[b, 16] x) => (float[b, 8] y, float[b, 1] z)
        { d = DequantizeLinear (w, s, m)  y = MatMul (x, d)  READER }"""
    numbers = np.random.default_rng(0).integers(0, 256, (16, 8)).astype(np.uint8)
    weights = {"w": numbers, "s": np.array(0.02, np.float32), "m": np.array(128, np.uint8)}
    mean = "z = ReduceMean <axes = [1]> (x)"
    source = model(text.replace("READER", f"v = Mul (d, s)  {mean}"), **weights)
    used_once = model(text.replace("READER", mean), **weights)
    assert compare(source, used_once).notes == ()
    assert compare(source, used_once).passed
    numbers[3, 2] ^= 1
    found = compare(source, model(text.replace("READER", mean), **weights))
    assert found.passed is False and "output 'y' is off by " in found.reason


def test_a_dead_branch_of_another_rank_is_no_reason_to_refuse() -> None:
    """onnxruntime folds the shapes of one branch, and finds that the branches differ in rank."""
    text = """(float[1, 4, 8] x) => (float[] y) {
      m = ReduceMean <keepdims = 0> (x)  c = Constant <value = float {-9}> ()  t = Greater (m, c)
      y = If (t) <else_branch = e () => (float[] d) { k = Constant <value = float {8}> ()  d = Div (x, k) },
        then_branch = f () => (float[] i) {
          s = Shape (x)  n = Constant <value = int64 {-1}> ()  g = Gather <axis = 0> (s, n)
          u = Unsqueeze <axes = [0]> (g)  o = Constant <value = int64[1] {-1}> ()  p = Concat <axis = 0> (o, u)
          r = Reshape (x, p)  i = Identity (r) }> }"""
    _, report = optimize(model(text, 10))
    assert report.verified.status == "verified"
    assert report.verified.notes[0].startswith(BREAKS)
