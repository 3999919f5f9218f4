"""Products of grouped-query attention get an axis for each of batch and key heads, and of groups and queries."""

from __future__ import annotations

import numpy as np
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse import optimize
from onnxfuse.attention.split_merged_rows import split_merged_rows

# As tf2onnx decomposes Einsum("btkgh,bskh->bkgts") and Einsum("bkgts,bskh->btkgh"), with 2 key heads in groups of 3.
TEXT = """(float[B,T,2,3,4] q, float[B,S,2,4] k, float[B,S,2,4] v) => (y) {
    qt = Transpose <perm = [0, 2, 3, 1, 4]> (q) kt = Transpose <perm = [0, 2, 1, 3]> (k)
    vt = Transpose <perm = [0, 2, 1, 3]> (v)
    qs = Shape (qt) ks = Shape (kt) heads = Gather (qs, zero_one) merged = ReduceProd <keepdims = 1> (heads)
    t = Gather (qs, three) s = Gather (ks, two)
    to_q = Concat <axis = 0> (merged, minus, four) q3 = Reshape (qt, to_q)
    to_k = Concat <axis = 0> (merged, minus, four) k3 = Reshape (kt, to_k) v3 = Reshape (vt, to_k)
    kc = Transpose <perm = [0, 2, 1]> (k3) p3 = MatMul (q3, kc)
    batch = Gather (qs, zero) to_p = Concat <axis = 0> (batch, two, of_three, t, s) p5 = Reshape (p3, to_p)
    w5 = Softmax <axis = -1> (p5) to_w = Concat <axis = 0> (merged, minus, s) w3 = Reshape (w5, to_w)
    c3 = MatMul (w3, v3) to_c = Concat <axis = 0> (batch, two, of_three, t, four) c5 = Reshape (c3, to_c)
    y = Transpose <perm = [0, 3, 1, 2, 4]> (c5) }"""
NUMBERS = {
    "zero": [0], "zero_one": [0, 1], "two": [2], "three": [3], "of_three": [3], "four": [4], "minus": [-1],
}  # fmt: skip
CONSTANTS = {name: np.array(value) for name, value in NUMBERS.items()}


def test_products_get_five_axes() -> None:
    before = parse(TEXT, 17, **CONSTANTS)
    after, (changed, again) = apply(before, split_merged_rows, split_merged_rows)
    assert (changed, again) == (2, 0)
    assert "ReduceProd" not in ops(after)
    assert_same_at_all_sizes(before, after, sizes=(1, 2, 3))


def test_products_that_are_no_attention_stay() -> None:
    before = parse(TEXT.replace("Softmax <axis = -1>", "Tanh"), 17, **CONSTANTS)
    assert apply(before, split_merged_rows)[1] == [0]


def test_the_attention_is_fused() -> None:
    _, report = optimize(parse(TEXT, 17, **CONSTANTS))
    assert report.verified.passed
    assert [each.fusion for each in report.fused] == ["attention"]
