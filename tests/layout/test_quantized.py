"""Test convolutions and products of integers of 8 bits: layouts of images and weights, and what joins their nodes."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from layout_models import assert_same, attribute, converted, nodes, operators, parse
from onnx import TensorProto, numpy_helper

from onnxfuse import unfuse
from onnxfuse.fuse_model import FusedModel
from onnxfuse.layout import products

STEP = 0.02  # one step of an output, as a share of its largest value: onnxruntime's integer operators round otherwise
SCALES = "float s = {0.05}, uint8 z = {120}, float t = {0.01}"


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    """Return random weights that are the same in every run, because later weights multiply differences of one step."""
    return np.random.default_rng([seed, *shape]).integers(-127, 128, shape).astype(np.int8)


def programs(result: FusedModel, fusion: str) -> list[list[str]]:
    """Return the operators of the programs of a fusion's nodes, with Q and D for quantizers."""
    short = {"QuantizeLinear": "Q", "DequantizeLinear": "D"}
    found = (attribute(node, "program") for node in nodes(result, fusion))
    names = [[op for op, *_ in json.loads(each)["ops"]] if each else [] for each in found]
    return [[short.get(op, op) for op in ops if op != "Constant"] for ops in names]


def inside(result: FusedModel) -> set[int]:
    """Return the dtypes of all tensors that fused nodes of convolutions read and compute as images."""
    read = {node.input[0] for node in nodes(result, "quantized_conv")}
    types = {info.name: info.type.tensor_type.elem_type for info in result.model.graph.value_info}
    return {types[name] for name in read}


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_bottleneck_reads_and_writes_integers(axes: int) -> None:
    """The stem, both sides of a residual, and a depthwise convolution; weights have their channels last."""
    ones, taps, pads = ([n] * axes for n in (1, 3, 1))
    lists = {"PADS": pads * 2, "SPATIAL": "dhw"[-axes:], "OTHER": "pqr"[:axes]}
    text = f"""(float[n,3,SPATIAL] x) => (float[n,8,OTHER] y) <{SCALES}, float[8] b, float[8] each>
    {{ xq = QuantizeLinear (x, s, z) xd = DequantizeLinear (xq, s, z) wd = DequantizeLinear (w, t)
       a = Conv <pads = [PADS]> (xd, wd, b) aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z)
       vd = DequantizeLinear <axis = 0> (v, each) c = Conv <pads = [PADS], group = 8> (ad, vd) d = Relu (c)
       dq = QuantizeLinear (d, s, z) dd = DequantizeLinear (dq, s, z) ud = DequantizeLinear (u, t)
       e = Conv (dd, ud) eq = QuantizeLinear (e, s, z) ed = DequantizeLinear (eq, s, z) f = Add (ed, ad)
       g = Relu (f) gq = QuantizeLinear (g, s, z) y = DequantizeLinear (gq, s, z) }}"""
    for name, values in lists.items():
        text = text.replace(name, ",".join(map(str, values)))
    model = parse(text, w=integers(8, 3, *taps), v=integers(8, 1, *taps), u=integers(8, 8, *ones))
    result = converted(model, regions=True)
    first = "QuantizeLinear" if axes == 2 else "region"  # a stem of two axes reads x channels-first
    assert operators(result) == Counter(["region", first, *["quantized_conv"] * 3])
    assert programs(result, "quantized_conv") == [["Q"], ["Relu", "Q"], ["D", "Q", "D", "Add", "Relu", "Q"]]
    assert inside(result) == {TensorProto.UINT8}
    shapes = {t.name: tuple(t.dims) for t in result.model.graph.initializer}
    weights = [(8, *taps, 3), (8, *taps, 1), (8, *ones, 8)]
    assert [shapes[node.input[3]] for node in nodes(result, "quantized_conv")] == weights
    assert_same(model, result.model, STEP, **dict(zip("n" + "dhw"[-axes:], (2, 4, 6, 5), strict=False)))


def test_both_convolutions_before_a_sum_write_integers() -> None:
    text = f"""(float[n,8,h,w] x) => (float[n,8,h,w] y) <{SCALES}>
    {{ q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) ud = DequantizeLinear (u, t)
       vd = DequantizeLinear (v, t) a = Conv (d, ud) aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z)
       b = Conv (d, vd) bq = QuantizeLinear (b, s, z) bd = DequantizeLinear (bq, s, z)
       c = Add (ad, bd) cq = QuantizeLinear (c, s, z) y = DequantizeLinear (cq, s, z) }}"""
    model = parse(text, u=integers(8, 8, 1, 1), v=integers(8, 8, 1, 1, seed=1))
    result = converted(model, regions=True)
    assert sorted(programs(result, "quantized_conv")) == [["Q"], ["Q", "D", "D", "Add", "Q"]]
    assert_same(model, result.model, STEP, n=2, h=3, w=5)


