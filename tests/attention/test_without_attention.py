"""What passes write for attention gives the same results where none is made, at empty axes and special values too."""

from __future__ import annotations

import re

import numpy as np
import pytest
from onnx_models import assert_same_at_all_sizes, parse

from onnxfuse import optimize
from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.fuse_model import simplify
from onnxfuse.ir.node import op_of
from onnxfuse.ir.serde import read_graph

NUMBERS = {"least": -np.inf, "low": -1e9, "zero": 0.0}
CONSTANTS = {
    **{name: np.array(value, np.float32) for name, value in NUMBERS.items()},
    **{name: np.array([value]) for name, value in {"minus": -1, "c0": 0, "c1": 1, "c2": 2, "c3": 3, "c4": 4}.items()},
    "parts": np.array([2, 3]),
    **{name: np.array(value) for name, value in {"n0": 0, "n1": 1, "n2": 2}.items()},
}
# What reads scores s of some axes, and values v.
ENDS = {
    "a softmax": "y = Softmax (s)",
    "no softmax": "y = Relu (s)",
    "a product of no probabilities": "p = Relu (s) y = MatMul (p, v)",
    "a softmax over rows": "p = Softmax <axis = -2> (s) y = MatMul (p, v)",
    "attention": "p = Softmax (s) y = MatMul (p, v)",
}
SCORES = {
    "one head": """float[B,N,4] q, float[B,4,N] k, float[B,N,4] v, float[N,N] m) => (y) {
        t = MatMul (q, k) s = Add (t, m)""",
    "no batch": "float[N,4] q, float[4,M] k, float[M,4] v, float[M] m) => (y) { t = MatMul (q, k) s = Add (t, m)",
    "windows": """float[B,W,2,N,4] q, float[B,W,2,4,N] k, float[B,W,2,N,4] v, float[W,1,N,N] m) => (y) {
        t = MatMul (q, k) s = Add (t, m)""",
    "windows that are broadcast": """float[B,W,2,N,4] q, float[B,1,2,4,N] k, float[1,W,2,N,4] v, float[N] m) => (y) {
        t = MatMul (q, k) s = Add (t, m)""",
    "blocks of dynamic keys": """float[B,W,2,3,4] q, float[B,W,2,4,N] k, float[B,W,2,N,4] v, float[N] m) => (y) {
        t = MatMul (q, k) s = Add (t, m)""",
    "heads and batch in one axis": """float[B,2,N,4] qh, float[B,2,4,N] kh, float[B,2,N,4] vh, float[B,2,N,N] m
        ) => (y) { sizes = Shape (qh) n = Gather <axis = 0> (sizes, c2) tq = Concat <axis = 0> (minus, n, c4)
        tk = Concat <axis = 0> (minus, c4, n) q = Reshape (qh, tq) k = Reshape (kh, tk) v = Reshape (vh, tq)
        t = MatMul (q, k) t4 = Concat <axis = 0> (minus, c2, n, n) u = Reshape (t, t4) w = Add (u, m)
        t3 = Concat <axis = 0> (minus, n, n) s = Reshape (w, t3)""",
    "masks of windows": """float[B,2,3,4] q, float[B,2,4,3] k, float[B,2,3,4] v, float[W,1,3,3] m) => (y) {
        t = MatMul (q, k) sizes = Shape (m) w = Gather <axis = 0> (sizes, c0)
        t5 = Concat <axis = 0> (minus, w, c2, c3, c3) r = Reshape (t, t5)
        mu = Unsqueeze (m, c0) a = Add (r, mu) t4 = Concat <axis = 0> (minus, c2, c3, c3)
        s = Reshape (a, t4)""",
    "rows of keys": """float[B,N,4] q, float[B,N,4] k, float[B,N,5] v, float[N] m) => (y) {
        qt = Transpose <perm = [0, 2, 1]> (q) t = MatMul (k, qt) a = Add (t, m) s = Transpose <perm = [0, 2, 1]> (a)""",
}
OTHERS = {
    "two fills": """bool[B,N] keep, bool[N] drop, float[1,N] x) => (y) {
        a = Where (keep, x, least) b = Where (drop, least, a) y = Softmax (b)""",
    "two fills of a vector": """bool keep, bool[B,N] drop, float[N] x) => (y) {
        a = Where (keep, x, low) b = Where (drop, a, low) y = Softmax (b)""",
    "probabilities of two values": """float[B,2,N,4] q, float[B,2,4,M] k, float[B,2,M,3] v, float[1,2,M,5] u
        ) => (y, z) { s = MatMul (q, k) p = Softmax (s) y = MatMul (p, v) z = MatMul (p, u)""",
    "two groups of keys": """float[B,2,W,3,4] q, float[B,2,1,4,2] g, float[B,2,W,4,3] k, float[B,2,1,2,4] u,
        float[B,2,W,3,4] v, float[B,1,W,1,5] m) => (y) { t = MatMul (q, g) w = MatMul (q, k)
        s = Concat <axis = -1> (t, w) a = Add (s, m) p = Softmax (a) n, r = Split <axis = -1> (p, parts)
        x = MatMul (n, u) z = MatMul (r, v) y = Add (x, z)""",
    "an expanded mask": """bool[B,N] keep, float[1,1,1,N] x, float[B,1,M,N] z) => (y) {
        u = Unsqueeze (keep, c1) w = Unsqueeze (u, c1) sizes = Shape (z) e = Expand (w, sizes) y = Where (e, x, low)""",
    "a mask and a range": """bool[B,N] keep, float[B,1,N,N] x) => (y) {
        u = Unsqueeze (keep, c1) w = Unsqueeze (u, c1) sizes = Shape (x) n = Gather <axis = 0> (sizes, n2)
        r = Range (n0, n, n1) g = GreaterOrEqual (r, n0) a = And (w, g) y = Where (a, x, low)""",
    "an expanded column": """float[B,1] x, float[N] z) => (y) {
        sizes = Shape (z) e = Expand (x, sizes) y = Mul (e, e)""",
    "a softmax less its maximum": """float[B,N] x, float[N] z) => (y) {
        a = Add (x, z) m = ReduceMax <axes = [-1]> (a) d = Sub (a, m) y = Softmax (d)""",
    "NaN as zero": "float[B,N] x) => (y) { p = Softmax (x) n = IsNaN (p) y = Where (n, zero, p)",
    "sizes of a sum": """float[B,N] x, float[M,N] z) => (y) {
        a = Add (x, z) sizes = Shape (a) n = Gather <axis = 0> (sizes, n0) f = Cast <to = 1> (n) y = Mul (a, f)""",
}


