"""Queries, keys and values get the batch of the scores, where a mask may broadcast the scores to a larger one."""

from __future__ import annotations

import numpy as np
from onnx_models import apply, assert_same_at_all_sizes, ops, parse, random

from onnxfuse import optimize
from onnxfuse.attention.expand_batches import expand_batches

WEIGHTS = {f"w{i}": random(8, 8, seed=i) for i in range(3)}
SPLIT = {"split": np.array([0, 0, 2, 4]), "joined": np.array([0, 0, 8])}


def projected(x: str, name: str, weight: str) -> str:
    return f"{name}_flat = MatMul ({x}, {weight}) {name}_rows = Reshape ({name}_flat, split)"


SELF = f"""(float[A,N,8] x, float[M,1,1,N] mask) => (y) {{
    {projected("x", "q", "w0")} q = Transpose <perm = [0, 2, 1, 3]> (q_rows)
    {projected("x", "k", "w1")} k = Transpose <perm = [0, 2, 3, 1]> (k_rows)
    {projected("x", "v", "w2")} v = Transpose <perm = [0, 2, 1, 3]> (v_rows)
    s = MatMul (q, k) t = Add (s, mask) p = Softmax <axis = -1> (t) c = MatMul (p, v)
    r = Transpose <perm = [0, 2, 1, 3]> (c) y = Reshape (r, joined) }}"""
CROSS = """(float[A,2,N,4] q, float[B,2,4,K] k, float[B,2,K,4] v, bool[M,1,N,K] mask, float number) => (y) {
    s = MatMul (q, k) t = Where (mask, s, number) p = Softmax <axis = -1> (t) y = MatMul (p, v) }"""


def test_one_expand_before_the_projections() -> None:
    before = parse(SELF, 17, **WEIGHTS, **SPLIT)
    after, (changed, again) = apply(before, expand_batches, expand_batches)
    assert (changed, again, ops(after).split().count("Expand")) == (1, 0, 1)
    assert ops(after).startswith("Shape Gather Concat Expand MatMul")
    assert_same_at_all_sizes(before, after)


def test_batches_of_cross_attention() -> None:
    before = parse(CROSS, 17)
    after, (changed, again) = apply(before, expand_batches, expand_batches)
    assert (changed, again) == (1, 0)
    assert_same_at_all_sizes(before, after, sizes=(0, 1, 2), special=False)


def test_a_projection_that_is_read_elsewhere_is_expanded_itself() -> None:
    before = parse(SELF.replace("=> (y)", "=> (y, q_rows)"), 17, **WEIGHTS, **SPLIT)
    after, _ = apply(before, expand_batches)
    assert ops(after).split().count("MatMul") == 5
    assert_same_at_all_sizes(before, after)


def test_equal_batches_stay() -> None:
    assert apply(parse(SELF.replace("[M,", "[A,"), 17, **WEIGHTS, **SPLIT), expand_batches)[1] == [0]


def test_the_attention_is_fused() -> None:
    model, report = optimize(parse(SELF, 17, **WEIGHTS, **SPLIT))
    assert report.verified.passed
    assert "attention" in {each.fusion for each in report.fused}
    assert sum(node.op_type == "Expand" for node in model.graph.node) == 1
