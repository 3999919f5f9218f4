"""The C++ example runs bodies on the CPU, and kernels by a plan file in a process without Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cpp_example import built_example, run_example
from exported_models import load_exported, read_index
from stand_in import CPU, SHIFT, model, stage
from stored_plans import store

import onnxfuse
from onnxfuse.ir.save import save
from onnxfuse.runtime import cupy_backend
from onnxfuse.runtime import native_library as native

CUDA = "CUDAExecutionProvider"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_example(tmp_path_factory.mktemp("cpp"))


def pattern(*shape: int) -> np.ndarray:
    """Return what the example fills a float input with."""
    return (0.25 + np.arange(np.prod(shape)) % 1024 / 4096).astype(np.float32).reshape(shape)


def test_bodies_run_on_the_cpu(program: Path, tmp_path: Path) -> None:
    fused, report = onnxfuse.optimize(load_exported("bert_eager_dynamo_fp32.onnx"), verify=False)
    assert report.fused
    path = tmp_path / "fused.onnx"
    save(fused, path)
    answer = run_example(program, path, *(f"{name}=2x8" for name in ("input_ids", "attention_mask")))
    feeds = {name: np.ones((2, 8), np.int64) for name in ("input_ids", "attention_mask")}
    session = ort.InferenceSession(str(path), providers=[CPU])
    (name, (shape, elements)), *_ = answer.outputs.items()
    (expected,) = session.run([name], feeds)
    assert shape == list(expected.shape)
    np.testing.assert_allclose(elements, expected.ravel()[:6], rtol=1e-4, atol=1e-5)
    assert "first answer after" in answer.text and "later runs take" in answer.text


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the arguments for a model of the stand-in's kernels with the native library and a plan file."""
    stage(monkeypatch)
    monkeypatch.setenv("ONNXFUSE_PROVIDER", CPU)
    library = shutil.copy(native.library_path() or "", tmp_path / "libonnxfuse.so")
    source, plans = tmp_path / "model.onnx", store(tmp_path / "model.plans", model(SHIFT))
    source.write_bytes(model(SHIFT))
    return lambda *more: [str(source), "x=2x3", "b=3", str(library), f"onnxfuse.plans={plans}", *more]


def test_kernels_run_by_a_plan_file(program: Path, served: Callable[..., list[str]]) -> None:
    answer = run_example(program, *served())
    assert answer.outputs == {"y": ([2, 3], pytest.approx((pattern(2, 3) + pattern(3)).ravel(), rel=1e-5))}


def test_what_does_not_fit_is_said(program: Path, served: Callable[..., list[str]]) -> None:
    with pytest.raises(RuntimeError, match="run_model: onnxfuse: plan file /none: No such file or directory"):
        run_example(program, *served("onnxfuse.plans=/none"))
    answer = run_example(program, *served("onnxfuse.plans=/none", "onnxfuse.missing=body"))
    assert "onnxfuse: all fused nodes run as their bodies: plan file /none: No such file" in answer.text
    with pytest.raises(RuntimeError, match="give input 'b' a shape, such as 8x128"):
        run_example(program, *(each for each in served() if each != "b=3"))


@pytest.mark.gpu
@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu")
@pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("name", ["bert_sdpa_dynamo_fp16.onnx", "resnet50_dynamo_bn_fp16.onnx"])
def test_on_a_gpu(program: Path, tmp_path: Path, name: str) -> None:
    """Outputs are those of the original; benchmarks/cpp_start.py times the first answer."""
    original, fused, plans = (tmp_path / each for each in ("original.onnx", "fused.onnx", "fused.plans"))
    onnx.save(load_exported(name), original)
    save(onnxfuse.optimize(original, verify=False)[0], fused)
    subprocess.run([sys.executable, "-m", "onnxfuse", "compile", str(fused), "-o", str(plans)], check=True)
    entry = read_index()[name]
    sizes = entry["verified_sizes"][0]
    shapes = [
        f"{each['name']}={'x'.join(str(sizes.get(dim, dim)) for dim in each['dims'])}" for each in entry["inputs"]
    ]
    library = str(native.library_path())
    ways = {
        "onnxruntime": [original, *shapes, "cuda"],
        "onnxfuse": [fused, *shapes, "cuda", library, f"onnxfuse.plans={plans}"],
    }
    expected, found = (run_example(program, *arguments).outputs for arguments in ways.values())
    assert found.keys() == expected.keys()
    for output, (shape, elements) in expected.items():
        assert found[output][0] == shape
        np.testing.assert_allclose(found[output][1], elements, rtol=2e-2, atol=2e-2)
