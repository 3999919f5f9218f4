"""Ifs whose branches differ in rank run after optimizing as they did before, and nothing is taken from one branch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from runtimes import open_on_cpu

from onnxfuse import optimize
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph

ROWS = """m = Constant <value = int64[1] {-1}> () s = Shape (x) i = Constant <value = int64 {-1}> ()
    g = Gather <axis = 0> (s, i) """
UNSQUEEZE = {
    True: "a = Constant <value = int64[1] {0}> () u = Unsqueeze (g, a)",
    False: "u = Unsqueeze <axes = [0]> (g)",
}
READERS = {
    "output": "y = Identity (r)",
    "operator": "y = Relu (r)",
    "shape": "q = Shape (r) y = Cast <to = 1> (q)",
}


def model(opset: int, reader: str, *, outside: bool, swapped: bool) -> onnx.ModelProto:
    """Return an If of which one branch makes rows of an image, of two axes, and the other keeps its three axes.

    The rows' target is computed, in the branch or outside of it.
    """
    target = f"{ROWS} {UNSQUEEZE[opset >= 13]} t = Concat <axis = 0> (m, u)"
    rows = "g () => (float o) { " + ("" if outside else target) + " o = Reshape (x, t) }"
    same = "g () => (float p) { n = Abs (x) p = Relu (n) }"
    branches = (
        f"then_branch = {same}, else_branch = {rows}" if swapped else f"then_branch = {rows}, else_branch = {same}"
    )
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]> g (float[1,4,8] x, bool c) => (float y) {{
        {target if outside else ""} r = If (c) <{branches}> {READERS[reader]} }}"""
    found = onnx.parser.parse_model(text)
    for node in found.graph.node:
        for attribute in node.attribute if node.op_type == "If" else ():
            attribute.g.output[0].type.tensor_type.ClearField("shape")
    found.graph.output[0].type.tensor_type.ClearField("shape")
    return found


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 17, 21])
@pytest.mark.parametrize(("outside", "swapped"), [(False, False), (False, True), (True, False), (True, True)])
def test_branches_of_two_ranks(opset: int, outside: bool, swapped: bool, reader: str) -> None:
    """Before opset 11, onnxruntime refuses such an If if it can infer both shapes."""
    before = model(opset, reader, outside=outside, swapped=swapped)
    after, _ = optimize(before, verify=False)
    sessions = [open_on_cpu(each, optimize=False) for each in (before, after)]
    x = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)
    for flag in (False, True):
        expected, found = (each.run(None, {"x": x, "c": np.array(flag)})[0] for each in sessions)
        np.testing.assert_array_equal(found, expected)


def test_branches_of_one_shape_are_fused() -> None:
    text = """<ir_version: 8, opset_import: ["" : 10]> g (float[b,4,8] x, bool c) => (float[b,4,8] y) {
        r = If (c) <then_branch = g () => (float[b,4,8] o) { o = Softmax <axis = 2> (x) },
          else_branch = g () => (float[b,4,8] p) { n = Abs (x) p = Relu (n) }> y = Neg (r) }"""
    _, report = optimize(onnx.parser.parse_model(text), regions=False)
    assert report.counts == {"softmax": 1}
    assert report.verified.status == "verified"


def test_a_fused_node_records_no_shape_of_a_tensor_that_unequal_branches_read() -> None:
    """onnxruntime infers nothing of the Loop's result, and so accepts the If, unless a region records its input."""
    text = """<ir_version: 8, opset_import: ["" : 10]> g (float[n] x, bool c) => (float y, float z)
        <int64 two = {2}, bool yes = {1}> {
        w = Loop (two, yes, x) <body = g (int64 i, bool go, float s) => (bool on, float t) {
            on = Identity (go) t = Softplus (x) }>
        y = If (c) <then_branch = g () => (float o) { o = Identity (w) },
          else_branch = g () => (float p) { p = Unsqueeze <axes = [0]> (w) }>
        k = Cast <to = 1> (c) e = Exp (w) z = Mul (e, k) }"""
    before = onnx.parser.parse_model(text)
    for value in (*before.graph.output, *(o for node in before.graph.node for a in node.attribute for o in a.g.output)):
        value.type.tensor_type.ClearField("shape")
    after, report = optimize(before, verify=False)
    assert report.counts == {"region": 1}
    x = np.array([0.5, -1.0], np.float32)
    for flag in (False, True):
        feeds = {"x": x, "c": np.array(flag)}
        expected, found = (open_on_cpu(each, optimize=False).run(None, feeds) for each in (before, after))
        assert [each.shape for each in found] == [each.shape for each in expected]


@pytest.mark.parametrize("opset", [7, 11, 12, 13])
@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_taken_from_a_branch_that_gives_a_scalar(opset: int, nested: bool) -> None:
    """Before opset 13, onnx infers a scalar where it does not know the other branch, such as a Reshape to a constant.

    A region recorded it, so that onnxruntime refused a branch that read the region's result (seed 1010013127).
    """
    result = """r = If (c) <then_branch = g () => (float[] o) { o = ReduceMax <keepdims = 0> (x) },
        else_branch = g () => (float[] p) { p = Reshape (x, k) }>"""
    if nested:
        result = f"""n = If (c) <then_branch = a () => (float[] f) {{ {result} f = Relu (r) }},
            else_branch = b () => (float[] h) {{ h = Reshape (x, k) }}> r = Relu (n)"""
    graph = read_graph(
        onnx.parser.parse_model(f"""<ir_version: 6, opset_import: ["" : {opset}]>
        g (float[a,b] x, bool c) => (float[] y) <int64[1] k = {{-1}}> {{ {result} y = Exp (r) }}""")
    )
    graph.sort()
    shapes = infer_shapes(graph)
    tensors = graph.linked.tensors()
    assert [shapes.shape(tensors[name]) for name in "ry"] == [None, None]
    assert [shapes.dtype(tensors[name]) for name in "ry"] == [onnx.TensorProto.FLOAT] * 2
