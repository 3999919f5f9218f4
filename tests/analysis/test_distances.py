"""Test which tensors are known to depend on the difference of their last two indices alone."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

from onnxfuse.analysis.distances import depends_on_distance
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph

ROWS = np.arange(5)
WEIGHTS = {
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "first": np.array([0]), "second": np.array([1]),
    "even": np.subtract.outer(ROWS, ROWS)[None] % 3, "uneven": np.add.outer(ROWS, ROWS), "row": ROWS[None],
    "column": ROWS[:, None], "numbers": np.array([[3, 1, 4, 1, 5]]), "twice": np.array([2, 5, 5]),
    "square": np.array([1, 5, 5]), "several": np.stack([np.subtract.outer(ROWS, ROWS)] * 2),
}  # fmt: skip
RANGE = "n = Shape <start = 1, end = 2> (ids)  s = Squeeze(n)  r = Range(zero, s, one)  i = Unsqueeze(r, second)"
BATCH = "bn = Shape <start = 0, end = 1> (ids)  bs = Squeeze(bn)  br = Range(zero, bs, one)  b = Unsqueeze(br, second)"
BOTH = f"{RANGE}  j = Unsqueeze(r, first)  d = Sub(i, j)"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{BOTH}  y = Identity(d)", True),
        (f"{BOTH}  a = Abs(d)  m = Less(d, two)  w = Where(m, d, a)  f = Cast <to = 1> (w)  y = Log(f)", True),
        (f"{BOTH}  y = Mul(d, number)", True),  # by one number, though it is not known
        (f"{BOTH}  y = Unsqueeze(d, first)", True),
        (f"{BOTH}  y = Neg(d)", True),
        (f"{BOTH}  y = Add(i, j)", False),
        (f"{BOTH}  t = Mul(i, two)  y = Sub(t, j)", False),
        (f"{BOTH}  y = Mul(d, i)", False),
        (f"{BOTH}  {BATCH}  y = Sub(b, j)", True),  # of other counts of rows and columns
        (f"{BOTH}  {BATCH}  y = Add(d, b)", False),  # of the row twice
        (f"{BOTH}  {BATCH}  o = Mul(i, zero)  t = Add(b, o)  y = Sub(t, j)", False),  # a batch of 1 is repeated
        (f"{BOTH}  y = Add(d, ids)", False),  # of an input
        (f"{BOTH}  y = CumSum(d, zero)", False),  # nothing is known of it
        (f"{RANGE}  y = Sub(i, one)", False),
        ("y = Identity(even)", True),
        ("y = Expand(even, square)", True),
        ("y = Identity(uneven)", False),
        ("y = Sub(column, row)", True),
        ("y = Add(column, row)", False),
        ("y = Expand(even, twice)", False),  # of a third axis
        ("y = Identity(several)", False),
        ("y = Transpose(uneven)", False),
        ("y = Identity(two)", True),
        ("y = Identity(row)", False),
        ("y = Neg(numbers)", True),  # of one row
        ("y = Add(even, numbers)", False),  # of the same row for all
    ],
)
def test_what_depends_on_the_distance(body: str, expected: bool) -> None:
    text = f'<ir_version: 8, opset_import: ["" : 17]>\nmain (int64[b,s] ids, int64[1] number) => (y) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in WEIGHTS.items())
    graph = read_graph(model)
    analysis = IndexAnalysis(graph, infer_shapes(graph))
    assert depends_on_distance(analysis, graph.nodes[-1].outputs[0]) is expected
