"""Tables whose columns stand in them twice are found as such, and no others."""

from __future__ import annotations

import onnx
import pytest

from onnxfuse.analysis.repeated_columns import repeated_columns
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph

HEAD = """<ir_version: 8, opset_import: ["" : 17]>
main (float[b,s,4] a, float[b,s,4] b2, int64[s] rows, float one) => (float y)
<float[2,4] halves = {1,2,1,2, 3,4,3,4}, float[2,4] pairs = {1,1,2,2, 3,3,4,4}, int64[8] twice = {0,1,2,3,0,1,2,3},
 int64[8] each = {0,0,1,1,2,2,3,3}, int64[1] last = {-1}, int64[4] two = {1,1,1,2}, int64[3] flat = {0,0,8},
 int64[1] zero = {0}, int64[1] eight = {8}, int64[4] heads = {0,0,2,4}> """


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ("t = Concat <axis = -1> (a, a)", "halves"),
        ("t = Concat <axis = -1> (a, b2)", ""),
        ("t = Concat <axis = 1> (a, a)", ""),
        ("c = Concat <axis = 2> (a, a)  d = Cos (c)  e = Mul (d, one)  t = Cast <to = 10> (e)", "halves"),
        ("c = Concat <axis = -1> (a, a)  d = Concat <axis = -1> (a, b2)  t = Mul (c, d)", ""),
        ("c = Concat <axis = -1> (a, a)  u = Unsqueeze (c, zero)  t = Transpose <perm = [0, 2, 1, 3]> (u)", "halves"),
        ("c = Concat <axis = -1> (a, a)  t = Transpose <perm = [0, 2, 1]> (c)", ""),
        ("c = Concat <axis = -1> (a, a)  t = Reshape (c, heads)", ""),
        ("u = Unsqueeze (a, last)  e = Expand (u, two)  t = Reshape (e, flat)", "pairs"),
        ("u = Unsqueeze (a, last)  e = Concat <axis = -1> (u, u)  t = Reshape (e, flat)", "pairs"),
        ("u = Unsqueeze (a, last)  v = Unsqueeze (b2, last)  e = Concat <axis = -1> (u, v)  t = Reshape (e, flat)", ""),
        ("t = Gather <axis = 2> (a, twice)", "halves"),
        ("t = Gather <axis = 2> (a, each)", "pairs"),
        ("t = Gather <axis = 0> (halves, rows)", "halves"),
        ("t = Gather <axis = 0> (pairs, rows)", "pairs"),
        ("c = Gather <axis = 0> (halves, rows)  t = Mul (c, a)", ""),
        ("t = Identity (a)", ""),
    ],
)
def test_columns(nodes: str, found: str) -> None:
    graph = read_graph(onnx.parser.parse_model(f"{HEAD} {{ {nodes}  y = ReduceSum <keepdims = 0> (t) }}"), None)
    graph.sort()
    shapes = infer_shapes(graph)
    (tensor,) = (tensor for node in graph.nodes for tensor in node.outputs if tensor.name == "t")
    assert repeated_columns(shapes, tensor) == found
