"""Slices and Gathers as JAX and PyTorch write them: the operators that stay, and equal values."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, assert_same, ops, parse, value

from onnxfuse.passes.normalize_slices import normalize_slices

CONSTANTS = {
    "zeros": [0, 0, 0], "part": [0, 0, 4], "whole": [2, 5, 8], "cut": [2, 5, 4], "axes": [0, 1, 2],
    "long": [2**31 - 1] * 3, "third": [4], "end": [8], "last": [2], "even": [0, 2, 4, 6], "odd": [1, 3, 5, 7],
    "run": [2, 3, 4], "uneven": [0, 1, 4], "back": [4, 2, 0], "beyond": [2, -1],
    "index": 3, "rows": [[-2], [0]], "row": [[-1]], "cells": [[1, 2]], "fifth": [-5],
    "beginning": [0],
}  # fmt: skip
TO_LAST, BACK = "perm=[2, 0, 1]", "perm=[1, 2, 0]"


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("y = Slice(x, zeros, cut, axes)", "Slice"),
        ("y = Slice(x, part, long, axes)", "Slice"),
        ("y = Slice(x, zeros, whole, axes)", None),  # a no-op, which normalize removes
        ("y = Slice(x, third, end, last)", None),
        ("y = Slice(x, fifth, end, last)", "Slice"),
        ("y = Slice(x, beginning, fifth, last)", "Slice"),
        ("y = Gather<axis=2>(x, even)", "Slice"),
        ("y = Gather<axis=-1>(x, odd)", "Slice"),
        ("y = Gather<axis=1>(x, run)", "Slice"),
        ("y = Gather<axis=1>(x, uneven)", None),
        ("y = Gather<axis=1>(x, back)", None),
        ("y = Gather<axis=1>(x, beyond)", None),
        ("y = Gather<axis=2>(x, index)", None),
        ("y = GatherND(x, rows)", "Gather"),
        ("y = GatherND(x, cells)", None),
        ("y = GatherND<batch_dims=1>(x, rows)", None),
        (f"t = Transpose<{TO_LAST}>(x) g = GatherND(t, row) y = Transpose<{BACK}>(g)", "Gather"),
        (f"t = Transpose<{TO_LAST}>(x) y = Gather(t, index)", "Gather"),
        (f"t = Transpose<{BACK}>(x) y = Gather(t, index)", None),
        (f"t = Transpose<{TO_LAST}>(x) g = Gather(t, odd) y = Transpose<{BACK}>(g)", "Slice"),
        (f"t = Transpose<{TO_LAST}>(x) g = Gather(t, uneven) y = Transpose<{BACK}>(g)", "Gather"),
        (f"t = Transpose<{TO_LAST}>(x) g = Gather(t, uneven) y = Transpose<{TO_LAST}>(g)", None),
        (f"t = Transpose<{TO_LAST}>(x) g = Gather(t, uneven) b = Transpose<{BACK}>(g) c = Relu(g)"
         f"d = Transpose<{BACK}>(c) y = Add(b, d)", None),
    ],
)  # fmt: skip
def test_parts_are_taken_in_one_form(nodes: str, rest: str | None) -> None:
    used = {name: np.array(numbers) for name, numbers in CONSTANTS.items() if f", {name}" in nodes}
    model = parse(f"(float[2,5,8] x) => (y) {{ {nodes} }}", **used)
    after, (count, _) = apply(model, normalize_slices, normalize_slices)
    assert ops(after) == (rest or ops(model))
    assert bool(count) == (rest is not None)
    assert_same(model, after, (2, 5, 8), tol=0)


def test_a_slice_names_only_the_axis_that_it_cuts() -> None:
    used = {name: np.array(CONSTANTS[name]) for name in ("zeros", "cut", "axes")}
    after, _ = apply(parse("(float[2,5,8] x) => (y) { y = Slice(x, zeros, cut, axes) }", **used), normalize_slices)
    assert [value(after, name) for name in after.graph.node[0].input[1:]] == [[0], [4], [2], [1]]


def test_sizes_stay_gathered() -> None:
    model = parse("(float[N,5,8] x) => (y) { s = Shape(x) y = Gather(s, i) }", i=np.array([0, 1]))
    assert apply(model, normalize_slices)[1] == [0]
