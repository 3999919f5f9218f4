"""benchmarks/serving.py on a GPU, with tiny models: outputs agree, memory is sampled, and a plan file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from test_serving import ENGINES, FEW, PARTS, serving, written  # noqa: F401

from onnxfuse.runtime import cupy_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]


def test_all_parts_in_processes(serving: ModuleType, exported: Callable[[str], Path], tmp_path: Path) -> None:  # noqa: F811
    bert, decoder = exported("bert_sdpa_dynamo_fp16.onnx"), exported("llama_kvcache_sdpa_dynamo_fp16.onnx")
    models = ["--model", str(bert), "--decoder", str(decoder)]
    serving.main(["--out", str(tmp_path), *models, *FEW, "--provider", "cuda", "--tune", "never"])
    parts = written(tmp_path)["parts"]
    assert tuple(parts) == PARTS
    assert parts["visits"]["agrees"] and parts["visits"]["compared"] > 0, parts["visits"]
    assert parts["cache"]["agrees"] and parts["cache"]["steps"] > 1, parts["cache"]
    assert {row["engine"] for row in parts["load"]["rows"]} == set(ENGINES), parts["load"]
    for engine in ENGINES:
        assert parts["memory"][engine]["samples"][-1]["gpu_mib"] > 0, parts["memory"][engine]
    assert set(parts["memory"]["beyond_onnxruntime"]) == {"host", "gpu"}
    for row in parts["cold"]["rows"]:
        assert row["seconds"] and row["agrees"] and "error" not in row, row
