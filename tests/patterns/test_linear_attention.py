"""Linear attention and causal convolutions of both domains: what is fused, and what is inferred of it."""

from __future__ import annotations

import onnx.parser
import pytest

from onnxfuse import optimize

RULES = {
    "linear": ("", "q, k, v, s"),
    "gated": ("{t}[b,l,2] g, ", "q, k, v, s, g"),
    "delta": ("{t}[b,l,1] r, ", "q, k, v, s, , r"),
    "gated_delta": ("{t}[b,l,8] g, {t}[b,l,2] r, ", "q, k, v, , g, r"),
}
HEADS = "q_num_heads = 2, kv_num_heads = 2"


def model(rule: str, domain: str, dtype: str) -> onnx.ModelProto:
    """Return the operator of a rule, whose results and states are negated."""
    inputs, names = RULES[rule]
    state = f"{dtype}[b,2,4,3] s" if " s" in names else f"{dtype}[b,2,4,3] unused"
    opset = 27 if not domain else 17
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "com.microsoft" : 1]> main '
        f"({dtype}[b,l,8] q, {dtype}[b,l,8] k, {dtype}[b,l,6] v, {inputs.format(t=dtype)}{state}) "
        f"=> ({dtype}[b,l,6] y, {dtype}[b,2,4,3] t) "
        f'{{ c, p = {domain}LinearAttention <update_rule = "{rule}", {HEADS}> ({names}) y = Neg(c) t = Neg(p) }}'
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("domain", ["", "com.microsoft."])
@pytest.mark.parametrize("dtype", ["float", "float16", "bfloat16"])
def test_every_rule(rule: str, domain: str, dtype: str) -> None:
    """The operators after it are a region, which takes their shapes and dtypes."""
    _, report = optimize(model(rule, domain, dtype))
    assert report.counts == {"linear_attention": 1, "region": 1}
    assert report.verified.passed and not report.dropped


@pytest.mark.parametrize("domain", ["", "com.microsoft."])
def test_half_precision(domain: str) -> None:
    made, report = optimize(model("gated_delta", domain, "float"), dtype="float16")
    (node,) = [each for each in made.graph.node if each.op_type == "linear_attention"]
    (dtypes,) = [each.ints for each in node.attribute if each.name == "output_types"]
    assert list(dtypes) == [onnx.TensorProto.FLOAT16] * 2 and report.verified.passed
