"""Bodies of If, Loop and Scan are fused like the main graph, and what is wrong in them is taken back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from case_documents import read_cases, with_weights
from onnx import numpy_helper
from rich.console import Console
from runtimes import open_on_cpu

import onnxfuse.fuse_model
from onnxfuse import Report, optimize
from onnxfuse.ir.protos import nodes, tensors
from onnxfuse.report.lines import subgraph_lines
from onnxfuse.report.report import Subgraph

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '
WRONG_RELU = '''"""A Relu whose stored body is another function."""

from onnxfuse import either, fusion, op, tensor


@fusion(out="...")
def wrong_relu(x=tensor("...")):
    """y = max(x, 0)"""
    return either(op.Abs(x), op.Relu(x))
'''


def parse(text: str) -> onnx.ModelProto:
    return with_weights(onnx.parser.parse_model(HEAD + text))


def ops(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in nodes(model.graph)]


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    (tmp_path / "wrong_relu.py").write_text(WRONG_RELU, encoding="utf-8")
    return tmp_path


def test_equal_bodies_are_one_function_and_weights_stay_outside() -> None:
    text = """(float[b,8] x, bool f) => (float[b,8] y) <float[8,8] w, float[8] c> {
        y = If <then_branch = yes () => (float[b,8] t) { p = MatMul (x, w)  t = Add (p, c) },
                else_branch = no () => (float[b,8] e) { n = Neg (x)  q = MatMul (n, w)  e = Add (q, c) }> (f) }"""
    model, report = optimize(parse(text))
    assert ops(model) == ["If", "gemm_bias_activation", "Neg", "gemm_bias_activation"]
    assert [f.name for f in model.functions] == ["gemm_bias_activation"]
    assert [t.name for t in tensors(model.graph)] == ["w", "c"]
    assert [(one.node, one.where) for one in report.fused] == [
        ("t/gemm_bias_activation", "the then branch of If 'y'"),
        ("e/gemm_bias_activation", "the else branch of If 'y'"),
    ]  # fmt: skip


@pytest.mark.parametrize(("other", "weights"), [("Relu (x)", 1), ("Conv (x, k)", 2)])
def test_a_weight_of_a_body_is_rescaled_and_the_one_outside_stays_for_others(other: str, weights: int) -> None:
    text = f"""(float[b,3,h,w] x, bool f) => (float[b,3,h,w] y)
        <float[3,3,1,1] k, float[3] s, float[3] t, float[3] m, float[3] v> {{
        y = If <then_branch = yes () => (float[b,3,h,w] a) {{
                  c = Conv (x, k)  a = BatchNormalization (c, s, t, m, v) }},
                else_branch = no () => (float[b,3,h,w] e) {{ e = {other} }}> (f) }}"""
    model, report = optimize(parse(text))
    assert [one.kind for one in report.folded] == ["batch_norm"]
    assert len([t for t in tensors(model.graph) if len(t.dims) == 4]) == weights
    assert report.verified.status == "verified"


def test_what_a_body_no_longer_reads_is_fused_outside() -> None:
    """The branch read the sum for its shape alone."""
    text = """(float[b,8] x, float[b,2,4] z, bool f) => (float[b,8] y, float[b,8] r) <float[8,8] w, float[8] c> {
        p = MatMul (x, w)  s = Add (p, c)  r = Relu (s)
        y = If <then_branch = yes () => (float[b,8] t) { sizes = Shape (s)  t = Reshape (z, sizes) },
                else_branch = no () => (float[b,8] e) { e = Neg (x) }> (f) }"""
    model, report = optimize(parse(text))
    assert report.counts == {"gemm_bias_activation": 1} and "gemm_bias_activation" in ops(model)
    assert report.verified.status == "verified"


def test_constants_are_folded_outside_for_bodies() -> None:
    text = """(float[b,n] x, bool f) => (float[b,n] y) {
        nine = Constant <value = float {9}> ()  three = Sqrt (nine)  zero = Constant <value = float {0}> ()
        sizes = Shape (x)  rest = Constant <value_ints = [1]> ()  count = Gather (sizes, rest)
        y = If <then_branch = yes () => (float[b,n] t) { t = Clip (x, zero, three) },
                else_branch = no () => (float[b,n] e) { s = Mul (x, three)  e = Add (s, zero) }> (f) }"""
    model, report = optimize(parse(text.replace("Clip (x, zero, three)", "Pow (x, three)")))
    assert {t.name: numpy_helper.to_array(t).item() for t in model.graph.initializer} == {"three": 3}
    assert ops(model) == ["If", "Pow", "Mul"]
    assert report.verified.status == "verified"


@pytest.mark.parametrize("outside", ["", "k = Add (x, c)"])
def test_an_initializer_that_a_caller_may_change_is_no_constant(outside: str) -> None:
    text = f"""(float[b,8] x, bool f, float[8] c) => (float[b,8] y) <float[8,8] w> {{ {outside}
        y = If <then_branch = yes () => (float[b,8] t) {{ s = Sqrt (c)  p = MatMul (x, w)  t = Add (p, s) }},
                else_branch = no () => (float[b,8] e) {{ e = Add (x, c) }}> (f) }}"""
    model = parse(text)
    model.graph.initializer.append(numpy_helper.from_array(np.full(8, 4, np.float32), "c"))
    optimized, report = optimize(model)
    assert "Sqrt" in ops(optimized) and report.verified.passed
    assert {"c"} == {i.name for i in optimized.graph.input} - {"x", "f"}


def test_a_constant_that_a_function_of_onnxruntime_reads_keeps_its_name() -> None:
    text = """(float[2] x, bool f) => (float[2] y) {
        one = Constant <value_floats = [1.0, 2.0]> ()
        y = If <then_branch = yes () => (float[2] t) { t = com.microsoft.BiasGelu (x, one) },
                else_branch = no () => (float[2] e) { e = Neg (x) }> (f) }"""
    model = parse(text)
    model.opset_import.add(domain="com.microsoft", version=1)
    optimized, report = optimize(model)
    assert [t.name for t in optimized.graph.initializer] == ["one"] and report.verified.status == "verified"


def test_an_optimized_model_stays_as_it_is() -> None:
    text = """(float[b,8] x, int64 m) => (float[b,8] y) <float[8,8] w, float[8] c, bool go = {1}> {
        y = Loop <body = step (int64 i, bool p, float[b,8] s) => (bool q, float[b,8] t) {
          q = Identity (p)  h = MatMul (s, w)  a = Add (h, c)  t = Relu (a) }> (m, go, x) }"""
    once, _ = optimize(parse(text))
    twice, report = optimize(once)
    assert twice == once and report.counts == {}


def test_an_optimized_decoder_with_a_growing_cache_stays_as_it_is() -> None:
    cases = read_cases(Path(__file__).parents[1] / "cases" / "control_flow.txt")
    for name in ("loop_with_growing_cache", "merged_decoder"):
        once, _ = optimize(cases[name].model, verify=False)
        assert optimize(once, verify=False)[0] == once


# What is wrong


BRANCHES = """(float[b,8] x, float[b,8] z, bool f) => (float[b,8] y, float[b,8] n) {{
    n = Softmax (z)  {condition}
    y = If <then_branch = yes () => (float[b,8] t) {{ k = Neg (x)  r = Relu (k)  t = Softmax (r) }},
            else_branch = no () => (float[b,8] e) {{ e = Sqrt (n) }}> (c) }}"""


@pytest.mark.parametrize("condition", ["c = Identity (f)", "other = Not (f)  c = And (f, other)"])
def test_a_wrong_node_in_a_branch_is_taken_back(wrong: Path, condition: str) -> None:
    """Also in a branch that no run takes."""
    model, report = optimize(parse(BRANCHES.format(condition=condition)), patterns=[wrong], skip=["region"])
    (dropped,) = report.dropped
    assert (dropped.fusion, dropped.node) == ("wrong_relu", "r/wrong_relu")
    assert dropped.reason.startswith("on the values of a run its output 'r' is ")
    assert report.counts == {"softmax": 2} and "Relu" in ops(model)
    assert (report.verified.status, report.verified.equal_parts) == ("verified", 2)


def test_a_wrong_node_in_a_branch_that_does_not_run_is_found_on_drawn_values(wrong: Path) -> None:
    """The branch is for inputs of another size."""
    text = """(float[b,n] x) => (float[b,n] y) <float[977] row> {
        one = Constant <value_ints = [1]> ()  nine = Constant <value_ints = [977]> ()
        sizes = Shape (x)  count = Gather (sizes, one)  same = Equal (count, nine)
        y = If <then_branch = yes () => (float[b,n] t) {
                  k = Add (x, row)  r = Relu (k)  t = Softmax (r) },
                else_branch = no () => (float[b,n] e) { e = Neg (x) }> (same) }"""
    _, report = optimize(parse(text), patterns=[wrong], skip=["region"])
    (dropped,) = report.dropped
    assert (dropped.node, dropped.reason.partition(" its ")[0]) == ("r/wrong_relu", "on drawn values")
    assert report.counts == {"softmax": 1} and report.verified.equal_parts == 1


def test_a_wrong_node_in_a_loop_in_a_branch_is_taken_back(wrong: Path) -> None:
    text = """(float[b,8] x, bool f, int64 m) => (float[b,8] y) <bool go = {1}> {
        y = If <then_branch = yes () => (float[b,8] t) {
                  k = Neg (x)
                  t = Loop <body = step (int64 i, bool p, float[b,8] s) => (bool q, float[b,8] u) {
                    q = Identity (p)  r = Relu (s)  u = Softmax (r) }> (m, go, k) },
                else_branch = no () => (float[b,8] e) { e = Neg (x) }> (f) }"""
    _, report = optimize(parse(text), patterns=[wrong])
    (dropped,) = report.dropped
    assert (dropped.node, dropped.reason.partition(" its ")[0]) == ("r/wrong_relu", "on the values of a run")
    assert [one.where for one in report.fused] == ["the body of Loop 't' in the then branch of If 'y'"]


def test_a_node_of_a_loop_that_begins_with_nothing_is_compared_on_drawn_values() -> None:
    """In the first iteration there is no row to normalize."""
    text = """(float[b,n,8] x, int64 m) => (float[b,k,8] y) <float[8] s, float[8] c, bool go = {1}> {
        axis = Constant <value_ints = [1]> ()  zero = Constant <value_ints = [0]> ()
        none = Slice (x, zero, zero, axis)
        y = Loop <body = step (int64 i, bool p, float[] rows) => (bool q, float[] more) {
          q = Identity (p)  l = LayerNormalization (rows, s, c)  more = Concat <axis = 1> (l, x) }> (m, go, none) }"""
    _, report = optimize(parse(text))
    assert report.counts == {"layer_norm": 1}
    assert (report.verified.status, report.verified.equal_parts) == ("verified", 1)


def test_where_the_model_does_not_run_nodes_in_bodies_are_compared_on_drawn_values() -> None:
    text = """(float[b,h,n,8] x, int64 m) => (float[b,h,n,8] y, float[] z) <bool go = {1}, float low = {-10000},
        int64 zero = {0}, int64 one = {1}, int64[1] last = {1}> {
        z = unknown.Operator (x)
        y = Loop <body = step (int64 i, bool p, float[b,h,n,8] s) => (bool q, float[b,h,n,8] t) {
          q = Identity (p)  k = Transpose <perm = [0, 1, 3, 2]> (s)  scores = MatMul (s, k)
          sizes = Shape <start = 2, end = 3> (s)  count = Squeeze (sizes)  at = Range (zero, count, one)
          rows = Unsqueeze (at, last)  keep = LessOrEqual (at, rows)
          masked = Where (keep, scores, low)  w = Softmax (masked)  t = MatMul (w, s) }> (m, go, x) }"""
    model = parse(text)
    model.opset_import.add(domain="unknown", version=1)
    _, report = optimize(model)
    assert report.counts == {"attention": 1} and report.verified.equal_parts == 1
    assert {each.name for each in report.verified.not_compared} == {"y", "z"}


def test_what_passes_do_wrong_in_a_body_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fused node is at fault: then all that was done inside is."""

    def broken(outer: object, body: object, written: onnx.ModelProto) -> None:
        for node in written.graph.node:
            node.op_type = {"Neg": "Abs"}.get(node.op_type, node.op_type)
        write_body(outer, body, written)

    write_body = onnxfuse.fuse_model.write_body
    monkeypatch.setattr(onnxfuse.fuse_model, "write_body", broken)
    model, report = optimize(parse(BRANCHES.format(condition="c = Identity (f)")), skip=["region"])
    (dropped,) = report.dropped
    assert (dropped.fusion, dropped.node) == ("subgraphs", "the then branch of If 'y'")
    assert ops(model) == ["softmax", "If", "Neg", "Relu", "Softmax", "Sqrt"]
    assert report.verified.status == "verified"


