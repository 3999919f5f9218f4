"""`optimize --emit standard` writes ONNX's own operators, which other runtimes know and which fuse again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from exported_models import load_exported, read_index
from onnx import TensorProto
from runtimes import assert_close, run
from sampling import sampled
from test_cli import DONE, error_line
from test_cli import run as run_command
from test_optimize import BLOCK, parse
from test_unfuse import fusions, operators

import onnxfuse
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.protos import nodes, opset_of

LOOP = """g (float[b,8] x, int64 m) => (float[b,8] y) <float[8,8] w, float[8] c, bool go = {1}> {
    y = Loop <body = step (int64 i, bool p, float[b,8] s) => (bool q, float[b,8] t) {
      q = Identity (p)  h = MatMul (s, w)  a = Add (h, c)  g = Sigmoid (a)  r = Mul (a, g)
      t = LayerNormalization (r, c) }> (m, go, x) }"""
SILU = """<ir_version: 8, opset_import: ["" : OPSET]>
    main (float[n,8] x) => (float[n,8] y) { s = Sigmoid (x)  y = Mul (x, s) }"""
GELU = """<ir_version: 8, opset_import: ["" : OPSET]>
    main (float[n,8] x) => (float[n,8] y) <float root = {1.4142135}, float one = {1}, float half = {0.5}>
    { d = Div (x, root)  e = Erf (d)  a = Add (e, one)  p = Mul (x, a)  y = Mul (p, half) }"""


def in_opset(text: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(text.replace("OPSET", str(opset)))


def as_norms(counts: Counter[str]) -> Counter[str]:
    """Count a norm with a lookup of embeddings as the norm: of a Cast between both, the norm's own one may be gone."""
    return counts + Counter(rms_norm=counts["embedding_rms_norm"]) - Counter(embedding_rms_norm=10**6)


@pytest.mark.parametrize("name", sampled(sorted(read_index()), 6))
def test_exported_models(name: str) -> None:
    """The models are equal, and the standard operators fuse as the original does."""
    original = load_exported(name)
    standard, report = onnxfuse.optimize(original, emit="standard")
    assert report.verified.status == "verified"
    assert not report.dropped
    assert not any(node.domain == DOMAIN for node in nodes(standard.graph))
    assert not standard.functions
    onnx.checker.check_model(standard, full_check=True)
    assert fusions(report) == fusions(onnxfuse.optimize(original, layout="nchw", regions=False, verify=False)[1])
    first, second = (onnxfuse.optimize(each, regions=False, verify=False)[1] for each in (original, standard))
    assert as_norms(fusions(second)) == as_norms(fusions(first))


def test_a_llama() -> None:
    standard, report = onnxfuse.optimize(load_exported("llama_sdpa_dynamo_fp32.onnx"), emit="standard", verify=False)
    wanted = {"Attention": 2, "RMSNormalization": 5, "RotaryEmbedding": 4, "Swish": 2}
    assert report.standard.counts == wanted
    found = operators(standard)
    assert {op: found[op] for op in wanted} == wanted
    assert found["Transpose"] == found["Reshape"] - 1 == 0, "but for the positions, heads lie side by side"
    assert found["Expand"] == 2, "each table is expanded once, from the shape of an input"
    assert report.after.launches < report.before.launches / 2


@pytest.mark.parametrize(
    ("text", "opset", "wanted", "op"),
    [(GELU, 17, 23, "Gelu"), (GELU, 23, 23, "Gelu"), (GELU, 24, 24, "Gelu"), (SILU, 7, 24, "Swish")],
)
def test_the_opset_is_the_first_that_has_all_operators(text: str, opset: int, wanted: int, op: str) -> None:
    original = in_opset(text, opset)
    standard, report = onnxfuse.optimize(original, emit="standard")
    assert (opset_of(standard), report.standard.opset, report.input["opset"]) == (wanted, wanted, opset)
    assert standard.ir_version == onnx.helper.find_min_ir_version_for(list(standard.opset_import))
    assert operators(standard) == {op: 1}
    assert report.verified.status == "verified"


