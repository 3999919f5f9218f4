"""Packed gate and up projections: each model before, its operators after, and which products stay whole."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, assert_same, ops, parse

from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.products import GATES

RANDOM = np.random.default_rng(3)
WEIGHTS = {
    "w": RANDOM.standard_normal((8, 6)).astype(np.float32),
    "b": RANDOM.standard_normal(6).astype(np.float32),
    "i0": np.array([0]), "i2": np.array([2]), "i3": np.array([3]), "end": np.array([2**63 - 1]), "last": np.array([-1]),
    "cuts": np.array([3, 3]), "odd": np.array([2, 4]), "factor": np.float32(1.702),
}  # fmt: skip


def check(nodes: str, rest: str, outputs: str = "(y)") -> None:
    """Assert which operators the pass leaves, that it says so, and that the values stay the same."""
    words = set(nodes.replace("(", " ").replace(")", " ").replace(",", " ").split())
    used = {name: value for name, value in WEIGHTS.items() if name in words}
    model = parse(f"(float[N,5,8] x) => {outputs} {{ {nodes} }}", **used)
    after, (count,) = apply(model, rules_pass("split_packed_gate", GATES))
    assert ops(after) == rest
    assert bool(count) == (ops(model) != rest)
    assert_same(model, after, (2, 5, 8))


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        (
            "p = MatMul (x, w) g, u = Split<axis=-1> (p, cuts) s = Sigmoid (g) a = Mul (g, s) y = Mul (a, u)",
            "MatMul MatMul Sigmoid Mul Mul",
        ),
        (
            "p = MatMul (x, w) u, g = Split<axis=2> (p, cuts) s = Relu (g) y = Mul (u, s)",
            "MatMul MatMul Relu Mul",
        ),
        (
            "p = MatMul (x, w) q = Add (b, p) g = Slice (q, i0, i3, last) u = Slice (q, i3, end, last) "
            "s = Gelu (g) y = Mul (s, u)",
            "MatMul Add MatMul Add Gelu Mul",
        ),
        (
            "p = MatMul (x, w) g, u = Split<axis=-1> (p, cuts) t = Mul (g, factor) s = Sigmoid (t) a = Mul (g, s) "
            "y = Mul (a, u)",
            "MatMul MatMul Mul Sigmoid Mul Mul",
        ),
    ],
)
def test_gated_halves_become_products(nodes: str, rest: str) -> None:
    check(nodes, rest)


@pytest.mark.parametrize(
    "nodes",
    [
        # the parts are not halves
        "p = MatMul (x, w) g, u = Split<axis=-1> (p, odd) s = ReduceSum<keepdims=1> (g) y = Mul (s, u)",
        # the whole product is read, too
        "p = MatMul (x, w) g, u = Split<axis=-1>(p, cuts) s = Relu (g) m = Mul (s, u) t = ReduceSum (p) y = Add (m, t)",
        # the weight has another reader
        "p = MatMul (x, w) g, u = Split<axis=-1>(p, cuts) s = Relu (g) m = Mul (s, u) t = ReduceSum (w) y = Add (m, t)",
        # the halves do not gate each other
        "p = MatMul (x, w) g, u = Split<axis=-1> (p, cuts) s = Relu (g) y = Add (s, u)",
        # the factor is not a function of the other half that gated products are fused with
        "p = MatMul (x, w) g, u = Split<axis=-1> (p, cuts) s = Softmax (g) y = Mul (s, u)",
        # rows are sliced, not columns
        "p = MatMul (x, w) g = Slice (p, i0, i2, i2) u = Slice (p, i3, end, i2) s = ReduceSum (g) y = Mul (s, u)",
    ],
)
def test_other_products_stay_whole(nodes: str) -> None:
    model = parse(f"(float[N,5,8] x) => (y) {{ {nodes} }}")
    check(nodes, ops(model))


def test_a_half_that_is_an_output_stays() -> None:
    nodes = "p = MatMul (x, w) g, u = Split<axis=-1> (p, cuts) s = Relu (g) y = Mul (s, u)"
    check(nodes, "MatMul Split Relu Mul", "(y, u)")
