"""Test `--weights`: which weights are quantized, that the reported error is the error, and the report's sentences."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

import onnxfuse
from onnxfuse.cli import main
from onnxfuse.errors import MissingPackageError, UsageError
from onnxfuse.verify.compare import compare

K, N = 80, 48  # blocks of 32 do not divide K


def model(body: str, dtype: str = "float", **weights: tuple[int, ...]) -> onnx.ModelProto:
    """Return a model of an input x (n, 80) with random weights of these shapes."""
    made = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
        g ({dtype}[n, {K}] x) => ({dtype}[n, m] y) {{ {body} }}""")
    random = np.random.default_rng(0)
    kinds = {"float": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "double": np.float64}
    for name, shape in weights.items():
        values = (random.standard_normal(shape) / K**0.5).astype(kinds[dtype])
        made.graph.initializer.append(numpy_helper.from_array(values, name))
    return made


def run(source: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


class TestWithTheQuantizer:
    """What needs onnx_ir."""

    @pytest.fixture(autouse=True)
    def needs_onnx_ir(self) -> None:
        pytest.importorskip("onnx_ir", reason="needs pip install onnx-ir")

    @pytest.mark.parametrize(("weights", "error"), [("int4", 0.2), ("int8", 0.01)])
    @pytest.mark.parametrize("dtype", ["float", "float16"])
    def test_products_are_close_to_those_of_floats(self, weights: str, error: float, dtype: str) -> None:
        source = model("h = MatMul(x, w)  t = Tanh(h)  y = MatMul(t, v)", dtype, w=(K, N), v=(N, 32))
        made, report = onnxfuse.optimize(source, weights=weights)
        assert report.verified.status == "verified" and report.weights is not None
        found = report.weights
        assert (found.nodes, found.stays) == (2, ()) and found.bytes_after < found.bytes_before
        assert not any(tensor.name in "wv" for tensor in made.graph.initializer)
        x = np.random.default_rng(1).standard_normal((7, K)).astype(np.float32 if dtype == "float" else np.float16)
        old, new = (run(each, x).astype(np.float64) for each in (source, made))
        (told,) = found.errors
        assert 0 < np.abs(old - new).max() <= error * np.abs(old).max() and 0 < told.max_rel <= error
        assert told.max_abs / told.max_rel == pytest.approx(np.abs(old).max(), rel=0.5)
        accepted = compare(source, made)
        assert accepted.status == "verified" and accepted.outputs[0].tolerance == 2 * told.max_rel
        assert accepted.outputs[0].set_by == "twice the error that quantizing was reported with"

    def test_a_turned_weight_is_quantized_once(self) -> None:
        body = "t = Transpose<perm = [1, 0]>(w)  a = MatMul(x, t)  b = Exp(x)  c = MatMul(b, t)  y = Sub(a, c)"
        source = model(body, w=(N, K))
        made, report = onnxfuse.optimize(source, weights="int8", verify=False)
        assert report.weights is not None and report.weights.nodes == 2 and report.weights.errors == ()
        assert sorted(each.name for each in made.graph.initializer if each.name.startswith("t_")) == ["t_Q", "t_scales"]
        assert "w" not in {each.name for each in made.graph.initializer}
        x = np.random.default_rng(1).standard_normal((3, K)).astype(np.float32)
        assert np.abs(run(source, x) - run(made, x)).max() <= 0.01 * np.abs(run(source, x)).max()

    def test_bfloat16_stays_bfloat16(self) -> None:
        made, report = onnxfuse.optimize(model("y = MatMul(x, w)", "bfloat16", w=(K, N)), weights="int4")
        scales = next(each for each in made.graph.initializer if each.name == "w_scales")
        assert scales.data_type == onnx.TensorProto.BFLOAT16 and report.weights is not None
        (told,) = report.weights.errors
        assert 0 < told.max_rel < 0.2, "measured in float32, because onnxruntime's CPU provider has no such product"

    def test_what_stays_is_named_with_reasons(self, tmp_path: Path) -> None:
        body = """small = MatMul(x, s)  deep = MatMul(small, d)  flat = Reshape(deep, shape)  g = Gemm(flat, w)
            h = MatMul(g, v)  z = Gemm(h, w)  turned = Transpose(z)  y = MatMul(z, turned)"""
        source = model(body, s=(K, 16), d=(1, 16, K), w=(K, K), v=(K, K))
        source.graph.initializer.append(numpy_helper.from_array(np.array([-1, K]), "shape"))
        onnx.save(source, tmp_path / "a.onnx")
        words = ["optimize", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "--weights", "int8"]
        result = CliRunner().invoke(main, [*words, "--report", str(tmp_path / "r.json")])
        assert result.exit_code == 0, result.output
        said = " ".join(result.stdout.split())
        assert "Weights: 1 product in int8, blocks of 32, 25.6 KB -> " in said
        assert "MatMul 'small' stays: its weight is smaller than a block of 32" in said
        assert "MatMul 'deep' stays: its weight has 3 axes" in said
        assert "2 Gemm stay, first 'g': only weights of MatMuls are quantized" in said
        assert "'y' is off from the float model by" in said
        found = json.loads((tmp_path / "r.json").read_text())["weights"]
        assert found["dtype"] == "int8" and [each["nodes"] for each in found["stays"]] == [
            ["small"],
            ["deep"],
            ["g", "z"],
        ]
        assert found["errors"][0]["max_rel"] > 0
        assert onnx.load(tmp_path / "a.onnx") == source

    def test_external_weights_are_read_and_the_file_stays(self, tmp_path: Path) -> None:
        source = model("h = MatMul(x, w)  y = Softmax(h)", w=(K, N))
        path = tmp_path / "a.onnx"
        onnx.save(source, path, save_as_external_data=True, location="a.data", size_threshold=0)
        made, report = onnxfuse.optimize(path, weights="int4")
        assert report.verified.status == "verified" and report.weights is not None and report.weights.errors
        assert [each.data_location for each in made.graph.initializer] == [0, 0]

    def test_a_model_without_weights_to_quantize(self, tmp_path: Path) -> None:
        onnx.save(model("y = Tanh(x)"), tmp_path / "a.onnx")
        with pytest.raises(UsageError, match=r"'.*a\.onnx' has no MatMul whose weight can be quantized$"):
            onnxfuse.optimize(tmp_path / "a.onnx", weights="int4")
        with pytest.raises(UsageError, match=r"no MatMul whose weight can be quantized \(1 Gemm: only weights"):
            onnxfuse.optimize(model("y = Gemm(x, w)", w=(K, N)), weights="int4")
        with pytest.raises(UsageError, match="its weight is float64"):
            onnxfuse.optimize(model("y = MatMul(x, w)", "double", w=(K, N)), weights="int4")

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("y = If (c) <then_branch = a () => (p) { p = MatMul(x, w) }, else_branch = e () => (q) { q = Tanh(x) }>",
             "1 MatMul: it is in a branch or a body"),
            ("y = If (c) <then_branch = a () => (p) { p = Gemm(x, w) }, else_branch = e () => (q) { q = Exp(x) }>",
             "1 Gemm: only weights of MatMuls are quantized"),
            ("y = f.product(x, w)", "1 product: it is a function of the model, and the weights that it reads"),
            ("y = MatMul(x, v)", "1 MatMul: its weight is an input of the model, too, so that callers can override it"),
            ("t = f.Transpose(w)  y = MatMul(x, t)", "the model has no MatMul whose weight can be quantized$"),
            ("t = f.Transpose()  y = MatMul(x, t)", "the model has no MatMul whose weight can be quantized$"),
        ],
    )  # fmt: skip
    def test_weights_that_stay_have_reasons(self, text: str, reason: str) -> None:
        source = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20, "f" : 1]>
            g (float[n, 80] x, bool c, float[80, 80] v, float[80, 80] z) => (float[n, m] y) {{ {text} }}
            <opset_import: ["" : 20], domain: "f"> product (a, b) => (r) {{ r = MatMul(a, b) }}""")
        source.graph.initializer.extend(
            numpy_helper.from_array(np.ones((K, K), np.float32), name) for name in ("w", "v") if f"{name})" in text
        )
        with pytest.raises(UsageError, match=reason):
            onnxfuse.optimize(source, weights="int8", verify=False)

    @pytest.mark.parametrize("transposed", [False, True])
    def test_weights_in_constant_nodes_are_quantized(self, transposed: bool) -> None:
        source = model("t = Transpose(c)  y = MatMul(x, t)" if transposed else "y = MatMul(x, c)")
        values = np.random.default_rng(0).standard_normal((N, K) if transposed else (K, N)).astype(np.float32)
        constant = onnx.helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(values))
        source.graph.node.insert(0, constant)
        made, report = onnxfuse.optimize(source, weights="int8", emit="standard")
        assert report.verified.status == "verified" and report.weights is not None and report.weights.nodes == 1
        assert [node.op_type for node in made.graph.node] == ["MatMulNBits"]

    def test_weights_that_are_inputs_before_ir_version_4(self) -> None:
        source = model("y = MatMul(x, w)", w=(K, N))
        source.ir_version, source.opset_import[0].version = 3, 8
        source.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [K, N]))
        made, report = onnxfuse.optimize(source, weights="int8")
        assert report.verified.status == "verified" and [each.name for each in made.graph.input] == ["x"]

    def test_names_of_branches_are_not_taken(self) -> None:
        source = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
            g (float[n, {K}] x, bool c) => (float[n, m] y) {{
            h = MatMul(x, w)
            y = If (c) <then_branch = a () => (w_Q) {{ w_Q = Exp(h) }}, else_branch = e () => (q) {{ q = Neg(h) }}>
            }}""")
        source.graph.initializer.append(numpy_helper.from_array(np.ones((K, N), np.float32), "w"))
        made, report = onnxfuse.optimize(source, weights="int8")
        assert report.verified.status == "verified" and "w_Q_" in {each.name for each in made.graph.initializer}

    def test_the_quantizer_logs_nothing(self) -> None:
        handlers = logging.getLogger().handlers[:]
        onnxfuse.optimize(model("y = MatMul(x, w)", w=(K, N)), weights="int4", verify=False)
        assert logging.getLogger().handlers == handlers and logging.getLogger().level == logging.WARNING


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    monkeypatch.delitem(sys.modules, "onnxruntime.quantization.matmul_nbits_quantizer", raising=False)
    with pytest.raises(MissingPackageError, match="needs the package onnx_ir; pip install onnx-ir"):
        onnxfuse.optimize(model("y = MatMul(x, w)", w=(K, N)), weights="int4")


def test_steps_that_do_not_go_together(tmp_path: Path) -> None:
    source = model("y = MatMul(x, w)", w=(K, N))
    with pytest.raises(UsageError, match="dtype and weights are two steps"):
        onnxfuse.optimize(source, weights="int4", dtype="float16")
    with pytest.raises(UsageError, match="save the model that weights gives, and make a plan of that"):
        onnxfuse.optimize(source, weights="int4", plan=tmp_path / "plan.json")
    with pytest.raises(UsageError, match="weights is 'int4' or 'int8', not 'int2'"):
        onnxfuse.optimize(source, weights="int2")  # type: ignore[arg-type]