@pytest.mark.parametrize("opset", [7, 9, 10])
def test_a_linear_upsample_keeps_its_coordinates(opset: int) -> None:
    """The activation is a Swish, which takes opset 24: the Upsample becomes a Resize that reads the same pixels."""
    text = """<ir_version: 7, opset_import: ["": OPSET]> main (float[1,3,8,8] x) => (float[1,3,16,16] y)
        <float[4] s = {1,1,2,2}> { u = Upsample <mode = "linear"> (x, s)  g = Sigmoid (u)  y = Mul (u, g) }"""
    text = text.replace("Upsample", "Resize") if opset == 10 else text
    if opset == 7:
        text = text.replace('"linear"> (x, s)', '"linear", scales = [1.0, 1.0, 2.0, 2.0]> (x)')
    for verify in (True, False):
        original = in_opset(text, opset)
        standard, report = onnxfuse.optimize(original, emit="standard", verify=verify)
        assert operators(standard) == {"Resize": 1, "Swish": 1}
        assert report.verified.status == ("verified" if verify else "none")
        x = np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32)
        (expected, _), (actual, reason) = (run(each, {"x": x}) for each in (original, standard))
        assert expected is not None and actual is not None, reason
        assert_close(expected, actual, TensorProto.FLOAT)


def test_the_opset_is_only_raised_for_an_operator_that_needs_it() -> None:
    text = """<ir_version: 7, opset_import: ["": 9]> main (float[1,3,8,8] x) => (float[1,3,16,16] y)
        <float[4] s = {1,1,2,2}> { u = Upsample <mode = "linear"> (x, s)  y = Relu (u) }"""
    standard, report = onnxfuse.optimize(onnx.parser.parse_model(text), emit="standard")
    assert (opset_of(standard), operators(standard)) == (9, {"Upsample": 1, "Relu": 1})
    assert report.verified.status == "verified"


def test_the_opset_stays_where_onnxruntime_breaks_the_newer_model() -> None:
    """From opset 21 on it writes a QuantizeLinear of int8 after the Transpose, and gives it a zero point of uint8."""
    text = """<ir_version: 8, opset_import: ["": 20]> main (float[2,3,4] x) => (float[4,3,2] y, float[2,3,4] g)
        <float s = {0.5}, int8 z = {0}> {
          q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)  t = Transpose (d)  y = Relu (t) LAST }"""
    source = onnx.parser.parse_model(text.replace("LAST", "g = Neg (x)"))
    standard, report = onnxfuse.optimize(source, emit="standard")
    assert (opset_of(standard), report.verified.status) == (20, "verified")
    silu = onnx.parser.parse_model(text.replace("LAST", "o = Sigmoid (x)  g = Mul (x, o)"))
    sentence = "raising the opset from 20 to 24 changed the model: onnxruntime's graph optimizations break "
    with pytest.raises(onnxfuse.ModelError, match=sentence):
        onnxfuse.optimize(silu, emit="standard")


