"""Test `--reference`: the errors of a quantized model beside the float model, as it came and optimized."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

import onnxfuse
from onnxfuse.cli import main

STEP, W_STEP = 0.05, 0.01
FLOAT = (
    """<ir_version: 8, opset_import: ["" : 17]> g (float[n,8] x) => (float[n,4] y) { m = MatMul (x, w) y = Relu (m) }"""
)
QUANTIZED = f"""<ir_version: 8, opset_import: ["" : 17]> g (float[n,8] x) => (float[n,4] y)
    <float s = {{{STEP}}}, uint8 z = {{128}}, float t = {{{W_STEP}}}> {{
      q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) e = DequantizeLinear (k, t)
      m = MatMul (d, e) y = Relu (m) }}"""


def models() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return a quantized model and its float model."""
    weight = np.random.default_rng(0).uniform(-1, 1, (8, 4)).astype(np.float32)
    steps = np.rint(weight / W_STEP).astype(np.int8)
    quantized, reference = onnx.parser.parse_model(QUANTIZED), onnx.parser.parse_model(FLOAT)
    quantized.graph.initializer.append(numpy_helper.from_array(steps, "k"))
    reference.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return quantized, reference


def outputs(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    (y,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    return np.asarray(y)


def test_the_errors_of_both_models_are_told() -> None:
    quantized, reference = models()
    x = np.random.default_rng(1).uniform(-6, 6, (5, 8)).astype(np.float32)
    made, report = onnxfuse.optimize(quantized, reference=reference, inputs={"x": x}, shapes=["x:5x8"])
    right = outputs(reference, x)
    beside = report.reference
    assert beside is not None and beside.name == "the reference"
    assert "quantized_gemm" in report.counts
    for model, (error,) in ((quantized, beside.before), (made, beside.after)):
        expected = np.abs(outputs(model, x) - right).max()
        assert error.name == "y" and expected > STEP / 10
        assert error.max_abs >= 0.99 * expected  # at other sizes, other inputs are drawn
        assert 0.99 * expected / np.abs(right).max() <= error.max_rel < 0.1
    assert report.to_json()["reference"]["after"][0]["name"] == "y"


def test_the_command_prints_the_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # long paths would break lines
    quantized, reference = models()
    paths = [Path(name) for name in ("int8.onnx", "float.onnx", "out.onnx", "r.json")]
    onnx.save(quantized, paths[0])
    onnx.save(reference, paths[1])
    words = ["optimize", str(paths[0]), str(paths[2]), "--reference", str(paths[1]), "--report", str(paths[3])]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert (
        "Beside 'float.onnx', off by this share of the largest value, as it came and optimized" in text
        and "'y': " in text
    )
    told = json.loads(paths[3].read_text())["reference"]
    assert told["name"] == str(paths[1]) and 0 < told["before"][0]["max_rel"] < 0.1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verify": False}, "the reference is run in verification, which is switched off"),
        ({"dtype": "float16"}, "float16 is compared with the model itself; leave the reference out"),
        ({"weights": "int8"}, "int8 is compared with the model itself; leave the reference out"),
    ],
)
def test_a_reference_that_would_not_be_used_is_refused(options: dict, said: str) -> None:
    quantized, reference = models()
    with pytest.raises(onnxfuse.UsageError, match=said):
        onnxfuse.optimize(quantized, reference=reference, **options)


@pytest.mark.parametrize(("old", "new", "what"), [("x", "v", "inputs"), ("y", "v", "outputs")])
def test_a_reference_of_other_names_is_refused(old: str, new: str, what: str) -> None:
    quantized, reference = models()
    text = FLOAT.replace(f" {old})", f" {new})").replace(f"({old},", f"({new},").replace(f" {old} =", f" {new} =")
    other = onnx.parser.parse_model(text)
    other.graph.initializer.extend(reference.graph.initializer)
    with pytest.raises(
        onnxfuse.UsageError, match=f"needs the {what} of the model; only one of the two has 'v', '{old}'"
    ):
        onnxfuse.optimize(quantized, reference=other)


def test_a_reference_that_does_not_run_is_noted() -> None:
    quantized, reference = models()
    reference.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((7, 4), np.float32), "w"))
    made, report = onnxfuse.optimize(quantized, reference=reference)
    assert report.reference is not None and not report.reference.after
    assert report.reference.note.startswith("not compared with the reference: ") and made.graph.node
