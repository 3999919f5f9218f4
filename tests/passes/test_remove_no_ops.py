"""Nodes that compute one of their inputs, and equivalent operators: each model before, and its operators after."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same, ops, parse, random, run
from runtimes import open_on_cpu

from onnxfuse import optimize
from onnxfuse.passes.normalize import normalize
from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.no_ops import NO_OPS

CONSTANTS = {
    "one": np.float32(1), "zero": np.float32(0), "one11": np.ones((1, 1), np.float32), "ones": np.ones(8, np.float32),
    "one5": np.ones((1, 1, 1, 1, 1), np.float32), "i0": np.array([0]), "i1": np.array([1]), "i2": np.array([2]),
    "i8": np.array([8]), "end": np.array([2**63 - 1]), "minus1": np.array([-1]), "none": np.zeros(6, np.int64),
    "shift": np.array([1, 0, 0, -1, 0, 0]), "off": np.array(False), "on": np.array(True), "ratio": np.float32(0.5),
    "keep": np.array([1, 1, 1]), "twice": np.array([1, 2, 1]), "thrice": np.array([1, 1, 3, 1]),
}  # fmt: skip


def check(nodes: str, rest: str, opset: int = 20, header: str = "(float[N,5,8] x) => (y)") -> onnx.ModelProto:
    """Assert which operators normalization leaves of a model with an input [N, 5, 8], and that values stay the same."""
    words = set(re.findall(r"\w+", nodes))
    used = {name: value for name, value in CONSTANTS.items() if name in words}
    model = parse(f"{header} {{ {nodes} }}", opset, **used)
    after, _ = apply(model, normalize)
    assert ops(after) == rest
    assert_same(model, after, (3, 5, 8), tol=0)
    return after


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_relu_before_a_quantizer_to_float8_is_a_maximum(dtype: str) -> None:
    text = """(float[N,8] x) => (y, z) {
        a = Relu(x)  q = QuantizeLinear(a, half, zero)  y = DequantizeLinear(q, half)
        b = Relu(x)  p = QuantizeLinear(b, half, least)  z = DequantizeLinear(p, half) }"""
    constants = {"half": np.float32(0.5), "zero": np.zeros((), dtype), "least": np.uint8(0)}
    model = parse(text, 19, **constants)
    after, _ = apply(model, normalize)
    assert ops(after).split().count("Max") == ops(after).split().count("Relu") == 1
    assert_same(model, after, (3, 8), tol=0)


def test_an_identity_keeps_a_transposed_output_apart_from_a_gemm() -> None:
    """Without the Identity onnxruntime refuses the model: its merging of Transposes into a Gemm loses the output."""
    text = """(float[M,K] a, float[N,K] b) => (y, z) {
        c = Transpose<perm=[1,0]>(a) d = Transpose<perm=[1,0]>(b) y = Gemm<transA=1>(c, d) z = Identity(c) }"""
    model = parse(text, 12)
    after, _ = apply(model, normalize)
    assert ops(after) == "Transpose Transpose Gemm Identity"
    feeds = {"a": random(3, 8), "b": random(5, 8)}
    for left, right in zip(run(model, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("declared", ["float", "float[4,M]"])
def test_an_identity_keeps_an_output_apart_whose_shape_is_only_declared(declared: str) -> None:
    """A declaration may be wrong; onnxruntime ignores it, but not for a Slice of that output (fuzzer, 101010034)."""
    text = f"""(float[4,M] x) => ({declared} y, float[K,M] z) {{
        a = Loop(three, yes, x) <body = again (int64 i, bool go, float[] s) => (bool on, float[] t) {{
            on = Identity(go) t = Identity(s) }}>
        b = Softmax<axis=0>(a) y = Identity(b) z = Slice(b, zero, end, zero, two) }}"""
    row = np.array([0])
    model = parse(text, 18, three=np.array(3), yes=np.array(True), zero=row, end=row + 3, two=row + 2)
    after, _ = apply(model, normalize)
    assert ops(after) == "Loop Softmax Identity Slice"
    feeds = {"x": random(4, 2)}
    for left, right in zip(run(model, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("a = Relu(x) b = Identity(a) c = Identity(b) y = Abs(c)", "Relu Abs"),
        ("a = Relu(x) y = Identity(a)", "Relu"),
        ("y = Identity(x)", "Identity"),
        ("a = Dropout(x) y = Abs(a)", "Abs"),
        ("a, b = Dropout(x, ratio, off) y = Abs(a)", "Abs"),
        ("a = Cast<to=1>(x) y = Abs(a)", "Abs"),
        ("a = Cast<to=11>(x) b = Cast<to=1>(a) y = Abs(b)", "Abs"),
        ("a = Cast<to=10>(x) b = Cast<to=1>(a) y = Abs(b)", "Cast Cast Abs"),
        ("a = Cast<to=11>(x) b = Cast<to=10>(a) y = Cast<to=1>(b)", "Cast Cast"),
        ("a = CastLike(x, one) y = Abs(a)", "Abs"),
        ("a = Expand(x, keep) y = Abs(a)", "Abs"),
        ("a = Tile(x, keep) y = Abs(a)", "Abs"),
        ("a = Tile(x, twice) y = Abs(a)", "Tile Abs"),
        ("a = Unsqueeze(x, i2) b = Tile(a, thrice) y = Abs(b)", "Unsqueeze Expand Abs"),
        ("a = Slice(x, i0, end, i1) y = Abs(a)", "Abs"),
        ("a = Slice(x, i1, end, i1) y = Abs(a)", "Slice Abs"),
        ("a = Slice(x, minus1, minend, i1, minus1) y = Abs(a)", "Slice Abs"),
        ("a = Relu(x) b = Concat<axis=-1>(x, a) c = Slice(b, i8, end, i2) y = Abs(c)", "Relu Abs"),
        ("a = Relu(x) b = Concat<axis=-1>(x, a) c = Slice(b, i1, i8, i2) y = Abs(c)", "Relu Concat Slice Abs"),
        ("a = Relu(x) b = Concat<axis=0>(x, a) c = Slice(b, i0, i8, i2) y = Abs(c)", "Relu Concat Abs"),
        ("a = Pad(x, none) y = Abs(a)", "Abs"),
        ("a = Pad(x, shift) y = Abs(a)", "Pad Abs"),
        ("a = Concat<axis=1>(x) y = Abs(a)", "Abs"),
        ("a = Slice(x, end, end, i2) b = Concat<axis=-1>(x, a) y = Abs(b)", "Abs"),
        ("a = Slice(x, end, end, i2) b = Concat<axis=2>(x, a, x) y = Abs(b)", "Concat Abs"),
        ("a = Slice(x, end, end, i2) y = Concat<axis=2>(a, a)", "Slice Concat"),
        ("a = Sum(x) y = Abs(a)", "Abs"),
        ("a = Max(x) y = Abs(a)", "Abs"),
        ("a = Mul(one, x) b = Div(a, one) c = Add(b, zero) d = Sub(c, zero) y = Abs(d)", "Abs"),
        ("a = Mul(x, one11) y = Abs(a)", "Abs"),
        ("a = Mul(x, one5) y = Abs(a)", "Mul Abs"),
        ("a = Mul(x, ones) y = Abs(a)", "Mul Abs"),
        ("a = Div(one, x) y = Abs(a)", "Div Abs"),
        ("a = Sub(zero, x) y = Relu(a)", "Sub Relu"),
    ],
)
def test_no_ops(nodes: str, rest: str) -> None:
    if "minend" in nodes:
        nodes = nodes.replace("minend", "low")
        model = parse(f"(float[N,5,8] x) => (y) {{ {nodes} }}", low=np.array([-(2**62)]), i1=CONSTANTS["i1"],
                      minus1=CONSTANTS["minus1"])  # fmt: skip
        after, _ = apply(model, normalize)
        assert ops(after) == rest
        assert_same(model, after, (3, 5, 8), tol=0)
    else:
        check(nodes, rest)


MOVES = ("Shape Expand", "Shape Slice")  # they move the integers of a pair that has one scale, which leaves no pair


@pytest.mark.parametrize(
    ("between", "stays"),
    [
        ("s = Shape(x) z = Expand(b, s)", "Shape Expand"),
        ("s = Shape(x) c = Expand(b, s) z = Identity(c)", "Shape Expand"),
        ("s = Shape(x) c = Identity(b) z = Expand(c, s)", "Shape Expand"),
        ("s = Shape(x) z = Slice(b, i000, s)", "Shape Slice"),
        ("c = Cast<to=11>(b) z = Cast<to=1>(c)", "Cast Cast"),
        ("c = Transpose<perm=[0,2,1]>(b) z = Transpose<perm=[0,2,1]>(c)", "Transpose Transpose"),
        ("z = Loop(three, on, b) <body = again (int64 i, bool go, float[] s) => (bool on2, float[] t) {"
         " on2 = Identity(go) t = Identity(s) }>", "Loop"),
        ("z = Identity(b)", ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", ["0.059", "0.041"])
def test_no_ops_keep_quantizers_of_two_scales_apart(between: str, stays: str, scale: str) -> None:
    """onnxruntime's optimizations make one pair of two that meet, and round once (fuzzer, 1030008639 and 2002872)."""
    text = f"""(float[N,5,8] x) => (y) {{ q1 = QuantizeLinear(x, k, n) b = DequantizeLinear(q1, k, n) {between}
        q2 = QuantizeLinear(z, l, n) d = DequantizeLinear(q2, l, n) y = Abs(d) }}"""
    scales = {"k": np.float32(0.041), "l": np.float32(scale), "n": np.array(128, np.uint8)}
    model = parse(text, 20, **scales, i000=np.zeros(3, np.int64), three=np.array(3), on=np.array(True))
    after, _ = optimize(model, verify=False, regions=False)
    middle = f"{stays} " if scale == "0.059" and stays else ""
    is_moved = scale == "0.041" and stays in MOVES and "Identity" not in between
    pairs = ["QuantizeLinear DequantizeLinear"] * (1 if is_moved else 2)
    assert ops(after) == f"{f' {middle}'.join(pairs)} Abs"
    feeds = {"x": random(3, 5, 8)}
    for each in (after, optimize(model, verify=False)[0]):
        same = [np.array_equal(*run(model, feeds), *open_on_cpu(one).run(None, feeds)) for one in (model, each)]
        assert same in ([True, True], [False, False])


