"""Sizes that are read of computed tensors: where they are read from instead, and which stay."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, parse, run

from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.passes.sizes_of_operands import sizes_of_operands

INPUTS = "float[b,2,s,8] q, float[b,2,8,t] k, float[t] m"
SIZES = {"b": 3, "s": 5, "t": 4}


def sources(nodes: str, opset: int = 20) -> list[str]:
    """Return the tensors whose Shape is read after the pass, which leaves the values as they are.

    The nodes compute integers y of queries q, keys k and a row m.
    """
    constants = {
        "zero": [0],
        "one": [1],
        "two": [2],
        "last": [3],
        "both": [2, 3],
        "far": [9],
        "all": [-1],
        "flat": [-1, 8],
    }
    weights = {name: np.array(value, np.int64) for name, value in constants.items() if name in nodes}
    if "scalar" in nodes:
        weights["scalar"] = np.array(3, np.int64)
    before = parse(f"({INPUTS}) => (y) {{ {nodes} }}", opset, **weights)
    after, _ = apply(before, sizes_of_operands, fold_constants)
    feeds = {
        "q": np.ones((SIZES["b"], 2, SIZES["s"], 8), np.float32),
        "k": np.ones((SIZES["b"], 2, 8, SIZES["t"]), np.float32),
        "m": np.ones(SIZES["t"], np.float32),
    }
    (found,), (wanted,) = run(after, feeds), run(before, feeds)
    np.testing.assert_array_equal(found, wanted)
    return [node.input[0] for node in after.graph.node if node.op_type == "Shape"]


SPLIT = "f = Reshape(q, flat) h = Shape(q) r = Reshape(f, h)"
SWAPPED = "x = Transpose<perm=[1,0,2,3]>(q)"


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("s = MatMul(q, k) n = Shape(s) y = Gather(n, two)", ["q"]),
        ("s = MatMul(q, k) n = Shape(s) y = Gather(n, scalar)", ["k"]),
        ("p = MatMul(q, k) s = Tanh(p) n = Shape(s) y = Gather(n, scalar)", ["k"]),
        ("p = MatMul(q, k) s = Add(m, p) n = Shape(s) y = Gather(n, two)", ["q"]),
        ("p = MatMul(q, k) s = Softmax(p) n = Shape(s) y = Slice(n, two, last)", ["q"]),
        ("p = MatMul(q, k) s = Tanh(p) y = Shape<start=2, end=3>(s)", ["q"]),
        ("p = MatMul(q, k) s = Tanh(p) y = Shape(s)", ["q", "q", "k"]),  # of several, because they are scores
        ("p = MatMul(q, k) s = Tanh(p) n = Shape(s) y = Gather(n, both)", ["q", "k"]),
        ("x = Tanh(q) y = Shape(x)", ["q"]),
        ("x = Transpose<perm=[2,0,1,3]>(q) z = Tanh(x) n = Shape(z) y = Gather(n, zero)", ["q"]),
        ("x = Concat<axis=3>(q, q) n = Shape(x) y = Gather(n, two)", ["q"]),
        ("x = Gather<axis=2>(q, two) z = Tanh(x) n = Shape(z) y = Gather(n, zero)", ["q"]),
        (
            "z = Sub(q, q) i = Cast<to=7>(z) g = GatherElements<axis=3>(q, i) x = Tanh(g) n = Shape(x) "
            "y = Gather(n, two)",
            ["q"],
        ),
        ("x = Tanh(q) n = Shape(x) c = Cast<to=6>(n) d = Slice(c, two, last) y = Cast<to=7>(d)", ["q"]),
        ("x = Tanh(q) n = Shape(x) c = Cast<to=6>(n) y = Cast<to=7>(c)", ["q"]),
        (f"{SPLIT} x = Tanh(r) n = Shape(x) c = Gather(n, two) i = Cast<to=7>(x) y = Add(i, c)", ["q", "q"]),
        ("x = Slice(q, zero, two, two) n = Shape(x) y = Gather(n, zero)", ["q"]),
        (f"{SWAPPED} n = Shape(x) c = Cast<to=6>(n) d = Slice(c, two, last) y = Cast<to=7>(d)", ["q"]),
        (
            "u = Concat<axis=2>(q, q) p = MatMul(u, k) s = Tanh(p) n = Shape(s) c = Cast<to=6>(n) y = Gather(c, two)",
            ["u"],
        ),
        ("u = Concat<axis=2>(q, q) s = Tanh(u) n = Shape(s) c = Cast<to=6>(n) y = Gather(c, two)", ["s"]),
        (f"{SWAPPED} n = Shape(x) y = Gather(n, two)", ["x"]),
        (f"{SWAPPED} n = Shape<start=2, end=3>(x) t = Concat<axis=0>(all, n, two) y = Reshape(x, t)", ["q"]),
        (f"{SWAPPED} n = Shape<start=2, end=3>(x) t = Concat<axis=0>(all, n, two) y = Reshape(q, t)", ["x"]),
    ],
)
def test_sizes_are_read_from_where_they_come(nodes: str, expected: list[str]) -> None:
    assert sources(nodes) == expected


@pytest.mark.parametrize(
    "nodes",
    [
        "x = Concat<axis=2>(q, q) n = Shape(x) y = Gather(n, two)",  # is in no operand
        "x = Transpose<perm=[2,0,1,3]>(q) n = Shape(x) y = Gather(n, zero)",  # of a view
        "e = Slice(k, far, far, last) p = MatMul(q, e) z = Tanh(p) n = Shape(z) y = Gather(n, scalar)",
    ],
)
def test_sizes_that_stay(nodes: str) -> None:
    assert sources(nodes) == ["x"] if "x" in nodes.split() else ["e"]