def used_constants(text: str) -> dict[str, np.ndarray]:
    return {name: value for name, value in CONSTANTS.items() if re.search(rf"\b{name}\b", text)}


def assert_optimized_is_same(text: str) -> None:
    before = parse(f"({text} }}", 17, **used_constants(text))
    after, _ = optimize(before, verify=False)
    assert_same_at_all_sizes(before, after, sizes=(0, 1, 3), tol=1e-4)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("scores", SCORES)
def test_scores(scores: str, end: str) -> None:
    assert_optimized_is_same(f"{SCORES[scores]} {ENDS[end]}")


@pytest.mark.parametrize("scores", SCORES)
def test_attention_gets_four_axes(scores: str) -> None:
    """The result gets its axes back by a Reshape: one of the model, or one whose target is constant."""
    text = f"({SCORES[scores]} {ENDS['attention']} }}"
    if scores.startswith("windows"):
        text = text.replace("B", "3").replace("W", "5").replace("N", "7")
    if "vh" in text:
        reshaped = "o = MatMul (p, v) to = Concat <axis = 0> (minus, c2, n, c4) y = Reshape (o, to)"
        text = text.replace("y = MatMul (p, v)", reshaped)
    graph = read_graph(parse(text, 17, **used_constants(text)))
    graph.sort()
    shapes = infer_shapes(graph)
    simplify(graph, shapes)
    products = [node.outputs[0] for node in graph.nodes if op_of(node) == "MatMul"]
    assert [shapes.rank(each) for each in products] == [4, 4]


@pytest.mark.parametrize("what", OTHERS)
def test_others(what: str) -> None:
    assert_optimized_is_same(OTHERS[what])
