"""Test `--dtype int8 --calibrate` and float8: what is quantized and fused, the reported errors, and refusals."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

import onnxfuse
from onnxfuse.cli import main
from onnxfuse.errors import UsageError
from onnxfuse.ir.dtypes import Array

IMAGE, TOKENS = (3, 16, 10, 10), (3, 6, 16)  # shapes of one sample
CONVS = """(float[batch,16,10,10] x) => (float[batch,16] y)
<float[16,16,3,3] w1, float[16] scale, float[16] shift, float[16] mean, float[16] var, float[16,16,1,1] w2,
 float[16] b2, float[16,16] w3, float[16] b3>
{
  c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
  n1 = BatchNormalization (c1, scale, shift, mean, var)
  r1 = Relu (n1)
  c2 = Conv (r1, w2, b2)
  s = Add (c2, x)
  r2 = Relu (s)
  p = GlobalAveragePool (r2)
  f = Flatten (p)
  y = Gemm (f, w3, b3)
}"""
LAYER = """(float[batch,6,16] x) => (float[batch,6,16] y)
<float[16,16] wq, float[16,16] wk, float[16,16] wv, float[16,16] wo, float[16,32] w1, float[32] b1, float[32,16] w2,
 float[16] scale, float[16] shift, float root = {4}>
{
  q = MatMul (x, wq)
  k = MatMul (x, wk)
  v = MatMul (x, wv)
  t = Transpose <perm = [0, 2, 1]> (k)
  m = MatMul (q, t)
  d = Div (m, root)
  p = Softmax (d)
  a = MatMul (p, v)
  o = MatMul (a, wo)
  s = Add (o, x)
  n = LayerNormalization (s, scale, shift)
  u1 = MatMul (n, w1)
  u = Add (u1, b1)
  e = Relu (u)
  w = MatMul (e, w2)
  y = Add (w, n)
}"""


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    """Return a model with random weights for all inputs after the first."""
    made = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')
    random = np.random.default_rng(0)
    weights = [value for value in made.graph.value_info if value.type.tensor_type.HasField("shape")]
    known = {each.name for each in made.graph.initializer}
    for each in weights:
        shape = [dim.dim_value for dim in each.type.tensor_type.shape.dim]
        if each.name not in known and shape:
            values = random.standard_normal(shape) / np.prod(shape[1:], initial=1.0) ** 0.5
            values = np.abs(values) if each.name == "var" else values
            made.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), each.name))
    del made.graph.value_info[:]
    return made


def samples(shape: tuple[int, ...], count: int = 4) -> Array:
    return np.random.default_rng(1).standard_normal((count, *shape)).astype(np.float32)


def run(source: onnx.ModelProto, x: Array) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x})
    return np.asarray(found)


def error(source: onnx.ModelProto, made: onnx.ModelProto, data: Array) -> float:
    """Return the largest error over the samples, relative to each one's largest value."""
    pairs = [(run(source, x), run(made, x)) for x in data]
    return max(float(np.abs(old - new).max() / np.abs(old).max()) for old, new in pairs)


@pytest.mark.parametrize(
    ("text", "shape", "counts"),
    [
        (CONVS, IMAGE, {"quantized_conv": 2, "quantized_gemm": 1}),
        (LAYER, TOKENS, {"quantized_gemm": 4, "attention": 1}),
    ],
    ids=["convolutions", "transformer"],
)
@pytest.mark.parametrize(("dtype", "read"), [("int8", "uint8"), ("float8", "float8")])
def test_a_model_is_quantized_and_fused(
    text: str, shape: tuple[int, ...], counts: dict[str, int], dtype: Any, read: str
) -> None:
    source, data = model(text), samples(shape)
    made, report = onnxfuse.optimize(source, dtype=dtype, calibrate={"x": data})
    assert report.verified.status == "verified" and source == model(text)
    assert {name: report.counts.get(name, 0) for name in counts} == counts
    found = report.weights
    assert found is not None and (found.dtype, found.activations) == (dtype, read)
    assert found.nodes == sum(count for name, count in counts.items() if name.startswith("quantized"))
    assert not found.stays
    assert found.bytes_after < found.bytes_before
    (told,) = found.errors
    assert found.note == "these errors are those of samples that gave the ranges; other inputs may be off by more"
    assert 0 < told.max_rel < (0.05 if dtype == "int8" else 0.1) and told.max_rel == pytest.approx(
        error(source, made, data), rel=1e-3
    )


