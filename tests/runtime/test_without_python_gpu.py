"""On a GPU: plain sessions of onnxruntime run compiled models by plan files, with TF32 or without, in CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from exported_models import load_exported, read_index
from test_models_gpu import CUDA, WIDE, error, feeds, session

import onnxfuse
from onnxfuse.compile.compile_file import CompileSettings, compile_file
from onnxfuse.ir.save import save
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime import native_library as native
from onnxfuse.verify.difference import TOLERANCES
from onnxfuse.verify.widen import model_to_float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cuda_driver.unavailable()), reason="needs a GPU"),
]
INDEX = read_index()
MODELS = ("bert_sdpa_ts_fp16.onnx", "bert_sdpa_dynamo_fp32.onnx", "llama_kvcache_sdpa_dynamo_fp16.onnx",
          "resnet50_dynamo_bn_fp16.onnx", "unet_dynamo_fp16.onnx")  # fmt: skip


def compiled(name: str, folder: Path, **options: str) -> Path:
    """Return the fused model; its plan file lies beside it."""
    path = folder / "fused.onnx"
    save(onnxfuse.optimize(load_exported(name), verify=False)[0], path)
    compile_file(path, folder / "fused.onnx.plans", CompileSettings(options=options))
    return path


def plain_session(path: Path, **options: str) -> ort.InferenceSession:
    """Return a session as a program makes it that does not know onnxfuse."""
    ort.preload_dlls()
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("onnxfuse.plans", f"{path}.plans")
    settings.register_custom_ops_library(str(native.library_path()))
    return ort.InferenceSession(str(path), settings, [(CUDA, options)])


def close(name: str, run: ort.InferenceSession, sizes: dict[str, int], seed: int) -> None:
    """Compare a run with the original model in float32, and its error with that of the original on the GPU."""
    given, original = feeds(INDEX[name], sizes, seed), load_exported(name)
    wide = {key: value.astype(WIDE.get(str(value.dtype), value.dtype)) for key, value in given.items()}
    exactly = session(model_to_float32(original).SerializeToString(), ["CPUExecutionProvider"]).run(None, wide)
    before = session(original.SerializeToString(), [(CUDA, {"use_tf32": "0"})]).run(None, given)
    for found, other, exact in zip(run.run(None, given), before, exactly, strict=True):
        assert error(found, exact) <= max(2 * TOLERANCES[str(found.dtype)], 1.5 * error(other, exact))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_by_its_plan_file(tmp_path: Path, name: str) -> None:
    run = plain_session(compiled(name, tmp_path, use_tf32="0"), use_tf32="0")
    for seed, sizes in enumerate((*INDEX[name]["verified_sizes"], INDEX[name]["verified_sizes"][0])):
        close(name, run, sizes, seed)


def test_the_session_s_tf32_decides(tmp_path: Path) -> None:
    name = "bert_sdpa_dynamo_fp32.onnx"
    path = compiled(name, tmp_path)
    given = feeds(INDEX[name], INDEX[name]["verified_sizes"][0], seed=1)
    plain_session(path).run(None, given)
    plain_session(path, use_tf32="1").run(None, given)
    with pytest.raises(Exception, match="the session has use_tf32=0, for which plan files have no template"):
        plain_session(path, use_tf32="0").run(None, given)


def test_a_cuda_graph_is_captured_and_replayed(tmp_path: Path) -> None:
    name = "vit_sdpa_dynamo_fp16.onnx"
    run = plain_session(compiled(name, tmp_path), enable_cuda_graph="1")
    given = feeds(INDEX[name], INDEX[name]["verified_sizes"][0], seed=1)
    plain = plain_session(tmp_path / "fused.onnx").run(None, given)
    binding: Any = run.io_binding()
    values = {key: ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0) for key, value in given.items()}
    outputs = {
        each.name: ort.OrtValue.ortvalue_from_numpy(np.zeros_like(value), "cuda", 0)
        for each, value in zip(run.get_outputs(), plain, strict=True)
    }
    for key, value in values.items():
        binding.bind_ortvalue_input(key, value)
    for key, value in outputs.items():
        binding.bind_ortvalue_output(key, value)
    for _ in range(4):  # two runs, the capture, and a replay
        run.run_with_iobinding(binding)
    for value, expected in zip(outputs.values(), plain, strict=True):
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(bool(cuda_driver.unavailable()) or cuda_driver.gpu_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_turns(tmp_path: Path) -> None:
    name = "bert_sdpa_dynamo_fp16.onnx"
    path = compiled(name, tmp_path)
    runs = [plain_session(path, device_id=str(ordinal)) for ordinal in (0, 1)]
    for seed, sizes in enumerate(INDEX[name]["verified_sizes"]):
        for run in (*runs, *reversed(runs)):
            close(name, run, sizes, seed)
