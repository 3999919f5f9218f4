"""Plan files on a GPU: compiled where no GPU is seen, and run in processes that compile nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from exported_models import load_exported, read_index

import onnxfuse
from onnxfuse.runtime import cuda_driver, cupy_backend
from onnxfuse.session import InferenceSession

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
INDEX = read_index()
NAMES = [next(name for name in INDEX if name.startswith(family)) for family in ("bert", "llama", "resnet", "vit")]
RUN = """
import json, sys
import numpy as np, onnxruntime as ort, onnxfuse
ort.preload_dlls()
run = onnxfuse.InferenceSession(sys.argv[1], providers=["CUDAExecutionProvider"])
np.savez(sys.argv[3], *run.run(None, dict(np.load(sys.argv[2]))))
runs = onnxfuse.explain_session(run)
print(json.dumps({"cupy": "cupy" in sys.modules, "runs": sorted({(each.how, each.why) for each in runs})}))
"""


def feeds(entry: dict[str, Any]) -> dict[str, Any]:
    """Return inputs of the first sizes at which the model was verified when it was exported."""
    random, result, sizes = np.random.default_rng(0), {}, entry["verified_sizes"][0]
    for value in entry["inputs"]:
        shape = [sum(sizes.get(part) or int(part) for part in str(dim).split(" + ")) for dim in value["dims"]]
        if value["dtype"].startswith("float"):
            result[value["name"]] = random.standard_normal(shape).astype(value["dtype"])
        else:
            low, high = value["range"]
            drawn = np.ones(shape) if value.get("prefix_mask") else random.integers(low, high + 1, shape)
            result[value["name"]] = drawn.astype(value["dtype"])
    return result


def python(*arguments: str | Path, **environment: str) -> str:
    """Return what a Python process prints that has an empty cache."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("sees_gpu", [True, False], ids=["for this GPU", "without a GPU"])
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_model_runs_in_a_process_that_compiles_nothing(name: str, sees_gpu: bool, tmp_path: Path) -> None:
    """Its outputs are those of a session that plans; without measurements, CuPy is not even imported."""
    ort.preload_dlls()
    fused, _ = onnxfuse.optimize(load_exported(name), verify=False)
    path, given = tmp_path / "m.onnx", feeds(INDEX[name])
    onnx.save(fused, path)
    np.savez(tmp_path / "in.npz", **given)
    cache = {"ONNXFUSE_CACHE_DIR": str(tmp_path / "cache")}
    here = [] if sees_gpu else ["--arch", f"sm_{cuda_driver.gpu(0).arch}"]
    hidden = {} if sees_gpu else {"CUDA_VISIBLE_DEVICES": ""}
    printed = python("-m", "onnxfuse", "compile", path, *here, **cache, **hidden)
    assert "Without a kernel in the file" not in printed, printed
    (tmp_path / "cache").rename(tmp_path / "compiler's cache")
    found = json.loads(python("-c", RUN, path, tmp_path / "in.npz", tmp_path / "out.npz", **cache))
    assert found["runs"] == [["kernel", f"{CUDA}, device 0; plans of m.onnx.plans"]]
    assert not found["cupy"]
    assert not (tmp_path / "cache").exists(), "nothing was compiled"
    outputs = np.load(tmp_path / "out.npz").values()
    expected = InferenceSession(fused.SerializeToString(), providers=[CUDA]).run(None, given)
    for output, other in zip(outputs, expected, strict=True):
        assert np.abs(output.astype("float64") - other).max() <= 1e-2 * max(1.0, np.abs(other).max())


def test_the_driver_and_cupy_describe_gpus_alike() -> None:
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(0)
    found = cuda_driver.gpu(0)
    assert found.name == properties["name"].decode()
    assert found.arch == 10 * properties["major"] + properties["minor"]
    assert found.multiprocessors == properties["multiProcessorCount"]
    assert found.shared_per_block == properties["sharedMemPerBlockOptin"]
    assert cuda_driver.gpu_count() == cupy.cuda.runtime.getDeviceCount()
    assert cuda_driver.unavailable() is None