@pytest.mark.parametrize("bias", ["float[4] c = {1, 2, 3, 4}", "float[1,4] c = {1, 2, 3, 4}", "float[1] c = {1}"])
@pytest.mark.parametrize(
    ("scales", "axis"),
    [("float[4,2] t = {1, 2, 3, 4, 5, 6, 7, 8}", "axis = 1, block_size = 4"),
     ("float[8] t = {1, 2, 3, 4, 5, 6, 7, 8}", "axis = 1")],
)  # fmt: skip
def test_gemms_of_weights_with_scales_of_other_shapes(scales: str, axis: str, bias: str) -> None:
    """Scales of blocks and of rows do not broadcast to the bias (fuzzer, 1050027337)."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]> g (uint8[n,8] x) => (float[n,4] y)
        <int8[4,8] w = {{{", ".join(map(str, range(-16, 16)))}}}, float s = {{0.5}}, uint8 z = {{3}},
         {scales}, {bias}> {{
          a = DequantizeLinear (x, s, z) b = DequantizeLinear <{axis}> (w, t)
          y = Gemm <alpha = 0.5, transB = 1> (a, b, c) }}"""
    )
    _, report = optimize(model)
    assert report.verified.status == "verified" and not report.left_out


@pytest.mark.parametrize(
    ("shape", "flat"),
    [((1, 8), (8,)), ((1, 1, 8), (8,)), ((5, 8), (5, 8)), ((1, 5, 1), (1, 5, 1)), ((1, 1, 1, 8), (1, 1, 1, 8))],
)
def test_weights_of_one_row_are_flattened(shape: tuple[int, ...], flat: tuple[int, ...]) -> None:
    model = parse("(float[N,5,8] x) => (y) { a = Add(x, row) b = Mul(row, x) y = Sub(a, b) }", row=random(*shape))
    after, _ = apply(model, normalize)
    assert {tuple(t.dims) for t in after.graph.initializer} == {flat}
    assert_same(model, after, (3, 5, 8), tol=0)