def test_operators_on_integers_become_operators_of_onnx() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> main (uint8[2,8] x) => (uint8[2,8] y)
        <float s = {0.05}, uint8 z = {120}> { a = com.microsoft.QLinearAdd (x, s, z, x, s, z, s, z)
          y = com.microsoft.QLinearSigmoid (a, s, z, s, z) }"""
    standard, report = onnxfuse.optimize(onnx.parser.parse_model(text), emit="standard")
    assert operators(standard) == {"DequantizeLinear": 2, "Add": 1, "Sigmoid": 1, "QuantizeLinear": 2}
    assert report.verified.status == "verified"


@pytest.mark.parametrize("opset", [21, 23])
def test_a_quantizer_of_int8_without_a_zero_point_gets_one(opset: int) -> None:
    """onnxruntime makes a QLinearAdd of an Add between quantizers; it would be uint8, and the model refused."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}]> main (int8[2,8] x, int8[2,8] k) => (int8[2,8] y)
        <float s = {{0.05}}, float t = {{0.1}}> {{ d = DequantizeLinear (x, s)  e = DequantizeLinear (k, s)
          a = Sum (d, e)  y = QuantizeLinear <output_dtype = 3> (a, t) }}"""
    source = onnx.parser.parse_model(text)
    standard, _ = onnxfuse.optimize(source, emit="standard", verify=False)
    assert operators(standard) == {"DequantizeLinear": 2, "Add": 1, "QuantizeLinear": 1}
    random = np.random.default_rng(0)
    feeds = {name: random.integers(-128, 128, (2, 8)).astype(np.int8) for name in "xk"}
    (expected, _), (actual, reason) = (run(each, feeds) for each in (source, standard))
    assert expected is not None and actual is not None, reason
    np.testing.assert_array_equal(actual[0], expected[0])
    _, report = onnxfuse.optimize(source)
    assert report.verified.status == "verified" and not report.dropped


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_what_cannot_be_raised_comes_through_where_it_need_not_be(dtype: Literal["float16"] | None) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]>
        main (float[2,3,8,8] x, float[2,4] rois, int64[2] of) => (float[2,3,1,1] y) <float[3,1,1] g = {1, 2, 3}>
        { u = RoiAlign (x, rois, of)  y = LayerNormalization <axis = 1> (u, g) }"""
    inputs = {
        "x": np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32),
        "rois": np.array([[0, 0, 3, 4], [1, 2, 6, 7]], np.float32), "of": np.array([0, 1]),
    }  # fmt: skip
    standard, report = onnxfuse.optimize(onnx.parser.parse_model(text), emit="standard", dtype=dtype, inputs=inputs)
    assert opset_of(standard) == 17
    assert operators(standard)["RoiAlign"] == operators(standard)["LayerNormalization"] == 1
    assert report.verified.status == "verified"


