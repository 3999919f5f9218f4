"""What normalization keeps: the names of outputs and of tensors that subgraphs read, and operators of other domains."""

from __future__ import annotations

import numpy as np
import onnx
from onnx_models import apply, assert_same, ops, parse, random, run

from onnxfuse import optimize
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph
from onnxfuse.passes.compose_views import compose_views
from onnxfuse.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from onnxfuse.passes.normalize import normalize
from onnxfuse.passes.remove_no_ops import remove_no_ops


def test_outputs_keep_their_names() -> None:
    model = parse("(float[N,8] x) => (a, y, z) { a = Relu(x) y = Identity(a) b = Abs(x) z = Identity(b) }")
    after, _ = apply(model, normalize)
    assert ops(after) == "Relu Identity Abs"
    assert [o.name for o in after.graph.output] == ["a", "y", "z"]
    assert_same(model, after, (2, 8), tol=0)


def test_a_tensor_that_a_subgraph_reads_keeps_its_name() -> None:
    text = """(float[N,8] x, bool c) => (y) {
        a = Relu(x) b = Identity(a)
        y = If (c) <then_branch = t () => (p) { p = Abs(b) }, else_branch = e () => (q) { q = Neg(b) }> }"""
    model = parse(text)
    after, _ = apply(model, normalize)
    assert ops(after) == "Relu If"
    assert after.graph.node[0].output[0] == "b"
    feeds = {"x": random(2, 8), "c": np.array(False)}
    np.testing.assert_array_equal(run(model, feeds)[0], run(after, feeds)[0])


def test_a_negative_axis_of_flatten_is_counted_from_the_front_before_opset_11() -> None:
    """onnxruntime runs that of the original, because it does not infer the rank behind the Reshape."""
    model = onnx.parser.parse_model("""<ir_version: 4, opset_import: ["" : 7]>
        g (float[2,n,2] x) => (float[] y) <int64[1] two = {2}, int64[1] rest = {-1}> {
          s = Shape (x) halves = Div (s, two) target = Concat <axis = 0> (rest, halves)
          r = Reshape (x, target) a = Relu (r) y = Flatten <axis = -3> (a) }""")
    after, _ = optimize(model, verify=False, regions=False)
    assert [a.i for node in after.graph.node if node.op_type == "Flatten" for a in node.attribute] == [1]
    assert_same(model, after, (2, 2, 2), tol=0)


def test_operators_of_other_domains_stay() -> None:
    text = "(float[N,8] x) => (y) { a = com.microsoft.Identity(x) b = com.microsoft.Identity(x) y = Add(a, b) }"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 20, "com.microsoft": 1]> main {text}')
    graph = read_graph(model)
    assert normalize(graph, infer_shapes(graph)) == 0


def test_a_normalized_model_is_left_as_it_is() -> None:
    model = parse("(float[N,5,8] x) => (y) { a = Relu(x) y = Transpose<perm=[0,2,1]>(a) }")
    after, results = apply(model, remove_no_ops, compose_views, eliminate_common_subexpressions)
    assert results == [0, 0, 0]
    assert after.SerializeToString() == model.SerializeToString()
