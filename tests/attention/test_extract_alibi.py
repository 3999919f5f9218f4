"""What is added to scores as slopes of heads times positions, in the ways that models write it, and what stays."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import apply, assert_same_at_all_sizes, ops, parse, run

from onnxfuse import optimize
from onnxfuse.attention.extract_alibi import extract_alibi
from onnxfuse.passes.fold_constants import fold_constants

SLOPES = np.array([0.5, 0.1, 0.03], np.float32)
PLACES = np.arange(-6, 1, dtype=np.float32)
TABLE = SLOPES[:, None, None] * PLACES
SCORES = "float[2,3,4,8] q, float[2,3,8,7] k"


def check(bias: str, inputs: str = "", opset: int = 17, count: int = 1, **weights: np.ndarray) -> str:
    """Assert how many biases are rewritten, and that the scores stay the same; return the operators then."""
    before = parse(
        f"({SCORES}{inputs}) => (y) {{ s = MatMul (q, k) {bias} z = Add (s, bias) y = Softmax (z) }}", opset, **weights
    )
    after, (_, found, _, again) = apply(before, fold_constants, extract_alibi, fold_constants, extract_alibi)
    assert (found, again) == (count, 0)
    random = np.random.default_rng(0)
    shapes = {each.name: [d.dim_value for d in each.type.tensor_type.shape.dim] for each in before.graph.input}
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    np.testing.assert_allclose(run(after, feeds)[0], run(before, feeds)[0], atol=1e-5)
    return ops(after)


def test_a_product_in_front_of_views() -> None:
    """Bloom: the slopes have no axis for queries."""
    places = {"places": np.array([2], np.int64), "slopes": SLOPES.reshape(3, 1)}
    found = check("a = Mul (slopes, x) bias = Unsqueeze (a, places)", ", float[2,1,7] x", **places)
    assert found == "MatMul Unsqueeze Mul Add Softmax"


def test_axes_before_opset_13_are_attributes() -> None:
    found = check("a = Mul (x, slopes) bias = Unsqueeze <axes = [2]> (a)", ", float[2,1,7] x", 12,
                  slopes=SLOPES.reshape(1, 3, 1))  # fmt: skip
    assert found == "MatMul Unsqueeze Mul Add Softmax"


def test_a_number_goes_to_the_slopes() -> None:
    weights = {"slopes": SLOPES.reshape(3, 1, 1), "half": np.float32(2)}
    assert (
        check("a = Mul (slopes, x) bias = Div (a, half)", ", float[2,1,1,7] x", **weights) == "MatMul Mul Add Softmax"
    )


def test_a_table_becomes_two_constants() -> None:
    assert check("bias = Identity (table)", table=TABLE) == "MatMul Mul Add Softmax"


def test_positions_get_an_axis_for_heads() -> None:
    assert (
        check("bias = Mul (x, slopes)", ", float[7] x", slopes=SLOPES.reshape(3, 1, 1))
        == "MatMul Unsqueeze Mul Add Softmax"
    )


def test_a_table_that_is_cut() -> None:
    wide = SLOPES[:, None, None] * np.arange(-9, 1, dtype=np.float32)
    ends = {"first": np.array([3], np.int64), "end": np.array([10], np.int64), "axis": np.array([2], np.int64)}
    assert check("bias = Slice (wide, first, end, axis)", wide=wide, **ends) == "MatMul Mul Add Softmax"


def test_distances_in_both_directions() -> None:
    """JinaBERT: the table differs along queries too."""
    distances = -np.abs(np.arange(4)[:, None] - np.arange(7)).astype(np.float32)
    ends = {"first": np.array([0], np.int64), "end": np.array([7], np.int64), "axis": np.array([3], np.int64)}
    table = (SLOPES[:, None, None] * distances)[None]
    assert check("bias = Slice (table, first, end, axis)", table=table, **ends) == "MatMul Mul Add Softmax"


@pytest.mark.parametrize("end", ["y = Softmax (z)", "y = Relu (z)"])
@pytest.mark.parametrize("signature", ["float[a,b] q, float[b,7] k", "float[a,4,b] q, float[a,b,7] k",
                                       "float[a,3,4,b] q, float[a,3,b,7] k"])  # fmt: skip
def test_a_table_without_attention_stays(signature: str, end: str) -> None:
    """A table that is added to fewer than four axes, or in front of no Softmax, would give the result an axis."""
    before = parse(f"({signature}) => (y) {{ s = MatMul (q, k) z = Add (s, table) {end} }}", table=TABLE)
    after, _ = optimize(before, verify=False, regions=False)
    assert ops(after).lower() == f"matmul add {end.split()[2].lower()}"
    assert_same_at_all_sizes(before, after)


@pytest.mark.parametrize(
    ("bias", "weights"),
    [
        ("bias = Mul (slopes, x)", {"slopes": np.ones((3, 1, 7), np.float32) * PLACES}),
        ("r = Cast <to = 10> (x) a = Mul (slopes, r) bias = Cast <to = 1> (a)",
         {"slopes": SLOPES.reshape(3, 1, 1).astype(np.float16)}),
        ("bias = Add (slopes, x)", {"slopes": SLOPES.reshape(3, 1, 1)}),
    ],
    ids=["slopes of each key", "rounded to float16", "a sum"],
)  # fmt: skip
def test_what_stays(bias: str, weights: dict[str, np.ndarray]) -> None:
    check(bias, ", float[2,1,1,7] x", count=0, **weights)


def test_a_table_of_rank_two_stays() -> None:
    table = TABLE.copy()
    table[1, 0, 3] += 1e-3
    ends = {"first": np.array([0], np.int64), "end": np.array([7], np.int64), "axis": np.array([2], np.int64)}
    check("bias = Slice (table, first, end, axis)", count=0, table=table, **ends)


def test_an_empty_table_stays() -> None:
    table = np.zeros((3, 1, 0), np.float32)
    before = parse("() => (y) { y = Add (a, b) }", 17, a=table, b=table)
    assert not any(apply(before, extract_alibi)[1])


def test_heads_in_reverse_stay() -> None:
    steps = {"first": [2], "end": [-(2**40)], "axis": [0], "step": [-1]}
    weights = {name: np.array(value, np.int64) for name, value in steps.items()}
    slopes = SLOPES.reshape(3, 1, 1)
    check("a = Mul (slopes, x) bias = Slice (a, first, end, axis, step)", ", float[1,1,7] x", count=0, slopes=slopes,
          **weights)  # fmt: skip


def test_a_slice_of_what_lacks_an_axis_stays() -> None:
    """The axis of the Slice is none of the positions'."""
    ends = {name: np.array([value], np.int64) for name, value in (("first", 0), ("end", 7), ("axis", 2))}
    slopes = SLOPES.reshape(3, 1, 1)
    check("a = Mul (slopes, x) bias = Slice (a, first, end, axis)", ", float[9] x", count=0, slopes=slopes, **ends)
