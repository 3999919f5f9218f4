"""Fused nodes in the bodies of If, Loop and Scan run with kernels, and compute what the original does on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from case_documents import Case, read_cases

import onnxfuse
from onnxfuse.runtime import cupy_backend
from onnxfuse.runtime.hosts import find_host
from onnxfuse.session import InferenceSession, explain_session
from onnxfuse.verify.input_uses import integer_uses
from onnxfuse.verify.inputs import generate_inputs, model_inputs, sizes_to_try

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
CASES = list(read_cases(Path(__file__).parents[1] / "cases" / "control_flow.txt").values())


def feeds(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    """Return inputs of two sizes, with flags of both values and Loops of three iterations."""
    inputs = model_inputs(model)
    flags = [each.name for each in inputs if each.dtype == bool and not each.dims]
    made = []
    for sizes, _ in zip(sizes_to_try(inputs, {}), range(2), strict=False):
        for flag in (True, False) if flags else (True,):
            given = generate_inputs(inputs, sizes, integer_uses(model), {})
            given |= {name: np.array(flag) for name in flags}
            given |= {each.name: np.array(3) for each in inputs if each.name == "steps"}
            made.append(given)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bodies_run_with_kernels(case: Case) -> None:
    ort.preload_dlls()
    fused, report = onnxfuse.optimize(case.model, verify=False)
    before = ort.InferenceSession(case.model.SerializeToString(), providers=["CPUExecutionProvider"])
    after = InferenceSession(fused.SerializeToString(), providers=[(CUDA, {"use_tf32": "0"})])
    runs = explain_session(after)
    assert len(runs) == len(report.fused)
    assert [run for run in runs if find_host(run.fusion) is not None and run.how != "kernel"] == []
    for values in feeds(case.model):
        for found, expected in zip(after.run(None, values), before.run(None, values), strict=True):
            assert found.shape == expected.shape
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
