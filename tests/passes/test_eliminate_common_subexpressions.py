"""Nodes that compute the same: which are merged, and which are not."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, assert_same, ops, parse, random

from onnxfuse.passes.eliminate_common_subexpressions import eliminate_common_subexpressions


@pytest.mark.parametrize(
    ("nodes", "outputs", "rest"),
    [
        ("a = Relu(x) b = Relu(x) y = Add(a, b)", "y", "Relu Add"),
        ("a = Exp(x) b = Exp(x) c = Neg(a) d = Neg(b) y = Add(c, d)", "y", "Exp Neg Add"),
        ("a = Add(x, u) b = Add(x, v) y = Mul(a, b)", "y", "Add Mul"),
        ("a = Add(x, u) b = Add(x, w) y = Mul(a, b)", "y", "Add Add Mul"),
        ("a = Softmax<axis=1>(x) b = Softmax<axis=2>(x) y = Mul(a, b)", "y", "Softmax Softmax Mul"),
        ("a = LeakyRelu<alpha=0.1>(x) b = LeakyRelu<alpha=0.2>(x) y = Mul(a, b)", "y", "LeakyRelu LeakyRelu Mul"),
        ("a = RandomNormalLike(x) b = RandomNormalLike(x) c = Sub(a, b) y = Add(x, c)", "y", None),
        ("y = Relu(x) z = Relu(x)", "y, z", "Relu Relu"),
        ("a = Relu(x) z = Relu(x) y = Abs(a)", "y, z", "Relu Abs"),
        ("a, b = Split<num_outputs=2>(x) c, d = Split<num_outputs=2>(x) y = Add(a, d)", "y", "Split Add"),
    ],
)
def test_equal_nodes_are_merged(nodes: str, outputs: str, rest: str | None) -> None:
    weights = {"u": random(8), "v": random(8), "w": random(8, seed=5)}
    used = {name: v for name, v in weights.items() if f", {name})" in nodes}
    model = parse(f"(float[N,5,8] x) => ({outputs}) {{ {nodes} }}", **used)
    after, _ = apply(model, eliminate_common_subexpressions)
    assert ops(after) == (rest or ops(model))
    if rest:
        assert_same(model, after, (3, 5, 8), tol=0)


@pytest.mark.parametrize(
    ("nodes", "tables"),
    [("Mul(x, t) b = Mul(x, u)", 1), ("Mul(x, t) b = Mul(x, v)", 2), ("Add(x, t) b = Add(x, u)", 1)],
)
def test_equal_tables_of_elementwise_operators_are_merged(nodes: str, tables: int) -> None:
    """Tables are larger than the constants that equal nodes may have."""
    table = random(40, 32)
    model = parse(f"(float[N,40,32] x) => (y) {{ a = {nodes} y = Sub(a, b) }}", t=table, u=table, v=table * 2)
    after, _ = apply(model, eliminate_common_subexpressions)
    assert len({name for node in after.graph.node for name in node.input} & {*"tuv"}) == tables
    assert_same(model, after, (2, 40, 32), tol=0)


def test_tables_of_strings_stay() -> None:
    """The bytes of an array of strings are addresses, which other strings have once these are freed."""
    table = np.array([["a", "b"]], dtype=object)  # Python has one object for each letter
    model = parse("(string[N,2] x) => (bool[N,2] y, bool[N,2] z) { y = Equal(x, t) z = Equal(x, u) }", t=table, u=table)
    after, _ = apply(model, eliminate_common_subexpressions)
    assert [list(node.input) for node in after.graph.node] == [["x", "t"], ["x", "u"]]
