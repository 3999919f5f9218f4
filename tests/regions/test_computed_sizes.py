"""Test regions whose sizes a model computes from dims: bounds, pads, repeats, parts and targets."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from region_models import assert_programs_agree, draw, optimized, parsed, regions, run
from runtimes import open_on_cpu

from onnxfuse import optimize
from onnxfuse.fuse_model import Settings, fuse_model

INPUTS = "float[b, t, 8] x, float[b, 2, t, t] scores, bool[1, 1, 16, 16] buffer, float[16, 8] table, float[1, 1, 8] row"
DIMS = """
    i0 := int64 {0} i1 := int64 {1} i2 := int64 {2} zero := int64[1] {0} one := int64[1] {1} two := int64[1] {2}
    three := int64[1] {3} s = Shape(x) b0 = Gather(s, i0) t0 = Gather(s, i1) b = Unsqueeze(b0, zero)
    t = Unsqueeze(t0, zero) """
CASES = {
    "a causal buffer": (
        "c = Slice(buffer, zero, t, two) d = Slice(c, zero, t, three) low := float {-100} w = Where(d, scores, low) "
        "z = Softmax(w)", ["Slice", "Slice", "Where", "Softmax"]),
    "the first rows of a table": (
        "q = Slice(table, zero, t, zero) a = Add(x, q) z = Mul(a, a)", ["Slice", "Add", "Mul"]),
    "all rows but the last": (
        "u = Sub(t0, i1) e = Unsqueeze(u, zero) q = Slice(x, zero, e, one) last := int64[1] {9223372036854775807} "
        "r = Slice(x, one, last, one) a = Sub(r, q) z = Abs(a)", ["Slice", "Slice", "Sub", "Abs"]),
    "a row for every image": (
        "n = Concat <axis = 0>(b, t, one) q = Tile(row, n) a = Neg(q) z = Sub(x, a)", ["Expand", "Neg", "Sub"]),
    "rows up to 16": (
        "all := int64[1] {16} u = Sub(all, t) none := int64[4] {0, 0, 0, 0} p = Concat <axis = 0>(none, u, zero) "
        "a = Pad(x, p) z = Neg(a)", ["Pad", "Neg"]),
    "rows up to a multiple": (
        "four := int64[1] {4} m = Mod(t, four) u = Sub(four, m) none := int64[4] {0, 0, 0, 0} "
        "p = Concat <axis = 0>(none, u, zero) a = Pad(x, p) z = Neg(a)", ["Pad", "Neg"]),
    "halves of columns of scores": ("a, c = Split <axis = 2>(even) g = Sigmoid(a) z = Mul(g, c)",
                                    ["Split", "Sigmoid", "Mul"]),
    "an Expand over the rows": (
        "n = Concat <axis = 0>(b, t, one) q = Expand(row, n) a = Neg(q) z = Sub(x, a)", ["Expand", "Neg", "Sub"]),
    "pixels out of channels": ("a = Neg(image) z = DepthToSpace <blocksize = 2>(a)",
                               ["Neg", "Reshape", "Transpose", "Reshape"]),
    "channels out of pixels": ("a = Neg(pixels) z = SpaceToDepth <blocksize = 2>(a)",
                               ["Neg", "Reshape", "Transpose", "Reshape"]),
}  # fmt: skip
MORE = ", float[b, 2, n, 6] even, float[b, 8, h, w] image, float[b, 3, p, q] pixels"
SIZES = [
    {"b": 2, "t": 5, "n": 4, "h": 3, "w": 5, "p": 4, "q": 6},
    {"b": 1, "t": 1, "n": 2, "h": 1, "w": 2, "p": 2, "q": 2},
]


@pytest.mark.parametrize("what", CASES)
def test_sizes_that_follow_from_dims(what: str) -> None:
    """The program and the function compute them from the operands, so that no host operator is left."""
    nodes, ops = CASES[what]
    source = parsed(DIMS + nodes, inputs=INPUTS + MORE)
    result = fuse_model(source, None, Settings([], regions=True)).model
    onnx.checker.check_model(result)
    (region,) = regions(result)
    assert region.ops == ops and len(result.graph.node) == 1
    for sizes in SIZES:
        feeds = draw(source, sizes=sizes)
        assert assert_programs_agree(result, feeds) == 1
        expected, found = run(source, feeds), run(result, feeds)
        assert {name: value.tolist() for name, value in found.items()} == {
            name: value.tolist() for name, value in expected.items()
        }


def test_the_function_computes_them_in_every_opset() -> None:
    for opset in (11, 13, 18):
        axes = "axes = [0]" if opset < 13 else ""
        unsqueezed = f"t = Unsqueeze <{axes}>(t0)" if axes else "zero := int64[1] {0} t = Unsqueeze(t0, zero)"
        nodes = (
            f"i1 := int64 {{1}} s = Shape(x) t0 = Gather(s, i1) {unsqueezed} first := int64[1] {{0}} "
            "q = Slice(table, first, t, first) a = Add(x, q) z = Mul(a, a)"
        )
        source = parsed(nodes, inputs=INPUTS, opset=opset)
        result, _ = optimized(source)
        (region,) = regions(result)
        assert region.ops == ["Slice", "Add", "Mul"]
        assert assert_programs_agree(result, draw(source, sizes=SIZES[0])) == 1


def test_a_tensor_of_which_only_dims_are_read_is_an_operand() -> None:
    """The rows are as many as those of another tensor, which nothing else of the region reads."""
    nodes = (
        "s = Shape <start = 1, end = 2>(x) zero := int64[1] {0} q = Slice(table, zero, s, zero) a = Neg(q) z = Exp(a)"
    )
    source = parsed(nodes, inputs=INPUTS)
    result, report = optimized(source)
    (region,) = regions(result)
    assert set(region.node.input) == {"table", "x"} and report.counts == {"region": 1}
    assert assert_programs_agree(result, draw(source, sizes=SIZES[0])) == 1


@pytest.mark.parametrize(("nodes", "why"), [
    ("q = Slice(table, zero, count, zero) z = Neg(q)", "its ends is computed"),
    ("none := int64[4] {0, 0, 0, 0} p = Concat <axis = 0>(none, t, zero) q = Pad <mode = \"edge\">(x, p) z = Neg(q)",
     "may take elements away"),
], ids=["an input", "mirrored pads"])  # fmt: skip
def test_other_sizes_stay_out(nodes: str, why: str) -> None:
    source = parsed(DIMS + nodes, inputs=INPUTS + ", int64[1] count")
    made = fuse_model(source, None, Settings([], regions=True))
    assert any(why in reason for reason in made.no_region.values()), made.no_region


@pytest.mark.parametrize("opset", [10, 11, 13])
def test_slices_of_which_one_is_empty(opset: int) -> None:
    """The second column of an image of one column is none: in opset 10 onnx infers both Slices to have all columns."""
    text = """c = Conv <auto_pad = "SAME_LOWER", strides = [2, 2]> (image, w)
        a = Slice (c, zero, one, last) e = Slice (c, one, two, last) z = Concat <axis = -1> (e, a)"""
    numbers = {"zero": [0], "one": [1], "two": [2], "last": [3 if opset == 10 else -1]}
    weights = {name: np.array(value, np.int64) for name, value in numbers.items()}
    weights["w"] = np.random.default_rng(0).standard_normal((2, 2, 5, 3)).astype(np.float32)
    model = parsed(text, opset=opset, inputs="float[b, 2, h, w] image")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in weights.items())
    after, _ = optimize(model, verify=False)
    assert [node.op_type for node in after.graph.node] == ["conv_bias_activation", "region"]
    for sizes in itertools.product((1, 2, 3, 5), repeat=3):
        feeds = draw(model, sizes=dict(zip("bhw", sizes, strict=True)))
        expected, found = (open_on_cpu(each, optimize=False).run(None, feeds)[0] for each in (model, after))
        np.testing.assert_allclose(found, expected, atol=1e-5)
