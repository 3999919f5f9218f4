"""Models in half precision run with kernels on onnxruntime's CUDA provider, and are as near to float32 as they say."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from exported_models import load_exported, read_index
from onnx import numpy_helper

import onnxfuse
from onnxfuse.half.result import USUAL_FACTOR
from onnxfuse.runtime import cupy_backend
from onnxfuse.runtime.hosts import find_host
from onnxfuse.session import InferenceSession, explain_session
from onnxfuse.verify.requested_shapes import draws

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
EXPORTED = sorted(name for name in read_index() if "fp32" in name)


def agrees(original: onnx.ModelProto, dtype: str) -> onnxfuse.Report:
    """Check that the converted model runs with kernels, within USUAL_FACTOR times the noise that the report tells."""
    ort.preload_dlls()
    model, report = onnxfuse.optimize(original, dtype=dtype)  # type: ignore[arg-type]
    session = InferenceSession(model.SerializeToString(), providers=[CUDA])
    wanted = [run for run in explain_session(session) if find_host(run.fusion) is not None]
    assert [run for run in wanted if run.how != "kernel"] == []
    exact = ort.InferenceSession(original.SerializeToString(), providers=["CPUExecutionProvider"])
    assert report.half is not None
    told = {each.name: max(each.error, each.noise) for each in report.half.errors}
    names = [each.name for each in session.get_outputs()]
    for draw in draws(original, (), {}).usual():
        feeds = draw.make()
        try:
            expected = exact.run(names, feeds)
        except Exception:  # sizes that the model does not take
            continue
        for name, old, new in zip(names, expected, session.run(names, feeds), strict=True):
            if name in told:
                error = float(np.abs(new.astype(np.float64) - old).max() / np.abs(old).max())
                assert error <= USUAL_FACTOR * told[name], f"'{name}' is off by {error:.1e}"
        return report
    raise AssertionError("the original runs at no sizes")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", EXPORTED)
def test_converted_exports_on_the_gpu(name: str, dtype: str) -> None:
    agrees(load_exported(name), dtype)


@pytest.mark.parametrize("times", [1e4, 1e6])
def test_t5_with_residuals_in_float32_on_the_gpu(times: float) -> None:
    """Norms read float32 and give float16 there; only the smaller weight fits into float16 itself."""
    source = load_exported("t5_encoder_eager_dynamo_fp32.onnx")
    weight = next(t for t in source.graph.initializer if t.name == "val_178")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(times), weight.name))
    report = agrees(source, "float16")
    assert report.half is not None
    assert report.half.kept