@pytest.mark.parametrize(
    ("shape", "flat"), [((1,), ()), ((1, 1), ()), ((1, 8), (8,)), ((1, 5, 1), (5, 1)), ((5, 8), (5, 8)), ((8,), (8,))]
)
def test_scales_of_a_number_lose_their_first_axes(shape: tuple[int, ...], flat: tuple[int, ...]) -> None:
    model = parse(
        "(float[N,5,8] x) => (y) { s = ReduceMax<keepdims=0>(x) t = Mul(s, row) y = Mul(x, t) }", row=random(*shape)
    )
    after, _ = apply(model, normalize)
    assert {tuple(t.dims) for t in after.graph.initializer} == {flat}
    assert_same(model, after, (3, 5, 8), tol=0)


@pytest.mark.parametrize("rest", ["y = Mul(z, t)", "y = Mul(x, t) q = Identity(t)", "y = Sub(x, t)", "y = Mul(t, t)"])
def test_scales_of_a_number_keep_axes_that_others_need(rest: str) -> None:
    outputs = "y, q" if "q =" in rest else "y"
    text = f"(float[N,5,8] x) => ({outputs}) {{ s = ReduceMax<keepdims=0>(x) z = Abs(s) t = Mul(s, row) {rest} }}"
    model = parse(text, row=random(1, 8))
    after, _ = apply(model, normalize)
    assert {tuple(t.dims) for t in after.graph.initializer} == {(1, 8)}
    assert_same(model, after, (3, 5, 8), tol=0)