@pytest.mark.parametrize("dtype", ["int8", "float8"])
@pytest.mark.parametrize(("text", "shape"), [(CONVS, IMAGE), (LAYER, TOKENS)], ids=["convolutions", "transformer"])
def test_a_second_step_converts_the_other_layers(text: str, shape: tuple[int, ...], dtype: Any) -> None:
    """Layers of 8 bits stay as they are, and what is between them becomes float16."""
    made, first = onnxfuse.optimize(model(text), dtype=dtype, calibrate={"x": samples(shape)}, verify=False)
    half, report = onnxfuse.optimize(made, dtype="float16")
    assert report.verified.status == "verified" and report.half is not None
    quantized = {name: count for name, count in first.counts.items() if name.startswith("quantized")}
    assert {name: report.counts.get(name) for name in quantized} == quantized
    assert error(made, half, samples(shape)) < 0.05  # numbers next to ties move by a step


SHORTCUT = """(float[batch,16,10,10] x) => (float[batch,16,5,5] y)
<float[16,16,3,3] w1, float[16,16,1,1] w2, float[16,16,1,1] w3, float[16,16,1,1] w4>
{
  c1 = Conv <pads = [1, 1, 1, 1]> (x, w1)
  r1 = Relu (c1)
  p = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (r1)
  c2 = Conv (p, w2)
  c3 = Conv (p, w3)
  s = Add (c2, c3)
  r2 = Relu (s)
  y = Conv (r2, w4)
}"""


def test_a_second_step_stores_no_float32_between_layers() -> None:
    """Quantizers read float32 in an epilogue; a shortcut is stored in float16, and a MaxPool reads uint8."""
    made, _ = onnxfuse.optimize(model(SHORTCUT), dtype="int8", calibrate={"x": samples(IMAGE)})
    half, report = onnxfuse.optimize(made, dtype="float16")
    assert report.verified.status == "verified" and error(made, half, samples(IMAGE)) < 0.05
    types = {
        each.name: each.type.tensor_type.elem_type for each in onnx.shape_inference.infer_shapes(half).graph.value_info
    }
    stored = Counter(types[name] for node in half.graph.node[:-1] for name in node.output if name in types)
    assert stored == {onnx.TensorProto.UINT8: 4, onnx.TensorProto.FLOAT16: 1, onnx.TensorProto.FLOAT: 1}  # y's pixels
    (pool,) = (node for node in half.graph.node if node.op_type.startswith("max_pool"))
    assert types[pool.input[0]] == onnx.TensorProto.UINT8
    programs = [each.s.decode() for node in half.graph.node for each in node.attribute if each.name == "program"]
    assert ["Cast" in each for each in programs if "Quantize" in each and "Add" not in each] == [False, False]


BRANCHES = """(float[batch,16,10,10] x) => (float[batch,16,5,5] y)
<float[16,16,3,3] w1, float[16,16,1,1] w2, float zero = {0}>
{
  c = Conv <pads = [1, 1, 1, 1]> (x, w1)
  p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (c)
  d = Conv (p, w2)
  m = ReduceMax <keepdims = 0> (x)
  is_above = Greater (m, zero)
  b = If (is_above) <then_branch = one () => (float[batch,16,5,5] r) { r = Neg (p) },
    else_branch = two () => (float[batch,16,5,5] s) { s = Exp (p) }>
  y = Add (d, b)
}"""


def test_a_branch_reads_a_pool_that_is_not_quantized() -> None:
    source, data = model(BRANCHES), samples(IMAGE)
    made, report = onnxfuse.optimize(source, dtype="int8", calibrate={"x": data})
    assert report.verified.status == "verified" and error(source, made, data) < 0.05


