"""Test that the projections of an attention are quantized as one product, and which products stay apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from test_quantize_static import error, samples

import onnxfuse
from onnxfuse.quantize.merge_projections import merge_projections

SIZES = {"wq": (16, 16), "wk": (16, 16), "wv": (16, 32), "bq": (16,), "bv": (32,), "wo": (32, 16)}
TEXT = """(float[batch,6,16] x) => (float[batch,6,16] y)
<int64[4] heads = {0, 0, 2, 8}, int64[4] value_heads = {0, 0, 2, 16}, int64[3] rows = {0, 0, 32}>
{
  q1 = MatMul (x, wq)
  q2 = Add (bq, q1)
  k1 = MatMul (x, wk)
  v1 = MatMul (x, wv)
  v2 = Add (v1, bv)
  q3 = Reshape (q2, heads)
  k3 = Reshape (k1, heads)
  v3 = Reshape (v2, value_heads)
  q = Transpose <perm = [0, 2, 1, 3]> (q3)
  k = Transpose <perm = [0, 2, 3, 1]> (k3)
  v = Transpose <perm = [0, 2, 1, 3]> (v3)
  s = MatMul (q, k)
  p = Softmax (s)
  a = MatMul (p, v)
  t = Transpose <perm = [0, 2, 1, 3]> (a)
  r = Reshape (t, rows)
  y = MatMul (r, wo)
}"""


def model(text: str) -> onnx.ModelProto:
    made = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    random = np.random.default_rng(0)
    for name, shape in SIZES.items():
        if name in text:
            values = random.standard_normal(shape).astype(np.float32) / 6
            made.graph.initializer.append(numpy_helper.from_array(values, name))
    return made


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_projections_are_one_product(dtype: Any) -> None:
    source, data = model(TEXT), samples((3, 6, 16))
    made, report = onnxfuse.optimize(source, dtype=dtype, calibrate={"x": data})
    assert report.counts["quantized_gemm"] == 2 and report.counts["attention"] == 1
    assert report.weights is not None and report.weights.nodes == 2
    assert not {"Split", "Slice"} & {node.op_type for node in made.graph.node}
    assert error(source, made, data) < (0.05 if dtype == "int8" else 0.2)  # float8 has three bits


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k3 = Reshape (k1, heads)", "k2 = Relu (k1)\n  k3 = Reshape (k2, heads)"),
        ("k1 = MatMul (x, wk)", "z = Relu (x)\n  k1 = MatMul (z, wk)"),
    ],
    ids=["no heads", "another operand"],
)
def test_other_products_stay_apart(old: str, new: str) -> None:
    _, report = onnxfuse.optimize(model(TEXT.replace(old, new)), dtype="int8", calibrate={"x": samples((3, 6, 16))})
    assert report.weights is not None and report.weights.nodes == 3


def test_a_product_with_another_reader_stays_apart() -> None:
    text = TEXT.replace("y = MatMul (r, wo)", "o = MatMul (r, wo)\n  y = Add (o, k1)")
    _, report = onnxfuse.optimize(model(text), dtype="int8", calibrate={"x": samples((3, 6, 16))})
    assert report.weights is not None and report.weights.nodes == 3  # one for queries and values, keys, and the last


def test_new_names_differ_from_those_of_inputs() -> None:
    made = model(TEXT.replace(" x)", " q2_weights)").replace("(x,", "(q2_weights,"))
    merge_projections(made)
    assert not {each.name for each in made.graph.input} & {each.name for each in made.graph.initializer}
    onnx.checker.check_model(made, full_check=True)