def test_a_gemm_has_a_bias_of_one_axis() -> None:
    model = parse("(float[N,8] x) => (y) { y = Gemm(x, w, row) }", w=random(8, 5), row=random(1, 5))
    after, _ = apply(model, normalize)
    assert {tuple(t.dims) for t in after.graph.initializer} == {(8, 5), (5,)}
    assert_same(model, after, (3, 8), tol=0)


@pytest.mark.parametrize(("alpha", "rest"), [("0.5", "1.0"), ("-0.5", "-0.5"), ("0.0", "0.0")])
def test_the_factor_of_a_gemm_scales_the_integers_of_its_weight(alpha: str, rest: str) -> None:
    model = parse(
        f"(float[N,8] x) => (y) {{ d = DequantizeLinear(w, step) y = Gemm<alpha={alpha}>(x, d, row) }}",
        w=np.arange(40).reshape(8, 5).astype(np.int8), row=random(5), step=np.float32(0.25),
    )  # fmt: skip
    after, _ = apply(model, normalize)
    (gemm,) = (node for node in after.graph.node if node.op_type == "Gemm")
    assert {a.name: a.f for a in gemm.attribute} == {"alpha": float(rest)}
    assert_same(model, after, (3, 8), tol=1e-6)


@pytest.mark.parametrize("zero", ["", ", zero"])
@pytest.mark.parametrize(
    "rest", ["y = DequantizeLinear(q, one)", "d = DequantizeLinear(q, one) e = Relu(d) y = Sin(e)",
             "d = DequantizeLinear(q, one) e = Transpose<perm=[0,2,1]>(d) y = Sin(e)",
             "d = DequantizeLinear(q, one) e = Add(d, d) y = QuantizeLinear<output_dtype=3>(e, one)"],
)  # fmt: skip
def test_quantizers_of_int8_have_a_zero_point_and_no_dtype(rest: str, zero: str) -> None:
    """onnxruntime opens each of these models, with its optimizations, which it does not with the attribute."""
    text = f"(float[N,5,8] x) => (y) {{ a = Sin(x) q = QuantizeLinear<output_dtype=3>(a, one{zero}) {rest} }}"
    constants = {"one": np.float32(0.05), **({"zero": np.int8(0)} if zero else {})}
    model = parse(text, 21, **constants)
    after, _ = apply(model, normalize)
    for node in after.graph.node:
        if node.op_type == "QuantizeLinear":
            assert len(node.input) == 3 and not any(a.i for a in node.attribute)
    x = random(2, 5, 8)
    expected = open_on_cpu(model, optimize=False).run(None, {"x": x})
    np.testing.assert_array_equal(open_on_cpu(after).run(None, {"x": x})[0], expected[0])


@pytest.mark.parametrize(
    ("opset", "nodes", "rest"),
    [
        (9, "a = Dropout<ratio=0.3>(x) y = Abs(a)", "Abs"),
        (11, "a = Dropout<ratio=0.3>(x) y = Abs(a)", "Abs"),
        (13, "a = Dropout(x, ratio) y = Abs(a)", "Abs"),
        (24, "a = Dropout(x, ratio, off) y = Abs(a)", "Abs"),
        (9, "a = Slice<starts=[0], ends=[9], axes=[1]>(x) y = Abs(a)", "Abs"),
        (9, "a = Slice<starts=[1], ends=[9], axes=[1]>(x) y = Abs(a)", "Slice Abs"),
        (9, "a = Pad<pads=[0,0,0,0,0,0]>(x) y = Abs(a)", "Abs"),
        (9, "a = Pad<pads=[0,1,0,0,-1,0]>(x) y = Abs(a)", "Pad Abs"),
        (11, "a = Unsqueeze<axes=[1]>(x) b = Squeeze<axes=[1]>(a) y = Abs(b)", "Abs"),
        (13, "a = Unsqueeze(x, i1) b = Squeeze(a, i1) y = Abs(b)", "Abs"),
        (13, "a = Unsqueeze(x, i1) b = Squeeze(a, i1) c = Relu(a) d = Abs(b) e = Squeeze(c, i1) y = Add(d, e)",
         "Unsqueeze Relu Abs Squeeze Add"),
    ],
)  # fmt: skip
def test_parameters_as_attributes_and_as_inputs(opset: int, nodes: str, rest: str) -> None:
    check(nodes, rest, opset)


