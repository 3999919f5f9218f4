"""The fused exported models run on onnxruntime's CUDA provider with kernels, and agree with the originals there."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from exported_models import load_exported, read_index

import onnxfuse
from onnxfuse.runtime import cupy_backend
from onnxfuse.runtime.hosts import find_host
from onnxfuse.session import InferenceSession, explain_session
from onnxfuse.verify.difference import TOLERANCES
from onnxfuse.verify.widen import model_to_float32

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
INDEX = read_index()
WIDE = {"float16": np.float32}


def feeds(entry: dict, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    result = {}
    for value in entry["inputs"]:
        shape = [
            sum(sizes[part] if part in sizes else int(part) for part in str(dim).split(" + ")) for dim in value["dims"]
        ]
        if value["dtype"].startswith("float"):
            result[value["name"]] = random.standard_normal(shape).astype(value["dtype"])
        else:
            low, high = value["range"]
            kept = value.get("prefix_mask")
            array = np.ones(shape) if kept else random.integers(low, high + 1, shape)
            result[value["name"]] = array.astype(value["dtype"])
    return result


def session(model: bytes, providers: list) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=providers)


@pytest.mark.parametrize("name", INDEX)
def test_fused_on_the_gpu(name: str) -> None:
    ort.preload_dlls()
    entry, original = INDEX[name], load_exported(name)
    fused, report = onnxfuse.optimize(original, verify=False)
    exact = [(CUDA, {"use_tf32": "0"})]
    before = session(original.SerializeToString(), exact)
    after = InferenceSession(fused.SerializeToString(), providers=exact)
    runs = explain_session(after)
    assert len(runs) == len(report.fused)
    wanted = [run for run in runs if find_host(run.fusion) is not None]
    assert [run for run in wanted if run.how != "kernel"] == []
    exactly = session(model_to_float32(original).SerializeToString(), ["CPUExecutionProvider"])
    for seed, sizes in enumerate((*entry["verified_sizes"], entry["verified_sizes"][0])):
        values = feeds(entry, sizes, seed)
        wide = {name: array.astype(WIDE.get(str(array.dtype), array.dtype)) for name, array in values.items()}
        rows = zip(after.run(None, values), before.run(None, values), exactly.run(None, wide), strict=True)
        for found, original_found, exact in rows:
            # Twice the tolerance, because the GPU sums up in an order of its own.
            allowed = max(2 * TOLERANCES[str(found.dtype)], 1.5 * error(original_found, exact))
            assert error(found, exact) <= allowed


def error(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the largest error, relative to the largest value."""
    return float(np.abs(found.astype(np.float64) - exact).max() / np.abs(exact).max())