def test_onnxruntime_optimizes_float8_without_changing_results() -> None:
    """By default it removes a Relu before a quantizer to float8, as if 0 were the lowest number."""
    made, report = onnxfuse.optimize(model(LAYER), dtype="float8", calibrate={"x": samples(TOKENS)})
    (x, *_), notes = samples(TOKENS), report.verified.notes
    assert len(notes) == 1 and notes[0].startswith(
        "onnxruntime's graph optimizations change output 'y' of the original"
    )
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": x})[0], run(made, x), atol=1e-4)


def test_float_tensors_are_those_of_attention_and_of_sums() -> None:
    """Between convolutions and products there are integers; BatchNormalization is folded first."""
    made, _ = onnxfuse.optimize(model(CONVS), dtype="int8", calibrate={"x": samples(IMAGE)}, verify=False)
    calls = Counter(node.op_type.partition("__")[0] for node in made.graph.node)
    assert calls["BatchNormalization"] == calls["DequantizeLinear"] == calls["Add"] == calls["Relu"] == 0
    types = {
        each.name: each.type.tensor_type.elem_type for each in onnx.shape_inference.infer_shapes(made).graph.value_info
    }
    convolutions = [node for node in made.graph.node if "conv" in node.op_type]
    assert len(convolutions) == 2 and {types[node.input[0]] for node in convolutions} == {onnx.TensorProto.UINT8}


@pytest.mark.parametrize(
    "kind", ["no names", "names of others", "opset 11", "constants", "Transposes", "external", "fused"]
)
def test_other_spellings_are_quantized_alike(kind: str, tmp_path: Path) -> None:
    text = CONVS if kind == "opset 11" else LAYER
    source = model(text, 11 if kind == "opset 11" else 17)
    data = samples(IMAGE if text == CONVS else TOKENS)
    graph = source.graph
    given: Any = source
    for node in graph.node:
        node.name = "" if kind == "no names" else node.output[0]
    weight = next(each for each in graph.initializer if each.name in ("w1", "w3"))
    if kind == "names of others":
        graph.node[0].name, graph.node[1].name = "", graph.node[0].output[0]
    elif kind == "constants":
        graph.node.insert(0, onnx.helper.make_node("Constant", [], [weight.name], "", value=weight))
        graph.initializer.remove(weight)
    elif kind == "Transposes":
        graph.node.insert(0, onnx.helper.make_node("Transpose", ["turned"], [weight.name], "turn", perm=[1, 0]))
        weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).T.copy(), "turned"))
    elif kind == "external":
        given = tmp_path / "a.onnx"
        onnx.save(source, given, save_as_external_data=True, location="a.data", size_threshold=0)
        source = onnx.load(given)
    elif kind == "fused":
        given, _ = onnxfuse.optimize(source)
    made, report = onnxfuse.optimize(given, dtype="int8", calibrate={"x": data})
    assert report.verified.status == "verified" and report.weights is not None
    assert (report.weights.nodes, report.weights.stays) == (3 if text == CONVS else 4, ())
    assert error(source, made, data) < 0.05


def test_what_stays_is_named_with_reasons() -> None:
    source = model("""(float[3,6,16] x, bool c) => (float[3,6,16] y)
        <float[16,16] w, float[1,16,16] deep, float[16,16] b>
        { h = MatMul (x, w)
          d = MatMul (h, deep)
          y = If (c) <then_branch = a () => (p) { p = MatMul (d, b) }, else_branch = e () => (q) { q = Tanh (d) }> }""")
    data = {"x": samples(TOKENS, 2), "c": np.array([True, False])}
    _, report = onnxfuse.optimize(source, dtype="int8", calibrate=data)
    assert report.verified.status == "verified" and report.weights is not None
    assert {(each.op, each.reason) for each in report.weights.stays} == {
        ("MatMul", "its weight has 3 axes"), ("MatMul", "it is in a branch or a body"),
    }  # fmt: skip
    assert report.weights.nodes == 1


def test_no_more_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    for name in [each for each in sys.modules if each.startswith("onnxruntime.quantization")]:
        monkeypatch.delitem(sys.modules, name)
    _, report = onnxfuse.optimize(model(CONVS), dtype="int8", calibrate={"x": samples(IMAGE)}, verify=False)
    assert report.weights is not None and (report.weights.nodes, report.weights.errors) == (3, ())


