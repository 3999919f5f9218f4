"""BatchNormalization, scales and biases beside linear nodes: which are folded into weights, with the same values."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_models import apply, assert_same, ops, parse, random

from onnxfuse.analysis.shape_inference import infer_shapes
from onnxfuse.ir.serde import read_graph
from onnxfuse.passes.fold_batch_norm import fold_batch_norm
from onnxfuse.passes.folded import Folded


def batch_norm(channels: int, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """Return the scale, bias, mean and variance of a BatchNormalization, called g, h, m and v."""
    return {name: random(channels, dtype=dtype, seed=i) for i, name in enumerate("ghmv")}


CONV = "(float[n,4,7,7] x) => (y) {{ c = Conv{attrs}(x, w{bias}) {after} }}"
BN = "y = BatchNormalization(c, g, h, m, v)"


@pytest.mark.parametrize("opset", [7, 8, 9, 11, 13, 14, 17, 20, 24])
@pytest.mark.parametrize("bias", ["", ", b"])
def test_batch_norm_after_conv(opset: int, bias: str) -> None:
    weights = {"w": random(6, 4, 3, 3), **({"b": random(6)} if bias else {}), **batch_norm(6)}
    model = parse(CONV.format(attrs="<pads=[1,1,1,1]>", bias=bias, after=BN), opset, **weights)
    after, (folded,) = apply(model, fold_batch_norm)
    assert ops(after) == "Conv"
    assert folded == [Folded("batch_norm", "y", "c")]
    assert_same(model, after, (2, 4, 7, 7))


def test_statistics_of_single_elements_are_not_folded() -> None:
    """Before opset 9 an attribute asks for them; for a matrix their number is that of the channels."""
    text = "(float[n,4] x) => (y) { c = Gemm(x, w, b) y = BatchNormalization<spatial=0>(c, g, h, m, v) }"
    model = parse(text, 8, w=random(4, 6), b=random(6), **batch_norm(6))
    assert ops(apply(model, fold_batch_norm)[0]) == "Gemm BatchNormalization"


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_groups(op: str, group: int) -> None:
    shape = (8, 4 // group, 3, 3) if op == "Conv" else (4, 8 // group, 3, 3)
    text = f"(float[n,4,7,7] x) => (y) {{ c = {op}<group={group}>(x, w) {BN} }}"
    model = parse(text, w=random(*shape), **batch_norm(8))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == op
    assert_same(model, after, (2, 4, 7, 7))


@pytest.mark.parametrize("group", [-1, 0, 3])
def test_groups_that_the_weights_do_not_make(group: int) -> None:
    """onnxruntime refuses such a node when it runs, and a branch that is not taken may hold it."""
    text = f"(float[n,4,7,7] x) => (float[] y) {{ c = Conv<group={group}>(x, w) {BN} }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 20]> main {text}')
    weights = {"w": random(8, 4, 3, 3), **batch_norm(8)}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    graph = read_graph(model)
    assert fold_batch_norm(graph, infer_shapes(graph)) == []
    assert [node.op for node in graph.nodes] == ["Conv", "BatchNormalization"]


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_weights_are_rounded_once(dtype: type) -> None:
    name = {"float16": "float16", "float64": "double", "bfloat16": "bfloat16"}[np.dtype(dtype).name]
    text = f"({name}[n,2,3,3] x) => (y) {{ c = Conv(x, w) {BN} }}"
    w, norm = random(3, 2, 1, 1, dtype=dtype), batch_norm(3, dtype)
    after, _ = apply(parse(text, 22, w=w, **norm), fold_batch_norm)
    g, h, m, v = (norm[k].astype(float) for k in "ghmv")
    scale = g / np.sqrt(v + np.float64(np.float32(1e-5)))
    weight, bias = (numpy_helper.to_array(t) for t in after.graph.initializer)
    np.testing.assert_array_equal(weight, (w.astype(float) * scale.reshape(3, 1, 1, 1)).astype(dtype))
    np.testing.assert_array_equal(bias, (h - m * scale).astype(dtype))


@pytest.mark.parametrize(
    ("after", "rest"),
    [
        ("d = Mul(c, s) y = Add(t, d)", "Conv"),
        ("d = Div(c, s) y = Sub(t, d)", "Conv"),
        ("d = Sub(c, t) y = Mul(two, d)", "Conv"),
        ("y = Add(c, t3)", "Conv"),
        ("y = Div(two, c)", "Conv Div"),
        ("y = Add(c, row)", "Conv Add"),
        ("y = Add(c, batch)", "Conv Add"),
        ("y = Add(c, five)", "Conv Add"),
        ("d = Mul(c, s) e = Relu(d) y = Add(e, d)", "Conv Relu Add"),
        ("d = Relu(c) e = Mul(c, s) y = Add(d, e)", "Conv Relu Mul Add"),
        ("y = Mul(c, c)", "Conv Mul"),
    ],
)
def test_scale_and_bias_after_conv(after: str, rest: str) -> None:
    weights = {
        "w": random(6, 4, 2, 2), "s": random(1, 6, 1, 1), "t": random(6, 1, 1, seed=3), "t3": random(1, 6, 1, 1),
        "two": np.float32(2), "row": random(6), "batch": random(2, 1, 1, 1),
        "five": np.ones((1, 1, 1, 1, 1), np.float32),
    }  # fmt: skip
    model = parse(CONV.format(attrs="", bias="", after=after), **weights)
    changed, _ = apply(model, fold_batch_norm)
    assert ops(changed) == rest
    assert_same(model, changed, (2, 4, 7, 7))


@pytest.mark.parametrize(
    ("after", "rest"),
    [
        ("t = Transpose<perm=[0,2,3,1]>(c) d = Mul(t, row) y = Add(row, d)", "Conv Transpose"),
        ("t = Transpose<perm=[0,2,1,3]>(c) y = Sub(t, s)", "Conv Transpose"),
        ("d = Mul(c, two) t = Transpose<perm=[0,2,3,1]>(d) y = Add(t, row)", "Conv Transpose"),
        ("t = Transpose<perm=[0,2,3,1]>(c) y = Add(t, rows)", "Conv Transpose Add"),  # six rows, not channels
        ("t = Transpose<perm=[0,2,3,1]>(c) d = Relu(t) e = Add(t, row) y = Add(d, e)", "Conv Transpose Relu Add Add"),
    ],
)
def test_scale_and_bias_after_a_transpose(after: str, rest: str) -> None:
    """Where a model computes channels-last, the channels are on another axis behind the Transpose."""
    weights = {"w": random(6, 4, 2, 2), "row": random(6), "s": random(1, 6, 1), "two": np.float32(2),
               "rows": random(6, 1, 1)}  # fmt: skip
    model = parse(CONV.format(attrs="", bias="", after=after), **weights)
    changed, _ = apply(model, fold_batch_norm, fold_batch_norm)
    assert ops(changed) == rest
    assert_same(model, changed, (2, 4, 7, 7))


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("c = MatMul(x, w) y = Mul(c, s)", "MatMul"),
        ("c = MatMul(x, w) d = Add(b, c) y = Mul(d, s)", "MatMul Add"),
        ("c = MatMul(x, w) d = Mul(c, s) e = Add(d, b) y = Div(e, s)", "MatMul Add"),
        ("c = MatMul(x, w) y = Add(c, b)", "MatMul Add"),
        ("c = MatMul(x, w) y = Add(c, table)", "MatMul Add"),
        ("c = MatMul(x, w) y = Mul(c, table)", "MatMul Mul"),
        ("c = MatMul(x, w) y = Mul(c, wide)", "MatMul Mul"),
        ("d = Mul(x, k) y = MatMul(d, w)", "MatMul"),
        ("d = Relu(x) e = Mul(d, k) y = MatMul(e, w)", "Relu Mul MatMul"),
    ],
)
def test_matmul(nodes: str, rest: str) -> None:
    weights = {
        "w": random(5, 4), "s": random(4), "b": random(4, seed=2), "table": random(3, 4), "wide": random(1, 1, 1, 4),
        "k": random(5),
    }  # fmt: skip
    model = parse(f"(float[n,3,5] x) => (y) {{ {nodes} }}", **weights)
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == rest
    assert_same(model, after, (2, 3, 5))


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("c", [None, (), (1,), (4,), (1, 4), (2, 4)])
def test_gemm(transposed: int, c: tuple[int, ...] | None) -> None:
    bias = {} if c is None else {"b": random(*c)}
    text = f"""(float[2,5] x) => (y) {{
        p = BatchNormalization(x, g5, h5, m5, v5)
        c = Gemm<transB={transposed}, alpha=0.5, beta=2.0>(p, w{", b" if bias else ""})
        {BN} }}"""
    first = {f"{k}5": v for k, v in batch_norm(5).items()}
    model = parse(text, w=random(4, 5) if transposed else random(5, 4), **bias, **first, **batch_norm(4))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "Gemm"
    assert_same(model, after, (2, 5))


def test_batch_norm_around_matmul() -> None:
    text = "(float[n,5] x) => (y) { p = BatchNormalization(x, g5, h5, m5, v5) c = MatMul(p, w) " + BN + "}"
    model = parse(text, w=random(5, 4), **{f"{k}5": v for k, v in batch_norm(5).items()}, **batch_norm(4))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "MatMul Add"
    assert_same(model, after, (3, 5))


@pytest.mark.parametrize(
    ("op", "attrs", "rest"),
    [
        ("Conv", "", "Relu Conv"),
        ("Conv", '<auto_pad="VALID">', "Relu Conv"),
        ("Conv", "<pads=[1,0,0,0]>", "Relu BatchNormalization Conv"),
        ("Conv", '<auto_pad="SAME_UPPER">', "Relu BatchNormalization Conv"),
        ("ConvTranspose", "", "Relu BatchNormalization ConvTranspose"),
    ],
)
def test_batch_norm_before_a_convolution_folds_only_without_padding(op: str, attrs: str, rest: str) -> None:
    text = f"""(float[n,4,7,7] x) => (y) {{
        r = Relu(x) p = BatchNormalization(r, g, h, m, v) y = {op}{attrs}(p, w) }}"""
    model = parse(text, w=random(4, 4, 3, 3), **batch_norm(4))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == rest
    assert_same(model, after, (2, 4, 7, 7))


def test_with_padding_the_scale_of_an_image_could_fold_but_its_shift_cannot() -> None:
    text = """(float[n,3,7,7] x) => (y) {
        a = Div(x, c255) b = Sub(a, mean) d = Div(b, std) y = Conv<pads=[1,1,1,1]>(d, w) }"""
    model = parse(text, c255=np.float32(255), mean=random(3, 1, 1), std=random(1, 3, 1, 1), w=random(2, 3, 3, 3))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "Div Sub Conv"
    assert_same(model, after, (2, 3, 7, 7))


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("(float[n,4,7,7] x) => (y) {" + "c = Conv(x, w)" + BN + "}", {"v": np.full(6, -1, np.float32)}),
        ("(float[n,4,7,7] x) => (c, y) {" + "c = Conv(x, w)" + BN + "}", {}),
        ("(float[n,4,7,7] x) => (y, z) {" + "c = Conv(x, w)" + BN + "z = Relu(c) }", {}),
        ("(float[n,4,7,7] x, float[6] g) => (y) {" + "c = Conv(x, w)" + BN + "}", {"g": None}),
        ("(float[n,4,7,7] x, float[6,4,1,1] w) => (y) {" + "c = Conv(x, w)" + BN + "}", {"w": None}),
    ],
)
def test_computed_weights_outputs_and_negative_variances_stay(text: str, weights: dict[str, np.ndarray | None]) -> None:
    values = {"w": random(6, 4, 1, 1), **batch_norm(6), **weights}
    model = parse(text, **{k: v for k, v in values.items() if v is not None})
    after, (folded,) = apply(model, fold_batch_norm)
    assert ops(after) == ops(model) and folded == []


def test_a_scale_that_overflows_or_vanishes_in_half_precision_stays() -> None:
    text = "(float16[n,4,7,7] x) => (y) { c = Conv(x, w) y = Mul(c, s) }"
    weights = {"w": random(6, 4, 1, 1, dtype=np.float16), "s": np.array(60000, np.float16)}
    assert ops(apply(parse(text, **weights), fold_batch_norm)[0]) == "Conv Mul"
    weights["s"] = np.array(1e-5, np.float16)
    assert ops(apply(parse(text, **weights), fold_batch_norm)[0]) == "Conv Mul"
    weights["s"] = np.array(2, np.float16)
    assert ops(apply(parse(text, **weights), fold_batch_norm)[0]) == "Conv"


@pytest.mark.parametrize(("scale", "rest"), [(1e36, "MatMul Mul"), (1e30, "MatMul")])
def test_a_scale_with_which_sums_could_overflow_stays(scale: float, rest: str) -> None:
    """A sum of products of 1e36 may pass the largest float32 on the way to a result that does not."""
    weights = {"w": random(10, 12), "s": np.full(12, scale, np.float32)}
    assert (
        ops(apply(parse("(float[n,10] x) => (y) { a = MatMul(x, w) y = Mul(a, s) }", **weights), fold_batch_norm)[0])
        == rest
    )


def test_a_shared_weight_is_stored_twice_only_if_it_is_small() -> None:
    text = "(float[n,{0},4,4] x) => (y) {{ a = Conv(x, w) b = Mul(a, two) c = Conv(x, w) y = Add(b, c) }}"
    for channels, rest in ((8, "Conv Conv Add"), (256, "Conv Mul Conv Add")):
        model = parse(text.format(channels), w=random(channels, channels, 1, 1), two=np.float32(2))
        after, _ = apply(model, fold_batch_norm)
        assert ops(after) == rest
        assert_same(model, after, (1, channels, 4, 4))


def test_casts_around_batch_norm() -> None:
    text = """(float16[n,4,7,7] x) => (y) {
        c = Conv(x, w) d = Cast<to=1>(c) e = BatchNormalization(d, g, h, m, v) y = Cast<to=10>(e) }"""
    model = parse(text, w=random(6, 4, 1, 1, dtype=np.float16), **batch_norm(6))
    after, _ = apply(model, fold_batch_norm)
    assert ops(after) == "Conv"
    assert_same(model, after, (2, 4, 7, 7), np.float16, 3e-3)
    stays_wide = parse(text.replace("e = Batch", "y = Batch").replace("y = Cast<to=10>(e)", ""), w=random(
        6, 4, 1, 1, dtype=np.float16), **batch_norm(6))  # fmt: skip
    assert ops(apply(stays_wide, fold_batch_norm)[0]) == "Conv Cast BatchNormalization"


def test_batch_norm_in_training_mode_stays() -> None:
    text = """(float[n,4,7,7] x) => (y, a, b) {
        c = Conv(x, w) y, a, b = BatchNormalization<training_mode=1>(c, g, h, m, v) }"""
    model = parse(text, 15, w=random(6, 4, 1, 1), **batch_norm(6))
    assert ops(apply(model, fold_batch_norm)[0]) == "Conv BatchNormalization"
