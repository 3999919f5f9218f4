"""Activations that are written in several operators: which become one, with the same values, and which stay."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx_models import apply, assert_same, ops, parse, random

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.graph import Graph
from onnxfuse.passes.fold_constants import fold_constants
from onnxfuse.passes.remove_no_ops import remove_no_ops
from onnxfuse.rewrite.apply_rules import rules_pass
from onnxfuse.rules.activations import ACTIVATIONS


def recognize_activations(graph: Graph, shapes: ShapeInfo) -> int:
    """Apply the rules, and fold what they compute of weights."""
    count = rules_pass("activations", ACTIVATIONS)(graph, shapes)
    fold_constants(graph, shapes)
    remove_no_ops(graph, shapes)
    return count


HEADER = "(float[N,3,h,w] x) => (y)"
KERNEL = random(4, 3, 1, 1) - np.float32(0.8)
SLOPES = random(4, 1, 1) - np.float32(0.9)


def numbers(dtype: type = np.float32) -> dict[str, np.ndarray]:
    named = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "six": 6, "sixth": 1 / 6, "half": 0.5, "fifth": 0.2}
    return {name: np.array(value, dtype) for name, value in named.items()} | {"slopes": SLOPES.astype(dtype)}


def check(nodes: str, rest: str, tol: float = 2e-6, opset: int = 13) -> onnx.ModelProto:
    """Assert which operators stand behind the Conv after the pass, and that the values stay the same."""
    used = {name: value for name, value in {"k": KERNEL, **numbers()}.items() if name in nodes or name == "k"}
    before = parse(f"{HEADER} {{ c = Conv(x, k) {nodes} }}", opset, **used)
    after, (count,) = apply(before, recognize_activations)
    assert ops(after) == f"Conv {rest}"
    assert bool(count) == (ops(after) != ops(before))
    assert_same(before, after, (2, 3, 7, 5), tol=tol)
    return after


def attributes(model: onnx.ModelProto, op: str) -> dict[str, float]:
    (node,) = (node for node in model.graph.node if node.op_type == op)
    return {each.name: round(each.f, 6) for each in node.attribute}


@pytest.mark.parametrize(
    ("nodes", "alpha", "beta"),
    [
        ("m = Mul(c, fifth) a = Add(half, m) g = Clip(a, zero, one) y = Mul(g, c)", 0.2, 0.5),
        ("m = Div(c, six) a = Add(m, half) g = Clip(a, zero, one) y = Mul(c, g)", 1 / 6, 0.5),
        ("a = Add(c, three) m = Mul(sixth, a) g = Clip(a2, zero, one) y = Mul(c, g)".replace("a2", "m"), 1 / 6, 0.5),
        ("a = Add(c, two) g = Clip(a, zero, four) m = Mul(c, g) y = Div(m, four)", 0.25, 0.5),
        ("a = Add(c, two) g = Clip(a, zero, four) m = Div(c, four) y = Mul(m, g)", 0.25, 0.5),
        ("a = Add(c, two) g = Clip(a, zero, four) m = Div(g, four) y = Mul(m, c)", 0.25, 0.5),
        ("a = Add(c, three) r = Relu(a) g = Min(six, r) m = Mul(c, g) y = Div(m, six)", 1 / 6, 0.5),
    ],
)
def test_the_gate_of_a_hard_swish(nodes: str, alpha: float, beta: float) -> None:
    found = attributes(check(nodes, "HardSigmoid Mul"), "HardSigmoid")
    assert found == pytest.approx({"alpha": alpha, "beta": beta}, abs=1e-6)


def test_a_hard_sigmoid_alone() -> None:
    after = check("a = Add(c, three) g = Clip(a, zero, six) y = Mul(g, sixth)", "HardSigmoid")
    assert attributes(after, "HardSigmoid") == pytest.approx({"alpha": 1 / 6, "beta": 0.5}, abs=1e-6)


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        # A sum and a factor with one reader are folded into the convolution.
        ("m = Mul(c, fifth) a = Add(half, m) y = Clip(a, zero, one)", "Mul Add Clip"),
        # Patterns know ONNX's HardSwish in this form.
        ("a = Add(c, three) g = Clip(a, zero, six) m = Mul(c, g) y = Div(m, six)", "Add Clip Mul Div"),
        # 4 / 6 is left, the Clip begins elsewhere, or has no top.
        ("a = Add(c, two) g = Clip(a, zero, four) m = Mul(c, g) y = Div(m, six)", "Add Clip Mul Div"),
        ("a = Add(c, two) g = Clip(a, half, four) m = Mul(c, g) y = Div(m, four)", "Add Clip Mul Div"),
        ("a = Add(c, two) g = Clip(a, zero) m = Mul(c, g) y = Div(m, four)", "Add Clip Mul Div"),
        # The sum is read elsewhere.
        ("a = Add(c, two) g = Clip(a, zero, four) m = Mul(a, g) y = Div(m, four)", "Add Clip Mul Div"),
    ],
)
def test_what_stays(nodes: str, rest: str) -> None:
    check(nodes, rest)


def test_a_sixth_of_another_dtype_counts_within_its_rounding() -> None:
    """0.1667 is a sixth in float16, where it is the nearest number, and not in float32."""
    for dtype, rest in ((np.float16, "Conv HardSigmoid"), (np.float32, "Conv Add Clip Mul")):
        used = {**numbers(dtype), "k": KERNEL.astype(dtype), "sixth": np.array(0.1667, dtype)}
        used = {name: used[name] for name in ("k", "three", "zero", "six", "sixth")}
        kind = "float16" if dtype is np.float16 else "float"
        text = f"({kind}[N,3,h,w] x) => (y) {{ c = Conv(x, k) a = Add(c, three) g = Clip(a, zero, six)"
        before = parse(f"{text} y = Mul(g, sixth) }}", 13, **used)
        after, _ = apply(before, recognize_activations)
        assert ops(after) == rest
        assert_same(before, after, (2, 3, 7, 5), dtype, tol=2e-3)


def test_a_hard_sigmoid_of_an_input_stays() -> None:
    before = parse("(float[N] x) => (y) { a = Add(x, three) g = Clip(a, zero, six) y = Div(g, six) }", 13,
                   **{name: numbers()[name] for name in ("three", "zero", "six")})  # fmt: skip
    after, _ = apply(before, recognize_activations)
    assert ops(after) == "Add Clip Div"


@pytest.mark.parametrize(
    "nodes",
    [
        "p = Relu(c) n = Neg(c) r = Relu(n) m = Mul(r, slopes) y = Sub(p, m)",
        "p = Relu(c) n = Neg(c) r = Relu(n) o = Mul(r, slopes) m = Mul(o, half) y = Add(m, p)",
        "p = Relu(c) n = Abs(c) r = Sub(c, n) m = Mul(slopes, r) o = Mul(m, half) y = Add(p, o)",
        "p = Relu(c) n = Abs(c) r = Sub(c, n) m = Div(r, two) o = Mul(m, slopes) y = Sub(p, o)",
    ],
)
def test_slopes_written_out(nodes: str) -> None:
    check(nodes, "PRelu")


def test_one_slope_is_a_leaky_relu() -> None:
    assert attributes(check("y = PRelu(c, fifth)", "LeakyRelu"), "LeakyRelu") == {"alpha": 0.2}
    check("p = Relu(c) n = Neg(c) r = Relu(n) m = Mul(r, fifth) y = Sub(p, m)", "PRelu")  # the next round does the rest


@pytest.mark.parametrize(
    ("nodes", "rest"),
    [
        ("p = Relu(c) n = Neg(x) r = Relu(n) m = Mul(r, fifth) y = Sub(p, m)", None),  # of another tensor
        ("p = Relu(c) n = Neg(c) r = Relu(n) m = Mul(r, fifth) y = Sub(m, p)", "Relu Neg Relu Mul Sub"),
        ("p = Relu(c) n = Neg(c) r = Relu(n) m = Add(r, fifth) y = Sub(p, m)", "Relu Neg Relu Add Sub"),
        ("p = Relu(c) n = Abs(c) r = Sub(n, c) m = Mul(r, fifth) y = Add(p, m)", "Relu Abs Sub Mul Add"),
        ("p = Relu(c) n = Neg(c) r = Relu(n) m = Mul(r, wide) y = Sub(p, m)", "Relu Neg Relu Mul Sub"),
    ],
)
def test_other_sums_stay(nodes: str, rest: str | None) -> None:
    """`wide` adds an axis to x, which slopes must not."""
    kernel = KERNEL if rest else random(3, 3, 1, 1)
    used = {"k": kernel, "fifth": np.array(0.2, np.float32), "wide": random(2, 1, 4, 1, 1)}
    used = {name: value for name, value in used.items() if name in nodes or name == "k"}
    before = parse(f"{HEADER} {{ c = Conv(x, k) {nodes} }}", 13, **used)
    after, (count,) = apply(before, recognize_activations)
    assert count == 0 and ops(after) == ops(before)
    assert rest is None or ops(after) == f"Conv {rest}"


@pytest.mark.parametrize(
    ("opset", "nodes", "rest"),
    [
        (22, "a = Add(c, two) g = Clip(a, zero, four) m = Mul(c, g) y = Div(m, four)", "HardSigmoid Mul"),
        (22, "d = Div(c, six) b = Add(d, half) g = Clip(b, zero, one) y = Mul(c, g)", "HardSigmoid Mul"),
        (21, "a = Add(c, two) g = Clip(a, zero, four) m = Mul(c, g) y = Div(m, four)", "Add Clip Mul Div"),
        (16, "y = PRelu(c, half)", "LeakyRelu"),
        (16, "r = Relu(c) n = Neg(c) p = Relu(n) m = Mul(p, slopes) y = Sub(r, m)", "PRelu"),
    ],
)
def test_in_bfloat16(opset: int, nodes: str, rest: str) -> None:
    """Where the opset has the operator in bfloat16; onnxruntime has no CPU kernels to compare values with."""
    given = {"k": KERNEL.reshape(4, 3).T, **numbers()}
    used = {name: array.astype(ml_dtypes.bfloat16) for name, array in given.items() if name in nodes or name == "k"}
    before = parse(f"(bfloat16[N,4,2,3] x) => (y) {{ c = MatMul(x, k) {nodes} }}", opset, **used)
    after, _ = apply(before, recognize_activations)
    assert ops(after) == f"MatMul {rest}"