def test_a_convolution_before_a_concat_writes_integers() -> None:
    """A Concat cannot join the convolution; its quantizer can."""
    text = f"""(float[n,8,h,w] x) => (float[n,16,h,w] y) <{SCALES}>
    {{ q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) ud = DequantizeLinear (u, t)
       a = Conv (d, ud) r = Relu (a) aq = QuantizeLinear (r, s, z) ad = DequantizeLinear (aq, s, z)
       c = Concat <axis = 1> (ad, d) vd = DequantizeLinear (v, t) y = Conv (c, vd) }}"""
    model = parse(text, u=integers(8, 8, 1, 1), v=integers(16, 16, 1, 1))
    result = converted(model, regions=True)
    assert programs(result, "quantized_conv") == [["Relu", "Q"]]
    assert_same(model, result.model, STEP, n=2, h=3, w=5)


def test_sums_of_integers_are_scaled_by_channels() -> None:
    text = """(float[n,8,h,w] x) => (float[n,8,h,w] y) <float[8,1,1] t, int8 zero = {0}>
    { q, s, z = DynamicQuantizeLinear (x) a = ConvInteger <pads = [1,1,1,1]> (q, w, z, zero) c = Cast <to = 1> (a)
      d = Mul (s, t) y = Mul (c, d) }"""
    model = parse(text, w=integers(8, 8, 3, 3))
    result = converted(model)
    (node,) = nodes(result, "quantized_conv")
    assert (attribute(node, "multiplied"), attribute(node, "layout")) == ("channels", "nhwc")
    assert_same(model, result.model, n=2, h=5, w=6)


def test_a_pool_of_integers_is_channels_last() -> None:
    text = f"""(float[n,8,h,w] x) => (float[n,8,p,q] y) <{SCALES}>
    {{ xq = QuantizeLinear (x, s, z) d = DequantizeLinear (xq, s, z) ud = DequantizeLinear (u, t)
       a = Conv (d, ud) aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z)
       m = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (ad) mq = QuantizeLinear (m, s, z)
       md = DequantizeLinear (mq, s, z) y = Conv (md, ud) }}"""
    model = parse(text, u=integers(8, 8, 1, 1))
    result = converted(model, regions=True)
    assert programs(result, "quantized_conv") == [["Q"], []]
    (pool,) = nodes(result, "max_pool")
    assert attribute(pool, "output_types") == [TensorProto.UINT8]
    assert operators(result)["Transpose"] == 1  # of the output
    assert_same(model, result.model, STEP, n=2, h=7, w=9)


@pytest.mark.parametrize(
    ("fusion", "operator"),
    [
        ("average_pool", "AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (ad)"),
        ("global_average_pool", "GlobalAveragePool (ad)"),
        ("resize", 'Resize <mode = "linear"> (ad, , scales)'),
        ("resize", 'Resize <mode = "nearest"> (ad, , scales)'),
    ],
)
@pytest.mark.parametrize("reads", ["", "b = Relu (ad)"])
def test_a_node_between_quantizers_reads_and_writes_integers(fusion: str, operator: str, reads: str) -> None:
    """Its kernel dequantizes x, and the convolution before it writes integers, also if others read the numbers."""
    text = f"""(float[n,8,h,w] x) => (float[n,8,p,q] y{", float[n,8,h,w] b" * bool(reads)})
    <{SCALES}, float u = {{0.07}}, uint8 v = {{3}}, float[4] scales = {{1, 1, 2, 2}}>
    {{ xq = QuantizeLinear (x, s, z) d = DequantizeLinear (xq, s, z) kd = DequantizeLinear (k, t)
       a = Conv (d, kd) aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z) {reads}
       m = {operator} mq = QuantizeLinear (m, u, v) md = DequantizeLinear (mq, u, v) y = Conv (md, kd) }}"""
    model = parse(text, k=integers(8, 8, 1, 1))
    result = converted(model, regions=True)
    (node,) = nodes(result, fusion)
    assert attribute(node, "output_types") == [TensorProto.UINT8]
    assert attribute(node, "operands") == "x x_scale x_zero_point y_scale y_zero_point"
    assert programs(result, "quantized_conv")[0][:1] == ["Q"]
    assert_same(model, result.model, STEP, n=2, h=7, w=9)