@pytest.mark.parametrize("count", [0, 3])
def test_the_command_reads_samples_or_one(count: int, tmp_path: Path) -> None:
    onnx.save(model(CONVS), tmp_path / "a.onnx")
    np.savez(tmp_path / "x.npz", x=samples(IMAGE, count) if count else samples(IMAGE, 1)[0])
    words = ["optimize", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "--dtype", "int8"]
    result = CliRunner().invoke(
        main, [*words, "--calibrate", str(tmp_path / "x.npz"), "--report", str(tmp_path / "r.json")]
    )
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "Weights: 3 products and convolutions in int8, one scale per channel, 11.3 KB -> " in said
    assert "they read uint8" in said and "'y' is off from the float model by" in said
    found = json.loads((tmp_path / "r.json").read_text())["weights"]
    assert found["activations"] == "uint8" and found["errors"][0]["max_rel"] > 0
    assert (tmp_path / "b.onnx").exists()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"z": samples(IMAGE)}, r"^the data has no input 'x'; known: z$"),
        ({"x": samples(IMAGE), "z": samples(IMAGE)}, "^the model has no input 'z'"),
        ({"x": samples(IMAGE[1:])[0]}, "^input 'x' has 3 dims; the model takes 4"),
        ({"x": samples((3, 4, 10, 10))}, "^input 'x' has shape 3 x 4 x 10 x 10; the model takes batch x 16 x 10 x 10"),
        ({"x": samples(IMAGE).astype(np.float64)}, "^input 'x' is float64; the model takes float32"),
        ({"x": samples(IMAGE, 0)}, "^the data needs the same number of samples, at least 1, for each input; found 0"),
    ],
)
def test_data_that_do_not_fit_are_refused(arrays: dict[str, Array], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxfuse.optimize(model(CONVS), dtype="int8", calibrate=arrays)


def test_inputs_need_as_many_samples_as_each_other() -> None:
    source = model(
        "(float[n,16] x, float[n,16] z) => (float[n,16] y) <float[16,16] w> { s = Add (x, z) y = MatMul (s, w) }"
    )
    with pytest.raises(UsageError, match=r"for each input; found 2 for 'x', 3 for 'z'$"):
        onnxfuse.optimize(source, dtype="int8", calibrate={"x": samples((1, 16), 2), "z": samples((1, 16), 3)})


def test_models_without_such_weights_are_refused() -> None:
    half = model("(float16[n,16] x) => (float16[n,16] y) { y = MatMul (x, w) }")
    half.graph.initializer.append(numpy_helper.from_array(np.ones((16, 16), np.float16), "w"))
    reason = "its weight is float16, so that it has to be exported in float32 first"
    with pytest.raises(
        UsageError, match=rf"no Conv, Gemm or MatMul whose weight can be quantized \(1 MatMul: {reason}"
    ):
        onnxfuse.optimize(half, dtype="int8", calibrate={"x": samples((1, 16)).astype(np.float16)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype int8 takes the ranges of tensors from inputs; give calibrate, an .npz file"),
        ({"dtype": "float8"}, "dtype float8 takes the ranges of tensors from inputs; give calibrate, an .npz file"),
        ({"calibrate": {}}, "calibrate gives the ranges of tensors for dtype int8 or float8"),
        ({"calibrate": {}, "dtype": "float16"}, "calibrate gives the ranges of tensors for dtype int8 or float8"),
        ({"calibrate": {}, "dtype": "int8", "weights": "int4"}, "dtype and weights are two steps"),
        ({"calibrate": {}, "dtype": "int8", "plan": "p.json"}, "save the model that dtype gives, and make a plan"),
        ({"calibrate": {}, "dtype": "int8", "io": "half"}, "io is for half precision"),
        ({"calibrate": "none.npz", "dtype": "int8"}, "'none.npz' does not exist; expected an .npz file"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        onnxfuse.optimize(model(CONVS), **options)