ROIS = {
    "RoiAlign": ("float[2,4] rois, int64[2] of", "RoiAlign <output_height = 2, output_width = 2> (x, rois, of)",
                 {"rois": np.array([[0, 0, 3, 4], [1, 2, 6, 7]], np.float32), "of": np.array([0, 0])}),
    "MaxRoiPool": ("float[2,5] rois", "MaxRoiPool <pooled_shape = [2, 2]> (x, rois)",
                   {"rois": np.array([[0, 0, 0, 3, 4], [0, 1, 2, 6, 7]], np.float32)}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("op", ROIS)
def test_the_opset_is_the_newest_in_which_all_nodes_run(op: str, dtype: Literal["float16"] | None) -> None:
    """onnxruntime has no kernel for regions of interest of opset 22: Gelu of opset 20 is written, and Swish is not."""
    signature, call, rois = ROIS[op]
    text = f"""<ir_version: 8, opset_import: ["": 16]>
        main (float[1,3,8,8] x, {signature}) => (float[2,3,2,2] y, float[2,3,2,2] z)
        <float r = {{0.70710678}}, float one = {{1}}, float half = {{0.5}}> {{ u = {call}
          g = Sigmoid (u)  y = Mul (u, g)
          a = Mul (u, r)  e = Erf (a)  f = Add (e, one)  h = Mul (u, f)  z = Mul (h, half) }}"""
    inputs = {"x": np.random.default_rng(0).standard_normal((1, 3, 8, 8)).astype(np.float32), **rois}
    standard, report = onnxfuse.optimize(onnx.parser.parse_model(text), emit="standard", dtype=dtype, inputs=inputs)
    assert 20 <= opset_of(standard) < 22
    assert {op, "Sigmoid", "Gelu"} <= operators(standard).keys() and not {"Swish", "Erf"} & operators(standard).keys()
    assert [one.reason for one in report.standard.written if not one.operators] == [
        "ONNX has no operator for it in opset 21"
    ]
    assert report.verified.status == "verified"


def test_functions_are_inlined_and_fused_nodes_written() -> None:
    text = """<ir_version: 8, opset_import: ["": 11, "own": 1]> main (float[n,8] x) => (float[n,1] y) { y = own.f (x) }
        <domain: "own", opset_import: ["": 11]> f (a) => (b) { s = ReduceSum <axes = [1]> (a)  b = Erf (s) }"""
    standard, _ = onnxfuse.optimize(onnx.parser.parse_model(text), emit="standard")
    assert operators(standard) == {"ReduceSum": 1, "Erf": 1}
    fused, report = onnxfuse.optimize(load_exported("bert_sdpa_dynamo_fp32.onnx"), verify=False)
    again, second = onnxfuse.optimize(fused, emit="standard")
    assert fusions(second) == fusions(report)
    assert (operators(again)["Attention"], second.verified.status) == (2, "verified")


def test_nodes_in_a_loop() -> None:
    standard, report = onnxfuse.optimize(parse(LOOP), emit="standard")
    found = Counter(node.op_type for node in nodes(standard.graph))
    assert found == {"Loop": 1, "Identity": 1, "Gemm": 1, "Swish": 1, "LayerNormalization": 1}
    assert {(one.fusion, one.where) for one in report.standard.written} == {
        ("gemm_bias_activation", "the body of Loop 'y'"), ("layer_norm", "the body of Loop 'y'"),
    }  # fmt: skip
    assert fusions(onnxfuse.optimize(standard)[1]) == fusions(report)


def test_operators_of_onnxruntime_become_onnx_s() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
        main (float[n,8] x, float[n,8] r) => (float[n,8] y) <float[8] g = {1,2,3,4,5,6,7,8}>
        { a = com.microsoft.Gelu (x)  y = com.microsoft.SkipLayerNormalization (a, r, g) }"""
    standard, report = onnxfuse.optimize(onnx.parser.parse_model(text), emit="standard")
    assert operators(standard) == {"Gelu": 1, "Add": 1, "LayerNormalization": 1}
    assert report.verified.status == "verified"


def test_a_model_whose_weights_are_external(tmp_path: Path) -> None:
    source, weights = load_exported("gpt2_sdpa_ts_fp32.onnx"), {"size_threshold": 100, "location": "weights.bin"}
    onnx.save(source, tmp_path / "m.onnx", save_as_external_data=True, **weights)
    assert run_command("optimize", tmp_path / "m.onnx", tmp_path / "s.onnx", "--emit", "standard").exit_code == DONE
    inputs = {each.name: np.ones((2, 5), np.int64) for each in onnx.load(tmp_path / "s.onnx").graph.input}
    (expected, _), (actual, reason) = (run(onnx.load(tmp_path / name), inputs) for name in ("m.onnx", "s.onnx"))
    assert expected is not None and actual is not None, reason
    assert_close(expected, actual, TensorProto.FLOAT)


def test_the_command(tmp_path: Path) -> None:
    source, target, report = tmp_path / "block.onnx", tmp_path / "standard.onnx", tmp_path / "report.json"
    onnx.save(parse(BLOCK), source)
    result = run_command("optimize", source, target, "--emit", "standard", "--report", report)
    assert (result.exit_code, result.stderr) == (DONE, "")
    printed = " ".join(result.stdout.split())
    assert "Standard operators, in opset 20: 1 LayerNormalization " in printed
    assert "In plain operators: 1 gemm_bias_activation, because ONNX has no operator for it " in printed
    written = json.loads(report.read_text())["standard"]
    assert written == onnxfuse.optimize(source, emit="standard")[1].to_json()["standard"]
    assert (written["opset"], written["counts"]) == (20, {"LayerNormalization": 1})
    assert [one["operators"] for one in written["written"]] in (
        [[], ["LayerNormalization"]],
        [["LayerNormalization"], []],
    )
    for option, what in (
        ("--fallback=ort", "fallback ort"),
        ("--layout=nhwc", "layout nhwc"),
        ("--only=region", "only region"),
    ):
        result = run_command("optimize", source, target, "--overwrite", "--emit", "standard", option)
        sentence = f"emit standard writes no functions, so that {what} has no effect; leave one of the two out"
        assert (result.exit_code != DONE, error_line(result)) == (True, sentence)


def test_a_scale_that_onnxruntime_takes_for_0_is_left_to_an_operator_of_its_own() -> None:
    text = """<ir_version: 8, opset_import: ["" : 20]>
    main (float[2,3,4,8] q, float[2,3,8,4] k, float[2,3,4,8] v) => (float[2,3,4,8] y) <float scale = {1e-40}>
    { s = MatMul (q, k)  t = Mul (s, scale)  p = Softmax <axis = -1> (t)  y = MatMul (p, v) }"""
    model = onnx.parser.parse_model(text)
    standard, report = onnxfuse.optimize(model, emit="standard")
    assert report.verified.status == "verified"
    assert not any(node.op_type == "Attention" for node in nodes(standard.graph))


def test_heads_of_unknown_size_are_not_joined_for_attention() -> None:
    """A Reshape would need a -1 for them, and refuse an empty batch, so that verification took the attention back."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        main (float[n,rows,4,size] q, float[n,3,4,size] k, float[n,4,3,9] v) => (float[n,4,rows,9] y) {
          a = Transpose <perm = [0, 2, 1, 3]> (q)  b = Transpose <perm = [0, 2, 3, 1]> (k)
          s = MatMul (a, b)  p = Softmax <axis = -1> (s)  y = MatMul (p, v) }""")
    standard, report = onnxfuse.optimize(model, emit="standard")
    assert report.verified.status == "verified"
    assert [node.op_type for node in standard.graph.node] == ["Transpose", "Transpose", "Attention"]


def test_keys_of_two_masks_have_no_weight_beside_keys_of_one() -> None:
    """The sum of two masks of the lowest number is -inf, and that of one is finite: it has the weight of its row."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        main (float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v, bool[s,s] past, bool[b,1,1,s] real)
        => (float[b,2,s,8] y) <float zero = {0}, float lowest = {-3.4028235e38}> {
          turned = Transpose <perm = [0, 1, 3, 2]> (k)  scores = MatMul (q, turned)
          causal = Where (past, zero, lowest)  padding = Where (real, zero, lowest)
          once = Add (scores, causal)  twice = Add (once, padding)  p = Softmax <axis = -1> (twice)  y = MatMul (p, v) }
        """)
    standard, _ = onnxfuse.optimize(model, emit="standard", verify=False)
    assert "Attention" in operators(standard)
    random, past = np.random.default_rng(0), np.tri(4, dtype=bool)
    feeds = {name: random.standard_normal((1, 2, 4, 8)).astype(np.float32) for name in "qkv"}
    for real in ([0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]):
        given = {**feeds, "past": past, "real": np.array(real, bool).reshape(1, 1, 1, 4)}
        expected, actual = run(model, given)[0], run(standard, given)[0]
        assert expected is not None and actual is not None
        assert_close(expected, actual, TensorProto.FLOAT)


KEEPS_FIRST_ROW = """<ir_version: 8, opset_import: ["" : 20]>
    main (float[2,3,5,4] x, float[1,4,2] cos, float[1,4,2] sin) => (float[2,3,5,4] y)
    <int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {9223372036854775807},
     int64[1] last = {-1}, int64[4] shape = {1,1,4,2}> {
      token = Slice (x, zero, one, two)  rows = Slice (x, one, end, two)  c = Reshape (cos, shape)
      s = Reshape (sin, shape)  a = Slice (rows, zero, two, last)  b = Slice (rows, two, end, last)
      ac = Mul (a, c)  bs = Mul (b, s)  bc = Mul (b, c)  as = Mul (a, s)  first = Sub (ac, bs)  second = Add (as, bc)
      turned = Concat <axis = -1> (first, second)  y = Concat <axis = 2> (token, turned) }"""


def test_rows_that_are_not_rotated_stay_beside_a_rotary_embedding() -> None:
    """A class token has no position, and the tables have no row for it."""
    standard, report = onnxfuse.optimize(onnx.parser.parse_model(KEEPS_FIRST_ROW), emit="standard")
    assert (report.verified.status, report.counts["rotary_embedding"]) == ("verified", 1)
    assert [node.op_type for node in standard.graph.node].count("RotaryEmbedding") == 1


def test_tables_that_may_have_one_row_for_all_are_not_written_as_a_rotary_embedding() -> None:
    """The operator does not broadcast them, which the products of the model do."""
    unrelated = KEEPS_FIRST_ROW.replace("float[1,4,2]", "float[1,rows,2]").replace("{1,1,4,2}", "{1,1,-1,2}")
    model = onnx.parser.parse_model(unrelated)
    standard, report = onnxfuse.optimize(model, emit="standard", verify=False)
    assert report.counts["rotary_embedding"] == 1
    assert "RotaryEmbedding" not in [node.op_type for node in standard.graph.node]
