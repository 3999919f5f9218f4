"""The values of index and mask tensors as formulas: what the arithmetic of exporters is analyzed to be."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import parse

from onnxfuse.algebra.indices import Index
from onnxfuse.algebra.sizes import symbol
from onnxfuse.analysis.index_formulas import AtMostZero, GatheredElement, axis_index
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph

CONSTANTS = {
    "zero": np.array(0), "one": np.array(1), "i1": np.array([1]), "true": np.array(True), "first": np.array([1, 2, 3]),
    "queries": np.array([0, 1, 3]), "keys": np.array([0, 1, 2]), "column": np.array([-1]), "huge": np.array(2**63 - 1),
    "beyond": np.array(2**32 - 1), "lower": np.tri(4, dtype=bool), "upper": ~np.tri(4, dtype=bool),
    "other": np.eye(4, dtype=bool), "counted": np.arange(8), "stepped": np.arange(1, 8, 2), "i0": np.array([0]),
    "i2": np.array([2]), "i9": np.array([9]),
}  # fmt: skip
# A padding mask p [B, N], and the ranges of its axes: b (B, 1, 1, 1), q (1, 1, N, 1), k (1, 1, 1, N) and n (N).
RANGES = """
shape = Shape(p) batch = Gather(shape, zero) length = Gather(shape, one)
b0 = Range(zero, batch, one) b = Unsqueeze(b0, first)
n = Range(zero, length, one) q = Unsqueeze(n, queries) k = Unsqueeze(n, keys)
"""
GATHERED = """
row = Gather(shape, i1) begin = Mul(b, row) index = Add(k, begin)
flat = Flatten<axis=2>(p) found = Gather(flat, index) padding = Squeeze(found, column)
"""


# The number of each element of a tensor [B, N], as tf2onnx counts them: ones that are summed up.
COUNTED = """
rows = Gather(shape, i0) columns = Gather(shape, i1) total = Mul(rows, columns) ones = Expand(one, total)
sums = CumSum<exclusive=1>(ones, zero) number = Reshape(sums, shape)
"""


def analyzed(nodes: str, name: str) -> object:
    """Return the value of a tensor of the model."""
    used = {key: value for key, value in CONSTANTS.items() if key in nodes}
    graph = read_graph(parse(f"(bool[B,N] p) => (y) {{ {nodes} y = Identity(p) }}", **used))
    graph.sort()
    return IndexAnalysis(graph, infer_shapes(graph)).values.get(name)


BATCH, LENGTH = symbol("B"), symbol("N")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("v = Unsqueeze(n, keys)", axis_index(-1, LENGTH)),
        ("v = Unsqueeze(n, queries)", axis_index(-2, LENGTH)),
        ("r = Unsqueeze(n, keys) v = Transpose<perm=[0,1,3,2]>(r)", axis_index(-2, LENGTH)),
        ("v = Add(n, one)", axis_index(-1, LENGTH) + 1),
        ("v = Sub(q, k)", axis_index(-2, LENGTH) + axis_index(-1, LENGTH) * -1),
        ("v = Sub(n, n)", Index(0)),
        ("v = Less(n, zero)", False),
        ("v = Less(n, length)", True),
        ("v = LessOrEqual(n, zero)", AtMostZero(axis_index(-1, LENGTH))),
        ("a = Less(n, zero) v = Not(a)", True),
        ("a = Less(n, zero) c = Equal(n, zero) v = And(a, c)", False),
        ("a = Less(n, length) c = Equal(n, zero) v = Or(a, c)", True),
        ("v = Less(k, b)", AtMostZero(axis_index(-4, BATCH) * -1 + axis_index(-1, LENGTH) + 1)),
        ("v = Equal(k, b)", None),
        ("a = Greater(k, q) v = Not(a)", AtMostZero(axis_index(-2, LENGTH) * -1 + axis_index(-1, LENGTH))),
        ("a = LessOrEqual(k, q) v = And(a, true)", AtMostZero(axis_index(-2, LENGTH) * -1 + axis_index(-1, LENGTH))),
        ("a = LessOrEqual(k, q) c = LessOrEqual(b, q) v = And(a, c)", None),
        ("a = Add(n, huge) b2 = Add(a, one) v = GreaterOrEqual(b2, zero)", None),
        ("a = Add(n, beyond) b2 = Cast<to=6>(a) v = Cast<to=7>(b2)", None),
        ("v = Slice(counted, i1, i9, i0, i2)", axis_index(-1, 4) * 2 + 1),
        ("v = Slice(counted, i9, i0, i0, column)", None),
        ("v = Identity(stepped)", axis_index(-1, 4) * 2 + 1),
        ("v = ConstantOfShape<value = int64[1] {9007199254740993}>(shape)", Index(2**53 + 1)),
        ("v = Identity(lower)", AtMostZero(axis_index(-2, 4) * -1 + axis_index(-1, 4))),
        ("v = Identity(upper)", AtMostZero(axis_index(-2, 4) + axis_index(-1, 4) * -1 + 1)),
        ("v = Identity(other)", None),
        (f"{COUNTED} v = Identity(number)", axis_index(-2, BATCH) * LENGTH + axis_index(-1, LENGTH)),
        (f"{COUNTED} v = Div(number, columns)", axis_index(-2, BATCH)),
        (f"{COUNTED} v = Mod(number, columns)", axis_index(-1, LENGTH)),
        (f"{COUNTED} v = Mod(number, i2)", None),
        (f"{COUNTED} v = CumSum(ones, zero)", axis_index(-1, BATCH * LENGTH) + 1),
        (f"{COUNTED} v = CumSum<reverse=1>(ones, zero)", None),
        ("a = Sub(n, one) v = Div(a, i2)", None),
    ],
)  # fmt: skip
def test_value_of(nodes: str, expected: object) -> None:
    assert analyzed(f"{RANGES} {nodes}", "v") == expected


def test_a_gathered_element_is_known_by_its_indices() -> None:
    found = analyzed(RANGES + GATHERED, "padding")
    assert isinstance(found, GatheredElement)
    assert (found.name, found.indices) == ("p", (axis_index(-4, BATCH), axis_index(-1, LENGTH)))