def test_a_pool_between_quantizers_of_two_dtypes_stays_apart() -> None:
    """Kernels take one dtype."""
    text = f"""(float[n,8,h,w] x) => (float[n,8,p,q] y) <{SCALES}, int8 v = {{3}}>
    {{ xq = QuantizeLinear (x, s, z) d = DequantizeLinear (xq, s, z) kd = DequantizeLinear (k, t)
       a = Conv (d, kd) aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z)
       m = AveragePool <kernel_shape = [2, 2]> (ad) mq = QuantizeLinear (m, s, v) md = DequantizeLinear (mq, s, v)
       y = Conv (md, kd) }}"""
    (node,) = nodes(converted(parse(text, k=integers(8, 8, 1, 1)), regions=True), "average_pool")
    assert attribute(node, "operands") == "x"


def test_what_narrows_a_result_joins_before_a_split() -> None:
    """The region then reads float16 in place of float32."""
    text = f"""(float16[n,8,h,w] x) => (float16[n,4,h,w] y, uint8[n,4,h,w] z1) <{SCALES}>
    {{ f = Cast <to = 1> (x) xq = QuantizeLinear (f, s, z) d = DequantizeLinear (xq, s, z)
       kd = DequantizeLinear (k, t) a = Conv (d, kd) b = Cast <to = 10> (a) c = Sigmoid (b) e = Mul (b, c)
       y, g = Split <axis = 1, num_outputs = 2> (e) h1 = Cast <to = 1> (g) z1 = QuantizeLinear (h1, s, z) }}"""
    result = converted(parse(text, k=integers(8, 8, 1, 1)), regions=True)
    assert programs(result, "quantized_conv") == [["Cast", "Sigmoid", "Mul"]]


PRODUCT = "q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) wd = DequantizeLinear (w, t) a = MatMul (d, wd)"


def weights_of(result: FusedModel) -> dict[str, tuple[int, ...]]:
    return {t.name: tuple(t.dims) for t in result.model.graph.initializer if len(t.dims) == 2}


def test_products_store_a_shared_weight_once_by_rows() -> None:
    text = f"(float[n,8] x) => (float[n,8] y) <{SCALES}> {{ {PRODUCT} b = Tanh (a) c = MatMul (d, wd) y = Add (b, c) }}"
    model = parse(text, w=integers(8, 8))
    result = converted(model)
    assert [attribute(node, "weight_layout") for node in nodes(result, "quantized_gemm")] == ["nk"]  # equal products
    assert weights_of(result) == {"w/nk": (8, 8), "w/nk/sums": (1, 8)}
    assert_same(model, result.model, n=5)


@pytest.mark.parametrize(
    ("attributes", "rows"),
    [
        ("pads = [1, 2, 0, 1]", 2 * 3 * 1 * 2),
        ("pads = [0, 0, 0, 0]", 1),
        ('auto_pad = "SAME_UPPER"', 0),
        ("group = 2", 0),
    ],
)
def test_sums_of_weights_are_stored_once_for_each_range_of_taps(attributes: str, rows: int) -> None:
    """A kernel multiplies them by the zero point of x; no body reads them, and unfusing drops them."""
    text = f"""(float[n,16,h,w] x) => (float[n,8,p,q] y) <{SCALES}>
    {{ q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) kd = DequantizeLinear (k, t)
       y = Conv <{attributes}> (d, kd) }}"""
    model = parse(text, k=integers(8, 8 if "group" in attributes else 16, 3, 3))
    result = converted(model)
    (conv,) = nodes(result, "quantized_conv")
    operands = attribute(conv, "operands").split()
    assert ("w_sums" in operands) is (rows > 0) and len(operands) == len(conv.input)
    if rows:
        stored = {t.name: numpy_helper.to_array(t) for t in result.model.graph.initializer}
        sums, weights = (stored[conv.input[operands.index(name)]] for name in ("w_sums", "w"))
        assert sums.shape == (rows, 8) and (sums[0] == weights.astype(int).sum((1, 2, 3))).all()
        assert not any(each.name.endswith("sums") for each in unfuse(result.model)[0].graph.initializer)
    assert_same(model, result.model, STEP, n=2, h=5, w=6)


