"""Test which means and products become the one node that computes a gate, and which convolutions take the gate in."""

from __future__ import annotations

import pytest
from layout_models import assert_same, attribute, converted, nodes, operators
from test_rules import BORDERS, SIZES, between

WEIGHTS = "float[4,8,1,1] k3, float[4] c3, float[8,4,1,1] k4, float[8] c4, float[8,8,1,1] k5, float[8] c5"
MEAN, FIRST, SECOND = "m = GlobalAveragePool (a)", "s = Conv (m, k3, c3) t = Relu (s)", "e = Conv (t, k4, c4)"
GATE = f"{MEAN} {FIRST} {SECOND} g = Sigmoid (e) h = Mul (a, g)"
ONE_NODE = {"conv_bias_activation": 3, "Transpose": BORDERS, "squeeze_excite": 1}
APART = {"conv_bias_activation": 5, "Transpose": BORDERS, "global_average_pool": 1}


def test_a_block_is_two_nodes() -> None:
    """The gate is one node, and the convolution behind it multiplies x by it; the residual is its own as before."""
    model = between(f"{GATE} p = Conv (h, k5, c5) b = Add (p, a)", WEIGHTS)
    result = converted(model)
    assert operators(result) == ONE_NODE
    (gate,) = nodes(result, "squeeze_excite")
    assert attribute(gate, "operands") == "x w bias w_2 bias_2"
    assert (attribute(gate, "activation"), attribute(gate, "activation_2")) == ("relu", "sigmoid")
    product = next(one for one in nodes(result, "conv_bias_activation") if "gate" in attribute(one, "operands"))
    assert attribute(product, "operands") == "x w bias residual gate"
    assert product.input[-1] == gate.output[0] and product.input[0] == gate.input[0]
    for node in (gate, product):
        named = set(attribute(node, "attributes").split())
        assert named == {a.name for a in node.attribute} - {"fusion", "operands", "output_types", "attributes"}
        body = next(f for f in result.model.functions if f.name == node.op_type)
        assert len(body.input) == len(node.input) and set(body.attribute) == {a.name for a in node.attribute}
    called = {n.op_type for n in result.model.graph.node if n.domain == "onnxfuse"}
    assert {f.name for f in result.model.functions} == called
    replaced = {one.node: one.replaces for one in result.fusing.fused}
    assert set(replaced[gate.name]) == set("msteg") and set(replaced[product.name]) == set("hpb")
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize(
    "body",
    [
        f'{GATE} b = Conv <auto_pad = "VALID", kernel_shape = [1, 1]> (h, k5)',
        f"{MEAN} s = Conv (m, k3) {SECOND.replace('t,', 's,')} g = HardSigmoid <alpha = 0.3> (e) h = Mul (g, a)"
        " p = Conv (h, k5, c5) b = Relu (p)",
    ],
)  # fmt: skip
def test_other_spellings(body: str) -> None:
    """Biases and activations may be absent."""
    model = between(body, WEIGHTS)
    result = converted(model)
    assert operators(result) == ONE_NODE
    assert_same(model, result.model, **SIZES)


ROWS = (
    "float[4,8] k3, float[4] c3, float[8,4] k4, float[8] c4, float[8,8,1,1] k5, float[8] c5, float[8,4] j3, "
    "float[4,8] j4, int64[2] space = {2,3}, int64[4] back = {0,8,1,1}"
)
FLAT = "m = ReduceMean <keepdims = 0> (a, space)"
PRODUCTS = "s = Gemm <transB = 1> (f, k3, c3) t = Relu (s) e = Gemm <transB = 1> (t, k4, c4) g = Sigmoid (e)"
BACK = "v = Reshape (g, back) h = Mul (a, v) b = Conv (h, k5)"