# What is said


def test_the_report_counts_by_subgraph() -> None:
    _, report = optimize(parse(BRANCHES.format(condition="c = Identity (f)")))
    assert lines(report, "In ") == [
        "In the then branch of If 'y': 3 -> 1 node, 1 region",
        "In 1 more subgraph nothing was fused",
    ]
    assert report.to_json()["subgraphs"][0] == {
        "where": "the then branch of If 'y'", "nodes_before": 3, "nodes_after": 1, "counts": {"region": 1}, "added": {},
    }  # fmt: skip
    (line,) = subgraph_lines([Subgraph("the body of Loop 'l'", 1, 2, {}, {"Cast": 1})], everything=False)
    assert str(line) == "In the body of Loop 'l': 1 -> 2 nodes, 1 Cast added"


def lines(report: Report, start: str) -> list[str]:
    console = Console(width=200, file=None)
    with console.capture() as capture:
        console.print(report.table())
    return [line.strip() for line in capture.get().splitlines() if line.startswith(start)]


def test_many_subgraphs_are_summed_up() -> None:
    several = "\n".join(
        f"""y{i} = If <then_branch = yes{i} () => (float[b,8] t{i}) {{ t{i} = Softmax (x{i}) }},
            else_branch = no{i} () => (float[b,8] e{i}) {{ e{i} = Neg (x{i}) }}> (f)  x{i + 1} = Neg (y{i})"""
        for i in range(12)
    )
    model = parse(f"(float[b,8] x0, bool f) => (float[b,8] x12) {{ {several} }}")
    _, report = optimize(model, verify=False)
    found = lines(report, "In ")
    assert len(found) == 11 and found[-1] == "In 14 more subgraphs: 2 fused nodes"


