"""What is spelled out is fused with its neighbours, and what is not fused keeps its operator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from exported_models import unpack
from spelled_models import by_onnxruntime, parsed
from test_quantized_rules import with_integers

from onnxfuse import optimize
from onnxfuse.cli import main


def operators(model: onnx.ModelProto) -> list[str]:
    return [f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph.node]


def test_a_sum_goes_to_the_product_and_the_norm_stands_alone() -> None:
    text = """(float[2,5,8] x, float[2,5,8] k) => (float[2,5,8] y, float[2,5,8] s)
    <float[8,8] w, float[8] c, float[8] g, float[8] b>
    { h = MatMul(x, w) [skip] y, , , s = com.microsoft.SkipLayerNormalization(h, k, g, b, c) }"""
    model, report = optimize(parsed(text))
    assert operators(model) == ["onnxfuse::gemm_bias_activation", "onnxfuse::layer_norm"]
    assert report.verified.status == "verified"
    assert [one.replaces for one in report.fused if one.fusion == "layer_norm"] == [("skip",)]


def test_an_operator_stays_that_no_fusion_takes() -> None:
    text = """(float[2,5,8] x, float[2,5,8] z) => (float[2,5,5] y)
    { [product] y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (x, z) }"""
    model, report = optimize(parsed(text))
    assert operators(model) == ["com.microsoft::FusedMatMul"]
    assert [(one.op, one.node) for one in report.stays] == [("com.microsoft::FusedMatMul", "product")]


def test_an_operator_stays_whose_parts_are_fused_in_part() -> None:
    """The sum could be added by the product, but the scale of the norm is computed."""
    text = """(float[2,5,8] x, float[2,5,8] k, float[8] g) => (float[2,5,8] y) <float[8,8] w>
    { h = MatMul(x, w) [skip] y = com.microsoft.SkipLayerNormalization(h, k, g) }"""
    model, report = optimize(parsed(text))
    assert operators(model) == ["MatMul", "com.microsoft::SkipLayerNormalization"]
    (stays,) = report.stays
    assert stays.reason.endswith("'g' is a graph input; required a constant for scale")


def test_an_operator_stays_of_which_an_unknown_output_is_read() -> None:
    text = """(float[2,5,8] x, float[2,5,8] k) => (float[2,5,8] y, float[2,5,1] mean) <float[8] g, float[8] b>
    { y, mean = com.microsoft.SkipLayerNormalization(x, k, g, b) }"""
    model, report = optimize(parsed(text), verify=False)
    assert operators(model) == ["com.microsoft::SkipLayerNormalization"]
    assert [one.reason for one in report.stays] == ["its output 'mean' is read, and the output has no spelling"]


def test_an_operator_stays_that_normalizes_two_axes() -> None:
    text = "(float[2,4,8] x) => (float[2,4,8] y) <float[4,8] g> { y = SimplifiedLayerNormalization <axis = 1> (x, g) }"
    model, report = optimize(parsed(text))
    assert operators(model) == ["SimplifiedLayerNormalization"]
    assert [one.reason for one in report.stays] == ["it normalizes several axes, from axis 1 on"]


def test_a_causal_attention_in_double_precision_stays() -> None:
    text = """(double[2,5,8] x) => (double[2,5,8] y) <double[8,24] w, double[24] b>
    { y = com.microsoft.Attention <num_heads = 2, unidirectional = 1> (x, w, b) }"""
    _, report = optimize(parsed(text))
    assert [one.reason for one in report.stays] == ["no fusion takes its dtype"]
    assert not report.left_out


def test_what_is_left_out_by_name_keeps_its_operator() -> None:
    text = """(float[2,5,8] x, float[2,5,8] k) => (float[2,5,8] y) <float[8] g, float[8] b>
    { y = com.microsoft.SkipLayerNormalization(x, k, g, b) }"""
    assert operators(optimize(parsed(text), only=["softmax"])[0]) == ["com.microsoft::SkipLayerNormalization"]


def test_a_body_has_operators_of_onnxruntime_where_the_model_had_some() -> None:
    nodes = "{ h = MatMul(x, w) b = Add(h, c) y = %s(b) }"
    bodies = {}
    for name in "com.microsoft.Gelu", "Gelu":
        text = f"(float[5,8] x) => (float[5,8] y) <float[8,8] w, float[8] c> {nodes % name}"
        (function,) = optimize(parsed(text, opset=20))[0].functions
        bodies[name] = [f"{node.domain}.{node.op_type}".strip(".") for node in function.node]
    assert "com.microsoft.Gelu" in bodies["com.microsoft.Gelu"]
    assert "Gelu" in bodies["Gelu"]


def test_operators_on_quantized_numbers_are_counted() -> None:
    text = """(float[2,5,32] x) => (float[2,5,8] y) <uint8[128] w, float[8] s, float[32] g, float[32] b>
    {
      h = LayerNormalization(x, g, b)
      y = com.microsoft.MatMulBnb4 <K = 32, N = 8, block_size = 32, quant_type = 1> (h, w, s)
    }"""
    model, report = optimize(parsed(text))
    assert operators(model) == ["onnxfuse::layer_norm", "com.microsoft::MatMulBnb4"]
    assert report.quantized == {"MatMulBnb4": 1}


def test_explain_says_why_an_operator_stays(tmp_path: Path) -> None:
    text = """(float[2,5,8] x, float[2,5,8] k) => (float[2,5,8] y, float[2,5,1] mean) <float[8] g, float[8] b>
    { [skip] y, mean = com.microsoft.SkipLayerNormalization(x, k, g, b) }"""
    onnx.save(parsed(text), tmp_path / "m.onnx")
    said = CliRunner().invoke(main, ["explain", str(tmp_path / "m.onnx"), "--node", "skip"]).output
    assert "com.microsoft::SkipLayerNormalization: 'skip' stays as written" in said
    assert "its output 'mean' is read, and the output has no spelling" in said


def test_explain_finds_an_operator_that_was_fused(tmp_path: Path) -> None:
    text = """(float[2,5,8] x, float[2,5,8] k) => (float[2,5,8] y) <float[8] g, float[8] b>
    { [skip] y = com.microsoft.SkipLayerNormalization(x, k, g, b) }"""
    onnx.save(parsed(text), tmp_path / "m.onnx")
    said = CliRunner().invoke(main, ["explain", str(tmp_path / "m.onnx"), "--node", "skip"]).output
    assert "'skip' is part of the add_layer_norm node" in said.replace("\n", " ")


# --- what onnxruntime's own optimizer writes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("bert_eager_ts_fp32", "bert"),
        ("bert_sdpa_dynamo_fp32", "bert"),
        ("llama_eager_ts_fp32", "gpt2"),
        ("llama_kvcache_sdpa_ts_fp32", "gpt2"),
        ("gpt2_eager_ts_fp32", "gpt2"),
        ("t5_encoder_eager_ts_fp32", "t5"),
        ("clip_text_sdpa_ts_fp32", "clip"),
        ("vit_eager_ts_fp32", "vit"),
        ("unet_ts_fp32", "unet"),
    ],
)
def test_a_model_of_onnxruntimes_optimizer_is_fused_as_the_export_is(name: str, kind: str, tmp_path: Path) -> None:
    export = unpack(f"{name}.onnx", tmp_path)
    made = by_onnxruntime(export, kind)
    assert any(node.domain == "com.microsoft" for node in onnx.load(made).graph.node)
    plain, from_export = optimize(export, verify=False)
    model, report = optimize(made, verify=kind != "unet")  # whose NhwcConv the CPU provider has not
    assert Counter(operators(model)) == Counter(operators(plain))
    assert report.counts == from_export.counts
    assert report.verified.passed is (None if kind == "unet" else True)


@pytest.mark.parametrize(
    "name",
    [
        "bert_eager_dynamo_fp32",
        "clip_text_sdpa_dynamo_fp32",
        "llama_kvcache_sdpa_dynamo_fp32",
        "mobilenetv3_dynamo_fp32",
        "resnet50_dynamo_fp32",
    ],
)
def test_a_model_that_a_session_wrote_is_fused_as_the_export_is(name: str, tmp_path: Path) -> None:
    """Sessions write the model that they have optimized, with FusedMatMul, FusedGemm, FusedConv and others."""
    export, written = unpack(f"{name}.onnx", tmp_path), tmp_path / "written.onnx"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(written)
    onnxruntime.InferenceSession(str(export), options, providers=["CPUExecutionProvider"])
    assert any(node.domain == "com.microsoft" for node in onnx.load(written).graph.node)
    plain, from_export = optimize(export, verify=False)
    model, report = optimize(written)
    assert (report.counts, len(model.graph.node)) == (from_export.counts, len(plain.graph.node))
    assert report.verified.passed and not report.dropped


def test_spellings_are_taken_back_that_onnxruntime_changes() -> None:
    """It merges the two pairs of quantizers that remain once the Cast is removed; the scale of one is lost."""
    model = with_integers(TWO_PAIRS.replace("AGAIN", "j = Cast<to = 1>(d) r = QuantizeLinear(j, t, i)"))
    made, report = optimize(model)
    assert operators(made)[-2:] == ["QLinearMatMul", "DequantizeLinear"]
    assert [(one.fusion, one.node) for one in report.dropped] == [("spelling operators out", "product")]
    assert report.verified.status == "verified"


@pytest.mark.parametrize("again", ["r = QuantizeLinear(d, t, i)", "j = Identity(d) r = QuantizeLinear(j, t, i)"])
def test_an_operator_on_integers_stays_between_two_pairs_of_quantizers(again: str) -> None:
    """onnxruntime would merge them once there is no operator on integers between them."""
    _, report = optimize(with_integers(TWO_PAIRS.replace("AGAIN", again)))
    (stays,) = report.stays
    assert stays.reason.startswith("'r' is quantized, dequantized and quantized again") and not report.dropped


TWO_PAIRS = """(float[16,4] x) => (float[16,4] y)
<float s = {0.5}, float t = {0.1}, int8 i = {-128}, int8[4,4] w, float u = {0.04}, int8 z = {0}, float e = {0.05}>
{ q = QuantizeLinear(x, s, i) d = DequantizeLinear(q, s, i) AGAIN
  [product] p = QLinearMatMul(r, t, i, w, u, z, e, z) y = DequantizeLinear(p, e, z) }"""