def test_sums_of_many_ranges_of_taps_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number grows with the fourth power of the pads, beyond the size of the weights."""
    monkeypatch.setattr(products, "MAX_ROWS", 15)
    text = f"""(float[n,16,h,w] x) => (float[n,8,p,q] y) <{SCALES}>
    {{ q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) kd = DequantizeLinear (k, t)
       y = Conv <pads = [1, 1, 1, 1]> (d, kd) }}"""
    model = parse(text, k=integers(8, 16, 3, 3))
    (conv,) = nodes(converted(model), "quantized_conv")
    assert "w_sums" not in attribute(conv, "operands").split()


def test_a_weight_that_an_embedding_reads_stays_as_it_is() -> None:
    """It would be stored twice."""
    text = f"""(int64[n] i, float[n,8] x) => (float[n,6] y, float[n,6] e) <{SCALES}>
    {{ {PRODUCT} y = Relu (a) e = Gather (wd, i) }}"""
    model = parse(text, w=integers(8, 6))
    result = converted(model)
    assert [attribute(node, "weight_layout") for node in nodes(result, "quantized_gemm")] == ["kn"]
    assert weights_of(result) == {"w": (8, 6)}
    assert_same(model, result.model, n=5)


def test_a_product_in_a_loop_is_fused() -> None:
    text = f"""(float[3,8] x) => (float[3,8] y) <int64 count = {{4}}, bool yes = {{1}}, {SCALES}>
    {{ y = Loop (count, yes, x) <body = step (int64 i, bool on, float[3,8] x) => (bool on_, float[3,8] r)
       {{ {PRODUCT} on_ = Identity (on) r = Tanh (a) }}> }}"""
    model = parse(text, w=integers(8, 8))
    result = converted(model)
    (loop,) = nodes(result, "Loop")
    body = next(each.g for each in loop.attribute if each.name == "body")
    (product,) = (node for node in body.node if attribute(node, "fusion") == "quantized_gemm")
    assert product.op_type in {function.name for function in result.model.functions}
    assert_same(model, result.model)


def test_rows_of_the_stored_weight_are_columns_of_the_model() -> None:
    text = f"(float[n,8] x) => (float[n,6] y) <{SCALES}> {{ {PRODUCT} y = Relu (a) }}"
    weight = integers(8, 6)
    result = converted(parse(text, w=weight))
    stored = next(each for each in result.model.graph.initializer if each.name == "w/nk")
    np.testing.assert_array_equal(numpy_helper.to_array(stored), weight.T)
    assert result.layout.originals == {"w/nk": ("w", (1, 0))}


def test_each_sum_dequantizes_a_value_that_several_add() -> None:
    """As in a DenseNet: the copies of a DequantizeLinear join the convolutions before the sums."""
    text = f"""(float[n,8,h,w] x) => (float[n,8,h,w] y) <{SCALES}>
    {{ xq = QuantizeLinear (x, s, z) d = DequantizeLinear (xq, s, z) ud = DequantizeLinear (u, t)
       a = Conv (d, ud) aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z) b = Add (ad, d)
       bq = QuantizeLinear (b, s, z) bd = DequantizeLinear (bq, s, z) vd = DequantizeLinear (v, t) c = Conv (bd, vd)
       cq = QuantizeLinear (c, s, z) cd = DequantizeLinear (cq, s, z) e = Add (cd, d) eq = QuantizeLinear (e, s, z)
       ed = DequantizeLinear (eq, s, z) y = Conv (ed, ud) }}"""
    model = parse(text, u=integers(8, 8, 1, 1), v=integers(8, 8, 1, 1, seed=1))
    result = converted(model, regions=True)
    assert not result.left_out
    sums = ["D", "Q", "D", "Add", "Q"], ["Q", "D", "D", "Add", "Q"], []
    assert tuple(programs(result, "quantized_conv")) == sums
    first, second, _ = nodes(result, "quantized_conv")
    assert first.input[0] == first.input[-1] == second.input[-1]
    assert_same(model, result.model, STEP, n=2, h=3, w=5)


def test_a_norm_reads_the_integers_of_a_product() -> None:
    text = f"""(float[n,8] x) => (float[n,8] y) <{SCALES}, float[8] g, float[8] b> {{ {PRODUCT}
    aq = QuantizeLinear (a, s, z) ad = DequantizeLinear (aq, s, z) y = LayerNormalization (ad, g, b) }}"""
    model = parse(text, w=integers(8, 8))
    result = converted(model, regions=True)
    assert programs(result, "quantized_gemm") == [["Q"]]
    (norm,) = programs(result, "region")
    assert norm[:2] == ["D", "ReduceMean"]
    assert_same(model, result.model, STEP, n=5)
