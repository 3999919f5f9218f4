"""What a Loop or Scan carries and does not change is read from outside."""

from __future__ import annotations

import onnx
import onnxruntime
import pytest
from case_documents import with_weights

from onnxfuse import Report, optimize
from onnxfuse.ir.protos import nodes

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '


def optimized(text: str) -> tuple[onnx.ModelProto, Report]:
    result, report = optimize(with_weights(onnx.parser.parse_model(HEAD + text)))
    assert report.verified.status == "verified", report.verified
    return result, report


def carried(report: Report) -> list[tuple[str, str]]:
    return [(one.node, one.into) for one in report.folded if one.kind == "carried"]


LOOP = """(float[b,8] x, int64 m) => (float[b,8] y) <float[8,8] w, float[8] c, bool go = {{1}}> {{
    y, w_out, c_out = Loop <body = step (int64 i, bool p, float[b,8] s, float[8,8] {w}, float[8] {c})
        => (bool q, float[b,8] t, float[8,8] {w_end}, float[8] c_end) {{
      q = Identity (p)  h = MatMul (s, {w})  a = Add (h, {c})  t = Relu (a)  {end} }}> (m, go, x, w, c) }}"""


@pytest.mark.parametrize(
    "names",
    [
        {"w": "wi", "c": "ci", "w_end": "wi", "end": "c_end = Identity (ci)"},
        {"w": "w", "c": "c", "w_end": "w", "end": "c_end = Identity (c)"},  # as PaddlePaddle's converter names them
        {"w": "wi", "c": "ci", "w_end": "we", "end": "k = Identity (wi)  we = Identity (k)  c_end = Identity (ci)"},
    ],
)
def test_weights_that_a_loop_carries(names: dict[str, str]) -> None:
    model, report = optimized(LOOP.format(**names))
    assert carried(report) == [("y", "w"), ("y", "c")]
    loop, *inner = nodes(model.graph)
    assert (list(loop.input), list(loop.output)) == (["m", "go", "x"], ["y"])
    assert [(n.op_type, list(n.input)) for n in inner] == [
        ("Identity", ["p"]), ("gemm_bias_activation", ["s", "w", "c"]),
    ]  # fmt: skip
    onnx.checker.check_model(model, full_check=True)


def test_results_are_what_the_loop_began_with() -> None:
    """But an output of the model stays one of the Loop, and what changes places is carried."""
    text = """(float[4] x, float[4] z, int64 m) => (float[4] y, float[4] k, float[4] u, float[4] v) <bool go = {1}> {
        n = Neg (x)
        r, k, l, u, v = Loop <body = step (int64 i, bool p, float[4] a, float[4] b, float[4] c, float[4] d, float[4] e)
            => (bool q, float[4] s, float[4] b, float[4] c, float[4] e, float[4] d) {
          q = Identity (p)  t = Add (a, b)  s = Add (t, c) }> (m, go, x, z, n, x, z)
        y = Add (r, l) }"""
    model, report = optimized(text)
    assert carried(report) == [("r", "n")]
    (loop,) = (node for node in model.graph.node if node.op_type == "Loop")
    assert (list(loop.input), list(loop.output)) == (["m", "go", "x", "z", "x", "z"], ["r", "k", "u", "v"])
    assert list(model.graph.node[-1].input) == ["r", "n"]


def test_a_loop_that_changes_nothing_vanishes() -> None:
    text = """(float[4] x, int64 m) => (float[4] y) <bool go = {1}> {
        r = Loop <body = step (int64 i, bool p, float[4] a) => (bool q, float[4] b) {
          q = Identity (p)  b = Identity (a) }> (m, go, x)
        y = Neg (r) }"""
    model, report = optimized(text)
    assert [node.op_type for node in model.graph.node] == ["Neg"] and carried(report) == [("r", "x")]


def test_a_name_that_the_body_gives_to_something_else() -> None:
    text = """(float[4] x, float[4] z, int64 m) => (float[4] y) <bool go = {1}> {
        n = Neg (z)
        y, l, o = Loop <body = step (int64 i, bool p, float[4] a, float[4] b, float[4] n)
            => (bool q, float[4] s, float[4] c, float[4] k) {
          q = Identity (p)  k = Add (a, b)  s = Relu (n)  c = Identity (b) }> (m, go, x, n, z) }"""
    _, report = optimized(text)
    assert carried(report) == []


def test_a_scan() -> None:
    text = """(float[n,b,8] x, float[b,8] z) => (float[b,8] y, float[n,b,8] all) <float[8,8] w> {
        y, l, all = Scan <num_scan_inputs = 1, body = one (float[b,8] s, float[8,8] k, float[b,8] r)
            => (float[b,8] t, float[8,8] kept, float[b,8] o) {
          kept = Identity (k)  h = MatMul (r, k)  t = Add (h, s)  o = Softmax (t) }> (z, w, x) }"""
    model, report = optimized(text)
    assert carried(report) == [("y", "w")]
    assert report.counts == {"gemm_bias_activation": 1, "softmax": 1}
    (scan,) = model.graph.node
    assert (list(scan.input), list(scan.output)) == (["z", "x"], ["y", "all"])


def test_what_two_casts_compute_is_carried() -> None:
    """onnxruntime removes the second Cast, and the body would read what nothing computes."""
    text = """(float[4] x, float[4] z, int64 m) => (float[4] y) <bool go = {1}> {
        d = Cast <to = 11> (z)  n = Cast <to = 1> (d)
        y, k = Loop <body = step (int64 i, bool p, float[4] a, float[4] b) => (bool q, float[4] s, float[4] c) {
          q = Identity (p)  s = Add (a, b)  c = Identity (b) }> (m, go, x, n) }"""
    model = with_weights(onnx.parser.parse_model(HEAD + text))
    assert carried(optimize(model, verify=False)[1]) == []
    _, report = optimized(text)
    assert not report.dropped


def test_a_loop_before_opset_11_carries_something() -> None:
    text = """<ir_version: 4, opset_import: ["" : 10]> g (float[4] x) => (float[] y)
      <int64 m = {2}, bool go = {1}> {
        r, y = Loop <body = step (int64 i, bool p, float[4] a) => (bool q, float[4] b, float[4] c)
          { q = Identity (p)  b = Identity (a)  c = Neg (a) }> (m, go, x) }"""
    result, _ = optimize(onnx.parser.parse_model(text), verify=False)
    (loop,) = (node for node in result.graph.node if node.op_type == "Loop")
    assert len(loop.input) == 3


def test_the_scale_of_quantized_weights_is_carried_on() -> None:
    """onnxruntime's optimizer does not find weights outside of a body that it stores in another layout."""
    text = """(float[b,8] x, int64 m) => (float[] y)
      <int8[8,16] w = {WEIGHTS}, float s = {0.1}, int8 zero = {3}, bool go = {1}> {
        r, y = Loop <body = step (int64 i, bool p, float[] a) => (bool q, float[] e, float[b,16] c)
          { q = Identity (p)  e = Identity (a)  d = DequantizeLinear (w, a, zero)  c = MatMul (x, d) }>
          (m, go, s) }"""
    text = HEAD + text.replace("WEIGHTS", ",".join(str(i % 7) for i in range(128)))
    result, _ = optimize(onnx.parser.parse_model(text), verify=False)
    onnxruntime.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
