"""Test which residuals and activations a gate of channels takes in once it is channels-last."""

from __future__ import annotations

import pytest
from layout_models import assert_same, attribute, converted, nodes, operators
from test_rules import BORDERS, SIZES, between

SE = "m = GlobalAveragePool (a) s = Conv (m, k3) e = Sigmoid (s) g = Mul (a, e)"


@pytest.mark.parametrize(
    ("body", "operands", "activation", "replaced", "beside"),
    [
        ("r = Add (g, a) b = Relu (r)", "x gate residual", "relu", "grb", {}),
        ("r = Add (x, g) b = LeakyRelu <alpha = 0.2> (r)", "x gate residual", "leaky_relu", "grb", {}),
        ("b = Add (g, a)", "x gate residual", "none", "gb", {}),
        ("b = HardSigmoid (g)", "x gate", "hard_sigmoid", "gb", {}),
        ("q = Sigmoid (g) b = Mul (q, g)", "x gate", "silu", "gqb", {}),
        (
            "r = Add (g, a) q = HardSigmoid <alpha = 0.3> (r) b = Mul (r, q)",
            "x gate residual",
            "scaled_hard_swish",
            "grqb",
            {},
        ),
        ("b = HardSwish (g)", "x gate", "hard_swish", "gb", {}),
        ("q = Sigmoid (g) r = Mul (g, q) b = Add (r, q)", "x gate", "none", "g", {"Sigmoid": 1, "Mul": 1, "Add": 1}),
        ("r = Add (g, a) t = Tanh (r) b = Sub (r, t)", "x gate residual", "none", "gr", {"Tanh": 1, "Sub": 1}),
        ("r = Relu (g) b = Mul (r, r)", "x gate", "relu", "gr", {"Mul": 1}),
        ("r = Add (g, c) b = Relu (r)", "x gate", "none", "g", {"Add": 1, "Relu": 1}),  # a constant is not a residual
    ],
)
def test_what_follows_a_gate(body: str, operands: str, activation: str, replaced: str, beside: dict[str, int]) -> None:
    """Its residual and its activation are computed by its kernel, unless others read what comes before them."""
    constant = ", float[8,1,1] c" if "c)" in body else ""
    model = between(f"{SE} {body}", f"float[8,8,1,1] k3{constant}")
    result = converted(model)
    expected = {"conv_bias_activation": 3, "Transpose": BORDERS, "global_average_pool": 1, "channel_scale": 1}
    assert operators(result) == {**expected, **beside}
    (node,) = nodes(result, "channel_scale")
    assert (attribute(node, "operands"), attribute(node, "activation")) == (operands, activation)
    assert attribute(node, "residual_position") == ("before" if "residual" in operands else None)
    named = set(attribute(node, "attributes").split())
    assert named == {a.name for a in node.attribute} - {"fusion", "operands", "output_types", "attributes"}
    called = {n.op_type for n in result.model.graph.node if n.domain == "onnxfuse"}
    assert {f.name for f in result.model.functions} == called
    record = next(one for one in result.fusing.fused if one.node == node.name)
    assert (sorted(record.replaces), record.output) == (sorted(replaced), replaced[-1])
    assert_same(model, result.model, **SIZES)


def test_a_gate_that_differs_leaves_what_follows_it() -> None:
    model = between(f"{SE} r = Add (g, a) b = Relu (r)", "float[8,8,1,1] k3")
    result = converted(model, exclude={("channel_scale", "b"): 1})
    assert operators(result)["Relu"] == 1 and attribute(nodes(result, "channel_scale")[0], "activation") == "none"
    result = converted(model, exclude={("channel_scale", "r"): 1})
    assert operators(result)["Add"] == 1 and attribute(nodes(result, "channel_scale")[0], "operands") == "x gate"
    assert_same(model, result.model, **SIZES)


def test_a_pointwise_convolution_takes_in_the_gate_that_it_reads() -> None:
    """Its operands are the image and the gate, and its body multiplies them first."""
    model = between(f"{SE} p = Conv (g, k4, c4) b = Add (p, a)", "float[8,8,1,1] k3, float[8,8,1,1] k4, float[8] c4")
    result = converted(model)
    assert operators(result) == {"conv_bias_activation": 4, "Transpose": BORDERS, "global_average_pool": 1}
    node = next(one for one in nodes(result, "conv_bias_activation") if "gate" in attribute(one, "operands"))
    assert attribute(node, "operands") == "x w bias residual gate"
    body = next(f for f in result.model.functions if f.name == node.op_type)
    assert len(body.input) == len(node.input) and set(body.attribute) == {a.name for a in node.attribute}
    record = next(one for one in result.fusing.fused if one.node == node.name)
    assert set(record.replaces) == set("gpb")
    assert_same(model, result.model, **SIZES)


@pytest.mark.parametrize(
    "behind",
    [
        "b = Conv <strides = [2, 2]> (g, k4)",
        "b = Conv <pads = [1, 0, 0, 1]> (g, k4)",
        "p = Conv (g, k4) b = Add (p, g)",
    ],
)
def test_other_convolutions_and_readers_leave_the_gate(behind: str) -> None:
    model = between(f"{SE} {behind}", "float[8,8,1,1] k3, float[8,8,1,1] k4")
    result = converted(model)
    assert len(nodes(result, "channel_scale")) == 1
    assert_same(model, result.model, **SIZES)
