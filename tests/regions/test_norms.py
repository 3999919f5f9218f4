"""Test which norms are parts of the regions in front of them, or of those that move their rows."""

from __future__ import annotations

import onnx
import pytest
from region_models import assert_programs_agree, draw, optimized, regions
from test_joining import model_of, optimize_fusions

from onnxfuse import optimize, unfuse
from onnxfuse.fuse_model import Settings, fuse_model

INPUTS = (
    "float[2, 6, 16] x, float[2, 6, 16] y, bool[2, 6, 1] mask, float[2, 5, 16] tokens, float[2, 1, 16] first, "
    "float[6, 16] places, float[8, 4, 16] windows, float[2, 16, 16] rows, int64[2, 6] at, "
    "float[9, 16] table, float[2, 16, 6] planes, float[16, 16] square"
)
NORM = "n = LayerNormalization(a, gamma, beta)"
LAYER_NORM = ["ReduceMean", "Sub", "Mul", "ReduceMean", "Add", "Sqrt", "Div", "Mul", "Add", "Cast"]
PARTS = (
    "split := int64[6] {2, 2, 2, 2, 2, 16} again := int64[3] {8, 4, 16} b = Reshape(WHAT, split) "
    "c = Transpose <perm = [0, 1, 3, 2, 4, 5]>(b) d = Reshape(c, again)"
)
BACK = (
    "split := int64[6] {2, 2, 2, 2, 2, 16} again := int64[3] {2, 16, 16} b = Reshape(windows, split) "
    "c = Transpose <perm = [0, 1, 3, 2, 4, 5]>(b) d = Reshape(c, again)"
)

IN_FRONT = {
    "a product": (f"a = Mul(x, y) {NORM}", "n", ["Mul"]),
    "a mask": (f"zero := float {{0}} a = Where(mask, x, zero) {NORM}", "n", ["Where"]),
    "a gated activation": (f"b = Sigmoid(x) c = Mul(x, b) a = Mul(c, y) {NORM}", "n", ["Sigmoid", "Mul", "Mul"]),
    "a class token and positions": (f"c = Concat <axis = 1>(first, tokens) a = Add(c, places) {NORM}", "n a",
                                    ["Concat", "Add"]),
    "rows of a table": (f"c = Gather(table, at) a = Add(c, places) {NORM}", "n a", ["Gather", "Add"]),
    "windows that are put back": (f"{BACK} a = Add(d, rows) {NORM}", "n a", ["Reshape", "Transpose", "Reshape", "Add"]),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_FRONT)
def test_what_precedes_a_norm_is_computed_where_it_reads_its_rows(what: str) -> None:
    nodes, outputs, ops = IN_FRONT[what]
    source = model_of(nodes, INPUTS, outputs)
    result, report = optimized(source)
    assert report.counts == {"region": 1} and len(result.graph.node) == 1
    (region,) = regions(result)
    assert [op for op in region.ops if op != "Cast"] == [*ops, *(op for op in LAYER_NORM if op != "Cast")]
    assert set(region.node.output) == set(outputs.split())
    assert assert_programs_agree(result, draw(source)) == 1
    apart = optimize(source, regions="apart")[1].counts
    assert {"layer_norm", "add_layer_norm"} & apart.keys()
    back, verified = unfuse(result)
    assert verified.passed and "LayerNormalization" in {node.op_type for node in back.graph.node}


def test_what_follows_the_norm_is_in_the_region_too() -> None:
    source = model_of(f"a = Mul(x, y) {NORM} c = Mul(n, gate) z = Add(c, shift)", f"{INPUTS}, float[2, 1, 16] gate, "
                      "float[2, 1, 16] shift")  # fmt: skip
    result, report = optimized(source)
    assert report.counts == {"region": 1} and assert_programs_agree(result, draw(source)) == 1


def test_the_norm_of_a_sum_in_two_precisions() -> None:
    """A norm of float16 and a residual of float32, as exporters of mixed precision write it."""
    nodes = (
        "h = Cast <to = 1>(half) m = Mul(h, y) t = Add(m, x) two := float {2} s = Pow(t, two) "
        "v = ReduceMean <axes = [-1]>(s) e := float {1e-5} ve = Add(v, e) r = Sqrt(ve) q = Div(t, r) z = Mul(q, gamma)"
    )
    source = model_of(nodes, f"{INPUTS}, float16[2, 6, 16] half", "z t")
    result, report = optimized(source)
    assert report.counts == {"region": 1} and assert_programs_agree(result, draw(source)) == 1


RMS_NORM = (
    "s = Mul(rows, rows) v = ReduceMean <axes = [-1]>(s) e := float {1e-5} ve = Add(v, e) r = Sqrt(ve) "
    "q = Div(rows, r) n = Mul(q, gamma)"
)


@pytest.mark.parametrize("norm", ["n = LayerNormalization(rows, gamma, beta)", RMS_NORM], ids=["layer", "rms"])
def test_rows_that_a_norm_gives_are_moved_where_it_reads_them(norm: str) -> None:
    """The program moves rows first, so that a row of the norm is one of the output."""
    source = model_of(f"{norm} {PARTS.replace('WHAT', 'n')}", INPUTS, "d")
    result, report = optimized(source)
    assert report.counts == {"region": 1} and len(result.graph.node) == 1
    (region,) = regions(result)
    assert region.ops[:3] == ["Reshape", "Transpose", "Reshape"] and "ReduceMean" in region.ops[3:]
    assert assert_programs_agree(result, draw(source)) == 1


APART = {
    "elements of a row lie apart": ("a = Transpose <perm = [0, 2, 1]>(planes) " + NORM, "n"),
    "a product of what precedes it is a residual":
        (f"b = Mul(x, y) p = MatMul(b, square) c = Tanh(b) a = Add(c, p) {NORM} u = Softmax(p)", "n a u"),
    "others read the rows that are moved":
        (f"n = LayerNormalization(rows, gamma, beta) {PARTS.replace('WHAT', 'n')} p = MatMul(n, square)", "d p"),
    "rows are moved and divided":
        ("n = LayerNormalization(rows, gamma, beta) split := int64[4] {2, 16, 2, 8} b = Reshape(n, split) "
         "d = Transpose <perm = [0, 2, 1, 3]>(b)", "d"),
    "rows are padded":
        ("n = LayerNormalization(rows, gamma, beta) p := int64[6] {0, 1, 0, 0, 1, 0} d = Pad(n, p)", "d"),
}  # fmt: skip


@pytest.mark.parametrize("what", APART)
def test_norms_that_stay_apart(what: str) -> None:
    nodes, outputs = APART[what]
    result, report = optimized(model_of(nodes, INPUTS, outputs))
    assert {fusion for fusion in report.counts if fusion.endswith("_norm")}, report.counts
    onnx.checker.check_model(result)


@pytest.mark.parametrize("nodes", [f"a = Mul(x, y) {NORM}", f"n = LayerNormalization(rows, gamma, beta) {PARTS}"])
def test_a_region_that_was_taken_back_leaves_its_norm(nodes: str) -> None:
    output = "d" if "rows" in nodes else "n"
    source = model_of(nodes.replace("WHAT", "n"), INPUTS, output)
    found = fuse_model(source, None, Settings(optimize_fusions(), regions=True, exclude={("region", output)}))
    assert [one.fusion for one in found.fusing.fused] == ["layer_norm"]
