"""Masks in numbers: which two numbers a tensor holds, and where each of them stands."""

from __future__ import annotations

import math

import numpy as np
import pytest
from onnx_models import parse

from onnxfuse.algebra.sizes import symbol
from onnxfuse.analysis.index_formulas import AtMostZero, axis_index
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.analysis.two_numbers import TwoNumbers, two_numbers
from onnxfuse.ir.serde import read_graph

LOWEST = float(np.finfo(np.float32).min)
CONSTANTS = {
    "zero": np.array([0]), "far": np.array([2**62]), "next": np.array(1), "axis1": np.array([1]),
    "none": np.array(0, np.float32), "unit": np.array(1, np.float32), "low": np.array(LOWEST, np.float32),
    "stored": np.triu(np.full((8, 8), -math.inf, np.float32), 1), "spots": np.eye(8, dtype=np.float32),
}  # fmt: skip
# A square of ones of N rows, its triangle above the diagonal, and a larger one that is stored.
TRIANGLE = "shape = Shape(x) n = Concat<axis=0>(shape, shape) ones = Expand(unit, n) above = Trilu<upper=1>(ones, next)"
N = symbol("N")


def behind(diagonal: int = 0) -> AtMostZero:
    """Return that a key is up to so many behind its query."""
    return AtMostZero(axis_index(-1, N) + axis_index(-2, N) * -1 + -diagonal)


def analysis_of(nodes: str) -> IndexAnalysis:
    """Return the analysis of a model with these nodes, the last of which computes `v`."""
    used = {name: value for name, value in CONSTANTS.items() if name in nodes}
    graph = read_graph(parse(f"(float[N] x) => (v) {{ {nodes} }}", 18, **used))
    graph.sort()
    shapes = infer_shapes(graph)
    shapes.strict = True
    return IndexAnalysis(graph, shapes)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("v = Trilu<upper=1>(ones, next)", TwoNumbers(behind(), 0, 1)),
        ("v = Trilu<upper=0>(ones)", TwoNumbers(behind(), 1, 0)),
        ("v = Trilu<upper=0>(ones, next)", TwoNumbers(behind(1), 1, 0)),
        ("v = Mul(above, low)", TwoNumbers(behind(), 0, LOWEST)),
        ("v = Sub(unit, above)", TwoNumbers(behind(), 1, 0)),
        ("v = Neg(above)", TwoNumbers(behind(), 0, -1)),
        ("v = Cast<to=10>(above)", TwoNumbers(behind(), 0, 1)),
        ("a = Mul(above, low) v = Cast<to=10>(a)", TwoNumbers(behind(), 0, -math.inf)),
        ("a = Equal(above, none) v = Where(a, none, low)", TwoNumbers(behind(), 0, LOWEST)),
        ("a = Cast<to=9>(above) v = Where(a, low, none)", TwoNumbers(behind(), 0, LOWEST)),
        ("a = Unsqueeze(above, zero) v = Transpose<perm=[0,2,1]>(a)", TwoNumbers(behind(-1), 1, 0)),
        ("v = Slice(above, axis1, far, axis1)", TwoNumbers(
            AtMostZero(axis_index(-1, N - 1) + axis_index(-2, N) * -1 + 1), 0, 1)),
        ("v = Identity(stored)", TwoNumbers(
            AtMostZero(axis_index(-1, 8) + axis_index(-2, 8) * -1), 0, -math.inf)),
        ("v = Mul(above, x)", None),
        ("a = Mul(above, low) v = Cast<to=7>(a)", None),  # no integer is as low
        ("v = Max(above, unit, x)", None),
        ("v = Add(spots, none)", None),
    ],
)  # fmt: skip
def test_numbers_of(nodes: str, expected: TwoNumbers | None) -> None:
    analysis = analysis_of(f"{TRIANGLE} {nodes}")
    (v,) = (node.outputs[0] for node in analysis.graph.nodes if node.outputs[0].name == "v")
    assert two_numbers(analysis, v) == expected
