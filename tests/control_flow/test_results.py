"""What is known of the shapes of what Loops compute."""

from __future__ import annotations

import onnx
import pytest
from case_documents import with_weights

from onnxfuse import optimize
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.control_flow.results import infer_results
from onnxfuse.ir.serde import read_graph, write_model

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '
LOOP = """(float[b,n,8] x, int64 m) => (float[] y, float[] z, float[] s) <bool go = {{1}}> {{
    y, z, r = Loop <body = one (int64 i, bool p, float[] t, float[] u) => (bool q, float[] v, float[] w, float[] k) {{
      q = Identity (p)  v = Relu (t)  {inside} }}> (m, go, x, x)
    s = Neg (r) }}"""


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("w = Neg (u)  k = Exp (t)", ["b n 8", "b n 8", "? ? ? 8"]),
        ("w = Concat <axis = 1> (u, x)  k = Exp (u)", ["b n 8", "b ? 8", "? ? ? 8"]),
        ("a = Constant <value_ints = [0]> ()  w = Unsqueeze (u, a)  k = Exp (u)", ["b n 8", "None", "None"]),
    ],
)
def test_results_of_a_loop(inside: str, expected: list[str]) -> None:
    """What each iteration gives is joined; the sizes of no iterations are 0."""
    graph = read_graph(onnx.parser.parse_model(HEAD + LOOP.format(inside=inside)))
    graph.sort()
    shapes = infer_shapes(graph)
    infer_results(graph, shapes)
    found = [shapes.shape(graph.linked.tensors()[name]) for name in "yzs"]
    texts = ["None" if s is None else " ".join("?" if str(d).startswith("?") else str(d) for d in s) for s in found]
    assert texts == expected


def test_a_false_declaration_of_a_result_is_corrected() -> None:
    """onnxruntime takes the declared rank for that of y, and refuses operators after the Loop that need another one."""
    text = HEAD + LOOP.replace("(float[] y, float[] z,", "(float y, float z,").format(inside="w = Neg (u)  k = Exp (t)")
    graph = read_graph(onnx.parser.parse_model(text))
    graph.sort()
    infer_results(graph, infer_shapes(graph))
    shapes = [each.type.tensor_type.shape for each in write_model(graph).graph.output[:2]]
    assert [[dim.dim_param or dim.dim_value for dim in shape.dim] for shape in shapes] == [["b", "n", 8]] * 2


def test_nodes_behind_a_loop_are_fused() -> None:
    text = """(float[b,8] x, int64 m) => (float[b,8] z) <float[8,8] w, float[8] c, bool go = {1}> {
        y = Loop <body = step (int64 i, bool p, float[b,8] s) => (bool q, float[b,8] t) {
          q = Identity (p)  t = Softmax (s) }> (m, go, x)
        h = MatMul (y, w)  a = Add (h, c)  r = Relu (a)  z = LayerNormalization (r, c) }"""
    _, report = optimize(with_weights(onnx.parser.parse_model(HEAD + text)))
    assert report.counts == {"gemm_bias_activation": 1, "layer_norm": 1, "softmax": 1}
    assert report.verified.status == "verified"
