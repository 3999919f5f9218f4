"""`onnxfuse bench` on a GPU: every mode and operator has a time, and the outputs agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exported_models import unpack
from test_bench import DONE, TIMES, run

from onnxfuse.runtime import cupy_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
SHAPE = ("--shape", "input_ids:2x24", "--provider", "cuda")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path / "cache"))


def measured(tmp_path: Path, tune: str) -> dict[str, Any]:
    numbers, chart = tmp_path / "out.json", tmp_path / "out.html"
    bert = unpack("bert_sdpa_dynamo_fp16.onnx", tmp_path)
    done = run(bert, *SHAPE, "--runs", "5", "--tune", tune, "--json", numbers, "--chart", chart)
    assert done.exit_code == DONE, done.output
    assert "<svg" in chart.read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(numbers.read_text(encoding="utf-8"))
    return result


@pytest.mark.parametrize("tune", ["never", "now"])
def test_bench(tune: str, tmp_path: Path) -> None:
    result = measured(tmp_path, tune)
    assert result["provider"] == "cuda" and result["copy_bytes_per_second"] > 1e10
    modes = [(each["name"], each["mode"]) for each in result["models"]]
    assert modes == [(name, mode) for name in ("original", "fused") for mode in ("plain", "cuda graph")]
    assert all(each["agrees"] and set(each["time"]) == TIMES for each in result["models"]), result["models"]
    fused = [op for op in result["ops"] if op["how"] != "onnxruntime"]
    assert sum(len(op["nodes"]) for op in fused) == sum(result["fused"].values())
    for op in fused:
        assert op["error"] == "" and op["kernel_us"] > 0 and op["body_us"] > 0, op
        assert op["how"] == "kernel" or tune == "now", op
    assert all(op["body_us"] is not None for op in result["ops"] if op["how"] == "onnxruntime" and not op["error"])


def test_a_model_that_computes_in_tf32_is_judged_by_float32(tmp_path: Path) -> None:
    """CuDNN and onnxfuse round what they multiply to TF32 in different ways."""
    numbers, model = tmp_path / "out.json", unpack("resnet50_dynamo_fp32.onnx", tmp_path)
    done = run(model, "--provider", "cuda", "--runs", "5", "--no-ops", "--json", numbers)
    assert done.exit_code == DONE, done.output
    result = json.loads(numbers.read_text(encoding="utf-8"))
    assert {each["name"] for each in result["models"]} == {"original", "fused"}
    assert all(each["agrees"] for each in result["models"]), result["models"]