@pytest.mark.parametrize(
    ("body", "operands"),
    [
        (f"{MEAN} f = Flatten (m) {PRODUCTS} {BACK}", "x w bias w_2 bias_2"),
        (f"{FLAT.replace('m', 'f', 1)} {PRODUCTS} {BACK}", "x w bias w_2 bias_2"),
        (f"{FLAT} s = MatMul (m, j3) t = Relu (s) e = MatMul (t, j4) o = Add (e, c4) g = HardSigmoid (o) "
         "v = Unsqueeze (g, space) h = Mul (v, a) b = Conv (h, k5)", "x w w_2 bias_2"),
    ],
)  # fmt: skip
def test_products_of_rows(body: str, operands: str) -> None:
    """As torch.nn.Linear makes them; the views between rows and images of one pixel vanish."""
    model = between(body, ROWS)
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 3, "Transpose": BORDERS, "squeeze_excite": 1}
    (gate,) = nodes(result, "squeeze_excite")
    assert attribute(gate, "operands") == operands
    shapes = {each.name: list(each.dims) for each in result.model.graph.initializer}
    assert [shapes[name] for name in gate.input[1:] if len(shapes[name]) == 2] == [[4, 8], [8, 4]]
    assert_same(model, result.model, **SIZES)
    assert_same(model, result.model, n=0, h=6, w=10)


def test_rows_that_are_read_elsewhere_stay() -> None:
    model = between(
        f"{MEAN} f = Flatten (m) {PRODUCTS} {BACK.replace('b =', 'p =')} q = ReduceSum (g) b = Add (p, q)", ROWS
    )
    found = operators(converted(model))
    assert (found["squeeze_excite"], found["gemm_bias_activation"], found["global_average_pool"]) == (0, 2, 1)
    assert_same(model, converted(model).model, **SIZES)


def test_a_mean_without_its_axes_is_a_pool() -> None:
    """As in front of a classifier that Keras exports."""
    model = between(f"{FLAT} v = Unsqueeze (m, space) b = Add (a, v)", "int64[2] space = {2,3}")
    result = converted(model)
    assert operators(result)["global_average_pool"] == 1 and operators(result)["ReduceMean"] == 0
    (pool,) = nodes(result, "global_average_pool")
    assert (attribute(pool, "keepdims"), attribute(pool, "output_ranks")) == (0, [2])
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize(
    ("body", "fused"),
    [
        # The gate has another reader, or is not a number of each channel, or something lies in between.
        (f"{GATE} p = Conv (h, k5) b = Add (p, h)", {**ONE_NODE, "channel_scale": 1}),
        (f"{GATE} q = Relu (h) b = Conv (q, k5)", {**ONE_NODE, "channel_scale": 1}),
        (f"{GATE} b = Conv <strides = [2, 2]> (h, k5)", {**ONE_NODE, "channel_scale": 1}),
        (f"{GATE} b = Conv <pads = [1, 0, 0, 1]> (h, k5)", {**ONE_NODE, "channel_scale": 1}),
        # What lies between mean and gate is read elsewhere, too.
        (f"{MEAN} {FIRST} {SECOND} g = Sigmoid (e) h = Mul (a, g) p = Conv (h, k5) b = Add (p, m)", APART),
        (f"{MEAN} {FIRST} {SECOND} u = Add (e, m) g = Sigmoid (u) h = Mul (a, g) b = Conv (h, k5)", APART),
    ],
)  # fmt: skip
def test_what_stays_apart(body: str, fused: dict[str, int]) -> None:
    model = between(body, WEIGHTS)
    result = converted(model)
    found = operators(result)
    assert {name: found[name] for name in fused} == fused and found["squeeze_excite"] == fused.get("squeeze_excite", 0)
    assert_same(model, result.model, **SIZES)


def test_a_node_that_differs_is_channels_first_and_joins_nothing() -> None:
    model = between(f"{GATE} b = Conv (h, k5)", WEIGHTS)
    found = operators(converted(model, exclude={("layout", "b"): 1}))
    assert found["squeeze_excite"] == 1 and found["Conv"] == 1
    found = operators(converted(model, exclude={("layout", "g"): 1}))
    assert found["squeeze_excite"] == 0