def test_a_body_as_a_part_of_a_large_graph_reads_each_weight_from_outside() -> None:
    """A tensor of a graph around is not called an input."""
    text = """(float[b,8] x, float[8] c, bool f) => (float[b,8] y) <float[8,8] w> {
        y = If <then_branch = yes () => (float[b,8] t) { p = MatMul (x, w)  s = Sub (c, p)  t = Relu (s) },
                else_branch = no () => (float[b,8] e) { e = Neg (x) }> (f) }"""
    _, report = optimize(parse(text))
    reasons = " ".join(miss.reason for miss in report.missed)
    assert "graph input" not in reasons, reasons


def test_a_loop_computes_what_it_did_at_other_sizes() -> None:
    """The cache that a Loop carries grows, although the exporter recorded its first size."""
    text = """(float[1,4] x, int64 m) => (float[r,4] y) <float[4] s, float[4] c, bool go = {1}> {
        y = Loop <body = one (int64 i, bool p, float[1,4] rows) => (bool q, float[2,4] more) <float[2,4] k> {
          q = Identity (p)  n = LayerNormalization (rows, s, c)  sizes = Shape (n)  z = Expand (n, sizes)
          more = Concat <axis = 0> (z, x) }> (m, go, x) }"""
    model = parse(text)
    optimized, report = optimize(model)
    assert report.counts == {"layer_norm": 1} and report.verified.status == "verified"
    feeds = {"x": np.arange(4, dtype=np.float32).reshape(1, 4), "m": np.array(5)}
    old, new = (open_on_cpu(each).run(None, feeds)[0] for each in (model, optimized))
    assert new.shape == (6, 4)
    np.testing.assert_allclose(new, old, rtol=1e-5)
