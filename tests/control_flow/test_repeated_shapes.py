"""What is known of the shapes in bodies that run several times, and in branches."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.control_flow.body import Body, read_bodies
from onnxfuse.ir.execution_order import in_execution_order
from onnxfuse.ir.serde import read_graph

HEAD = '<ir_version: 8, opset_import: ["" : 17]> g '


def bodies_of(text: str, opset: int = 17) -> list[Body]:
    model = onnx.parser.parse_model(HEAD.replace("17", str(opset)) + text)
    graph = read_graph(in_execution_order(model))
    graph.sort()
    return list(read_bodies(graph, infer_shapes(graph)))


def shape(body: Body, name: str) -> str:
    found = body.shapes.shape(body.graph.linked.tensors()[name])
    return "unknown rank" if found is None else " ".join(map(str, found))


LOOP = """(float[b,n,8] x, float[b,n,8] z, int64 m) => (float[] y, float[] w) <bool go = {{1}}> {{
    y, w = Loop <body = one (int64 i, bool p, float[] s, float[] t) => (bool q, float[] u, float[] v) {{
      q = Identity (p)  {inside} }}> (m, go, x, z) }}"""


@pytest.mark.parametrize(
    ("inside", "s", "t"),
    [
        ("u = Relu (s)  v = Add (t, s)", "b n 8", "b n 8"),
        ("u = Concat <axis = 1> (s, x)  v = Relu (t)", "b carried_0 8", "b n 8"),
        ("u = Concat <axis = 1> (s, x)  v = Concat <axis = 1> (t, x)", "b carried_0 8", "b carried_0 8"),
        ("u = Concat <axis = 1> (s, x)  v = Concat <axis = 1> (t, t)", "b carried_0 8", "b carried_1 8"),
        ("u = Concat <axis = 1> (s, t)  v = Concat <axis = 1> (t, x)", "b carried_0 8", "b carried_1 8"),
        ("u = Transpose <perm = [1, 0, 2]> (s)  v = Relu (t)", "carried_0 carried_1 8", "b n 8"),
        ("a = Constant <value_ints = [0]> ()  u = Unsqueeze (s, a)  v = Relu (t)", "unknown rank", "b n 8"),
        ("u = Relu (t)  v = Relu (s)", "b n 8", "b n 8"),
    ],
)
def test_carried_values(inside: str, s: str, t: str) -> None:
    """Sizes that begin equal and change equally have one name, and what is not the same in all iterations is not n."""
    (body,) = bodies_of(LOOP.format(inside=inside))
    assert (shape(body, "s"), shape(body, "t")) == (s, t)
    assert (shape(body, "i"), shape(body, "p")) == ("", "")


def test_sizes_that_part_in_a_later_iteration() -> None:
    """All three begin as n; s and t grow by one in each iteration, and r by more."""
    text = """(float[n] x, float[1] one, int64 m) => (float[] a, float[] b, float[] c) <bool go = {1}> {
        a, b, c = Loop <body = step (int64 i, bool p, float[] r, float[] s, float[] t)
            => (bool q, float[] u, float[] v, float[] w) {
          q = Identity (p)  w = Concat <axis = 0> (t, one)  v = Concat <axis = 0> (s, one)
          k = Concat <axis = 0> (r, one)  u = Concat <axis = 0> (k, s) }> (m, go, x, x, x) }"""
    (body,) = bodies_of(text)
    assert shape(body, "s") == shape(body, "t") != shape(body, "r")


def test_a_shape_that_the_exporter_recorded_of_the_first_iteration_does_not_count() -> None:
    text = """(float[1,4] x, int64 m) => (float[] y) <bool go = {1}> {
        y = Loop <body = one (int64 i, bool p, float[1,4] s) => (bool q, float[2,4] u) <float[2,4] c> {
          q = Identity (p)  c = Concat <axis = 0> (s, s)  u = Relu (c) }> (m, go, x) }"""
    (body,) = bodies_of(text)
    assert (shape(body, "s"), shape(body, "c")) == ("carried_0 4", "2*carried_0 4")


def test_what_onnx_infers_of_the_first_iteration_does_not_count() -> None:
    """No rule tells the shape behind a NonZero or an operator that nobody knows."""
    text = LOOP.format(
        inside="""a = Constant <value_ints = [0]> ()  u = Unsqueeze (s, a)  v = Concat <axis = 1> (t, x)
        k = Exp (u)  l = unknown.Operator (v)  o = Celu (v)  g = Gelu (l)  r = Det (v)"""
    )
    (body,) = bodies_of(text.replace("g = Gelu (l)", ""))
    assert [shape(body, name) for name in ("s", "k", "l")] == ["unknown rank"] * 3
    assert [shape(body, name) for name in ("t", "o")] == ["b carried_0 8"] * 1 + ["b carried_0 + n 8"]


def test_what_a_scan_reads() -> None:
    text = """(float[b,n,8] x, float[b,4] s) => (float[] y, float[] z) {
        y, z = Scan <num_scan_inputs = 2, scan_input_axes = [1, -1],
                     body = one (a, r, c) => (e, f) { e = Relu (a)  d = Add (r, c)  f = Neg (d) }> (s, x, x) }"""
    (body,) = bodies_of(text)
    assert [shape(body, name) for name in "arce"] == ["b 4", "b 8", "b n", "b 4"]


def test_nothing_is_known_in_a_scan_with_a_batch() -> None:
    text = """(float[b,n,8] x) => (float[] z) {
        z = Scan <num_scan_inputs = 1, body = one (float[] r) => (float[] f) { f = Neg (r) }> ("", x) }"""
    (body,) = bodies_of(text, opset=8)
    assert shape(body, "r") == "unknown rank"


def test_values_and_constants_of_the_graphs_around() -> None:
    text = """(float[b,n,8] x, bool f) => (float[] y) <int64[3] target = {0, -1, 4}> {
        s = Shape (x)
        y = If <then_branch = yes () => (float[] t) {
                      t = If <then_branch = in () => (float[] k) { k = Reshape (x, target) },
                                  else_branch = out () => (float[] l) { l = Expand (x, s) }> (f) },
                    else_branch = no () => (float[] e) { e = Relu (x) }> (f) }"""
    then, _ = bodies_of(text)
    inner, other = read_bodies(then.graph, then.shapes)
    assert (shape(inner, "k"), shape(other, "l")) == ("b 2*n 4", "b n 8")
    assert inner.where == "the then branch of If 't'"
