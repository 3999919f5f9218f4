"""Channels-last networks of sound and video run on the GPU with kernels alone, and agree with the CPU in float32."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from layout_models import drawn, run
from sound_and_video import SIZES_OF, TEXTS, network

import onnxfuse
from onnxfuse.runtime import cupy_backend
from onnxfuse.session import InferenceSession, explain_session
from onnxfuse.verify.widen import model_to_float32

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
TOLERANCE = 5e-3  # of the largest value


@pytest.mark.parametrize("name", TEXTS)
def test_networks(name: str) -> None:
    ort.preload_dlls()
    original = network(name)
    fused, report = onnxfuse.optimize(original, layout="nhwc", verify=False)
    session = InferenceSession(fused.SerializeToString(), providers=[CUDA])
    runs = explain_session(session)
    assert len(runs) == len(report.fused) and [each for each in runs if each.how != "kernel"] == []
    exactly = model_to_float32(original)
    for more in (0, 4, 12):  # other sizes at run time
        feeds = drawn(original, **{axis: size + more for axis, size in SIZES_OF[name].items()})
        (found,) = session.run(None, feeds)
        (expected,) = run(exactly, {key: value.astype(np.float32) for key, value in feeds.items()})
        assert np.abs(found.astype(np.float32) - expected).max() <= TOLERANCE * np.abs(expected).max()