@pytest.mark.parametrize(
    ("reader", "source"),
    [
        ("Gather(sizes, i1)", "ids"), ("Gather(sizes, i0)", "ids"),
        ("Gather(sizes, i2)", "rows"), ("Gather(sizes, minus1)", "rows"),  # the size of a row
        ("Slice(sizes, i0, i1)", "rows"), ("Abs(sizes)", "rows"),
    ],
)  # fmt: skip
def test_the_shape_of_rows_is_read_from_their_indices(reader: str, source: str) -> None:
    """A fused node may then compute the rows.  Rows and indices have the same sizes along the first axes only."""
    table = random(7, 4)
    text = f"(int64[N,M] ids) => (y, z) {{ rows = Gather(table, ids) z = Abs(rows) sizes = Shape(rows) y = {reader} }}"
    used = {name: CONSTANTS[name] for name in ("i0", "i1", "i2", "minus1") if re.search(rf"\b{name}\b", reader)}
    model = parse(text, table=table, **used)
    after, _ = apply(model, normalize)
    assert next(list(node.input) for node in after.graph.node if node.op_type == "Shape") == [source]
    feeds = {"ids": np.array([[0, 6, 3], [1, -1, 2]])}
    for a, b in zip(run(model, feeds), run(after, feeds), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_dropout_in_training_or_whose_mask_is_read_stays() -> None:
    dropouts = (
        "y, m = Dropout(x, ratio, on)",
        "y, m = Dropout(x, ratio, off) n = Not(m)",
        "y = Dropout(x, ratio, flag)",
    )
    for nodes in dropouts:
        outputs = "(y, n)" if "Not" in nodes else "(y)"
        weights = {name: CONSTANTS[name] for name in ("ratio", "on", "off") if f" {name}" in nodes}
        after, _ = apply(parse(f"(float[N,5,8] x, bool flag) => {outputs} {{ {nodes} }}", **weights), normalize)
        assert "Dropout" in ops(after)


def test_half_precision_casts() -> None:
    text = "(float16[N,5,8] x) => (y) { a = Cast<to=1>(x) b = Cast<to=10>(a) y = Abs(b) }"
    model = parse(text)
    after, _ = apply(model, normalize)
    assert ops(after) == "Abs"
    assert_same(model, after, (3, 5, 8), np.float16, 0)


LESS_MAXIMUM = "m = ReduceMax(x, i2) a = Sub(x, m)"


@pytest.mark.parametrize(
    ("dtype", "nodes", "rest"),
    [
        ("float", f"{LESS_MAXIMUM} y = Softmax(a)", "Softmax"),
        ("float", f"{LESS_MAXIMUM} y = Softmax<axis=1>(a)", "ReduceMax Sub Softmax"),
        ("float", f"{LESS_MAXIMUM} b = Abs(a) y = Softmax(b)", "ReduceMax Sub Abs Softmax"),
        ("float", "m = ReduceMax(x, i1) a = Sub(x, m) y = Softmax(a)", "ReduceMax Sub Softmax"),
        ("float", "m = ReduceMax(x, i2) a = Sub(m, x) y = Softmax(a)", "ReduceMax Sub Softmax"),
        ("float", "b = Abs(x) m = ReduceMax(b, i2) a = Sub(x, m) y = Softmax(a)", "Abs ReduceMax Sub Softmax"),
        ("float16", f"{LESS_MAXIMUM} b = Cast<to=1>(a) y = Softmax(b)", "Cast Softmax"),
        ("double", f"{LESS_MAXIMUM} b = Cast<to=1>(a) y = Softmax(b)", "ReduceMax Sub Cast Softmax"),
    ],
)
def test_a_softmax_subtracts_the_maximum_itself(dtype: str, nodes: str, rest: str) -> None:
    weights = {name: CONSTANTS[name] for name in ("i1", "i2") if f"{name})" in nodes}
    model = parse(f"({dtype}[N,5,8] x) => (y) {{ {nodes} }}", 18, **weights)
    after, _ = apply(model, rules_pass("no_ops", NO_OPS))
    assert ops(after) == rest
    numpy_dtype = {"float": np.float32, "float16": np.float16, "double": np.float64}[dtype]
    assert_same(model, after, (3, 5, 8), numpy_dtype, 2e-3 if dtype == "float16" else 1e-6)


def test_a_concat_along_an_axis_that_its_inputs_lack_is_left_to_the_runtime() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float x) => (float y) { a = Concat<axis=0>(x) y = Abs(a) }'
    after, _ = optimize(onnx.parser.parse_model(text), verify=False)  # onnx's full check refuses the model
    assert ops(after) == "Concat Abs"
