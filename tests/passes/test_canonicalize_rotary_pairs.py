"""Columns of heads that are reshaped to pairs: the Slices that are written, and the columns that stay."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same_at_all_sizes, ops, parse

from onnxfuse.passes.canonicalize_rotary_pairs import canonicalize_rotary_pairs

CONSTANTS = {
    "pairs": np.array([0, 0, 2, 3, 2], np.int64), "triples": np.array([0, 0, 2, 2, 3], np.int64),
    "flat_pairs": np.array([0, 0, 6, 2], np.int64),
    "zero": np.array(0, np.int64), "one": np.array(1, np.int64), "both": np.array([0, 1], np.int64),
    "i0": np.array([0], np.int64), "i1": np.array([1], np.int64), "i2": np.array([2], np.int64),
    "back": np.array([-1], np.int64), "last": np.array([-1], np.int64),
}  # fmt: skip
# Columns z of x (B, N, 2, 6), and the operators that compute them instead.
FORMS = {
    "Gather of an index": ("z = Gather <axis = -1> (r, one)", "Slice"),
    "Gather of an index from the end": ("z = Gather <axis = 4> (r, back)", "Slice Unsqueeze"),
    "Slice": ("z = Slice (r, i1, i2, last)", "Slice Unsqueeze"),
    "Split": ("a, b = Split <axis = -1, num_outputs = 2> (r) z = Sub (a, b)", "Slice Unsqueeze Slice Unsqueeze Sub"),
    "Split and Squeeze": ("a, b = Split <axis = -1, num_outputs = 2> (r) z = Squeeze (b, last)",
                          "Slice Unsqueeze Squeeze"),
}  # fmt: skip
OTHERS = {
    "both columns": "z = Gather <axis = -1> (r, both)",
    "another axis": "z = Gather <axis = 3> (r, one)",
    "a slice of a column": "w = Slice (r, i0, i1, i2) z = Slice (w, i0, i1, last)",
    "an output of the graph": "y = Gather <axis = -1> (r, one)",
}


def columns(nodes: str, target: str = "pairs", x: str = "float[B,N,2,6] x") -> onnx.ModelProto:
    text = f"r = Reshape (x, {target}) {nodes}" + (" y = Abs (z)" if " y = " not in f" {nodes}" else "")
    read = {name: value for name, value in CONSTANTS.items() if f" {name})" in text or f" {name}," in text}
    return parse(f"({x}) => (y) {{ {text} }}", 18, **read)


@pytest.mark.parametrize("form", FORMS)
def test_a_column_is_a_slice_in_steps(form: str) -> None:
    nodes, written = FORMS[form]
    before = columns(nodes)
    after, (count, again) = apply(before, canonicalize_rotary_pairs, canonicalize_rotary_pairs)
    assert (ops(after), count, again) == (f"{written} Abs", 1 + nodes.count("Split <"), 0)
    assert_same_at_all_sizes(before, after)


@pytest.mark.parametrize(
    ("nodes", "written"),
    [
        ("z = Gather <axis = -2> (r, one)", "Slice"),
        ("a, b = Split <axis = 3, num_outputs = 2> (r) z = Sub (a, b)", "Slice Unsqueeze Slice Unsqueeze Sub"),
    ],
)
def test_a_row_of_two_is_half_of_a_head(nodes: str, written: str) -> None:
    before = columns(nodes, "triples")
    after, _ = apply(before, canonicalize_rotary_pairs)
    assert ops(after) == f"{written} Abs"
    assert_same_at_all_sizes(before, after)


@pytest.mark.parametrize("x", ["float[B,N,12] x", "float[B,N,3,4] x"])
def test_heads_are_reshaped_where_the_source_has_others(x: str) -> None:
    before = columns("z = Gather <axis = -1> (r, one)", x=x)
    after, (count,) = apply(before, canonicalize_rotary_pairs)
    assert (ops(after), count) == ("Reshape Slice Abs", 1)
    assert_same_at_all_sizes(before, after)


@pytest.mark.parametrize("form", OTHERS)
def test_other_columns_stay(form: str) -> None:
    assert_stays(columns(OTHERS[form]))


@pytest.mark.parametrize("target", ["triples", "flat_pairs"])
def test_columns_of_other_shapes_stay(target: str) -> None:
    """A column of three is not one of a pair, and four axes hold pairs, but no heads of pairs."""
    assert_stays(columns("z = Gather <axis = -1> (r, one)", target))


def test_columns_of_integers_stay() -> None:
    assert_stays(columns("z = Gather <axis = -1> (r, one)", x="int32[B,N,2,6] x"))


def test_a_column_of_a_tensor_that_is_not_reshaped_stays() -> None:
    one = np.array(1, np.int64)
    assert_stays(parse("(float[B,N,2,3,2] r) => (y) { z = Gather <axis = -1> (r, one) y = Abs (z) }", 18, one=one))


def assert_stays(before: onnx.ModelProto) -> None:
    after, (count,) = apply(before, canonicalize_rotary_pairs)
    assert (ops(after), count) == (ops(before), 0)
