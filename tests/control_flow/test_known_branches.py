"""An If whose condition is known gives way to its branch."""

from __future__ import annotations

import onnx
import pytest
from case_documents import with_weights

from onnxfuse import Report, optimize
from onnxfuse.ir.protos import nodes

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '
BRANCHES = """If <then_branch = yes () => (float[b,6] t) { p = MatMul (x, w)  a = Add (p, c)  t = Relu (a) },
    else_branch = no () => (float[b,6] e) <float[6] k> { q = MatMul (x, w)  e = Mul (q, k) }>"""


def optimized(text: str) -> tuple[onnx.ModelProto, Report]:
    model = with_weights(onnx.parser.parse_model(HEAD + text.replace("<float[6] k>", "<float[6] k = {1,2,3,4,5,6}>")))
    result, report = optimize(model)
    onnx.checker.check_model(result, full_check=True)
    assert report.verified.status == "verified", report.verified
    return result, report


def ops(model: onnx.ModelProto) -> str:
    return " ".join(node.op_type for node in nodes(model.graph))


@pytest.mark.parametrize(
    ("flag", "condition", "left"),
    [
        ("bool f = {1}", "", "gemm_bias_activation"),
        ("bool f = {0}", "", "MatMul"),
        ("int64 two = {2}", "s = Shape (x)  r = Size (s)  f = Equal (r, two)", "gemm_bias_activation"),
        ("int64 nine = {9}", "s = Shape <start = 1> (x)  f = Equal (s, nine)", "MatMul"),
    ],
)
def test_a_condition_that_is_constant_or_follows_from_shapes(flag: str, condition: str, left: str) -> None:
    model, report = optimized(f"""(float[b,8] x) => (float[b,6] y) <float[8,6] w, float[6] c, {flag}> {{
        {condition}  y = {BRANCHES} (f) }}""")
    assert ops(model) == left
    assert [(one.node, one.into) for one in report.folded if one.kind == "branch"] == [("y", "y")]
    assert report.subgraphs == ()


def test_ifs_in_branches_and_in_loops() -> None:
    model, report = optimized(f"""(float[b,8] x, int64 m) => (float[b,6] z, float[b,6] s)
        <float[8,6] w, float[6] c, bool f = {{1}}, bool no = {{0}}> {{
        s = If <then_branch = never () => (float[b,6] n) {{ n = MatMul (x, w) }},
                else_branch = always () => (float[b,6] y) {{ y = {BRANCHES} (f) }}> (no)
        z = Loop <body = step (int64 i, bool go, float[b,6] h) => (bool on, float[b,6] o) {{
          on = Identity (go)
          o = If <then_branch = in () => (float[b,6] u) {{ u = Softmax (h) }},
                  else_branch = out () => (float[b,6] v) {{ v = Neg (h) }}> (f) }}> (m, f, s) }}""")
    assert ops(model) == "gemm_bias_activation Loop Identity softmax"
    assert sorted(one.node for one in report.folded if one.kind == "branch") == ["o", "s", "y"]


def test_an_if_whose_branch_has_a_name_of_another_branch_stays() -> None:
    model, report = optimized(f"""(float[b,8] x, bool g) => (float[b,6] y, float[b,6] z)
        <float[8,6] w, float[6] c, bool f = {{1}}> {{ y = {BRANCHES} (f)  z = {BRANCHES} (g) }}""")
    assert ops(model).split().count("If") == 2
    assert [one for one in report.folded if one.kind == "branch"] == []


def test_several_results_some_of_which_nothing_reads() -> None:
    model, _ = optimized("""(float[b,8] x) => (float[b,8] y) <bool f = {1}> {
        u, v = If <then_branch = yes () => (float[b,8] t, float[b,8] s) { t = Softmax (x)  s = Exp (x) },
                   else_branch = no () => (float[b,8] e, float[b,8] d) { e = Abs (x)  d = Neg (x) }> (f)
        y = Relu (u) }""")
    assert ops(model) == "region"


def test_a_sequence_stays_the_result_of_its_if() -> None:
    """Identity takes no sequences before opset 14."""
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[2] x) => (float[] y) <bool f = {1}, int64 one = {0}> {
        s = If <then_branch = yes () => (seq(float[2]) t) { t = SequenceConstruct (x, x) },
                else_branch = no () => (seq(float[2]) e) { e = SequenceConstruct (x) }> (f)
        y = SequenceAt (s, one) }"""
    model, report = optimize(onnx.parser.parse_model(text))
    assert ops(model).startswith("If ") and report.verified.passed


def test_a_scan_declares_the_shape_that_a_branch_takes_from_onnxruntime() -> None:
    """onnxruntime infers the shape of an If's result, but not that of the Loop that takes its place."""
    model = onnx.parser.parse_model("""<ir_version: 5, opset_import: ["" : 10]>
        scans (float[3,4] x) => (float[3,4] y) <bool yes = {1}, int64 none = {0}> {
        y = Scan <num_scan_inputs = 1, body = step (float[] row) => (float[] out) {
          chosen = If (yes) <then_branch = then () => (float[] taken) {
              taken = Loop (none, yes, row) <body = turn (int64 i, bool go, float[] state) => (bool on, float[] next) {
                on = Identity (go)  next = Add (state, state) }> },
            else_branch = otherwise () => (float[] left) { left = Identity (row) }>
          out = Identity (chosen) }> (x) }""")
    result, report = optimize(model)
    assert report.verified.status == "verified", report.verified
    (body,) = (each.g for node in result.graph.node for each in node.attribute if each.name == "body")
    assert [dim.dim_value for dim in body.output[0].type.tensor_type.shape.dim] == [4]
