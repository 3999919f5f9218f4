"""Operators of which only onnxruntime's CUDA provider has a kernel, and models of its optimizer, on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from exported_models import unpack
from spelled_models import by_onnxruntime, drawn, parsed, run, spelled
from test_models import INDEX, draw

import onnxfuse
from onnxfuse.runtime import cupy_backend
from onnxfuse.session import InferenceSession, explain_session

CUDA = "CUDAExecutionProvider"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
    pytest.mark.skipif(bool(cupy_backend.unavailable()), reason="needs CuPy and a GPU"),
]
TOLERANCE = 1e-2  # of the largest value, in float16

# In sizes that the CUDA kernels take.
IN_CUDA = {
    "nhwc_conv": "(float16[2,16,16,64] x) => (float16[2,16,16,64] y) <float16[64,3,3,64] w, float16[64] b> "
    "{ y = com.microsoft.NhwcConv <pads = [1,1,1,1], kernel_shape = [3,3]> (x, w, b) }",
    "group_norm": "(float16[2,16,16,320] x) => (float16[2,16,16,320] y) <float[320] g, float[320] b> "
    "{ y = com.microsoft.GroupNorm <groups = 32, activation = 1> (x, g, b) }",
    "skip_group_norm": "(float16[2,16,16,320] x, float16[2,16,16,320] z) => "
    "(float16[2,16,16,320] y, float16[2,16,16,320] s) <float[320] g, float[320] b, float16[320] c> "
    "{ y, s = com.microsoft.SkipGroupNorm <groups = 32, activation = 0> (x, g, b, z, c) }",
    "skip_group_norm_of_a_time": "(float16[2,16,16,320] x, float16[2,320] z) => (float16[2,16,16,320] y) "
    "<float[320] g, float[320] b, float16[320] c> "
    "{ y = com.microsoft.SkipGroupNorm <groups = 32, activation = 1> (x, g, b, z, c) }",
    "bias_split_gelu": "(float16[2,64,2560] x) => (float16[2,64,1280] y) <float16[2560] b> "
    "{ y = com.microsoft.BiasSplitGelu(x, b) }",
    "bias_add": "(float16[2,64,320] x, float16[2,64,320] z) => (float16[2,64,320] y) <float16[320] b> "
    "{ y = com.microsoft.BiasAdd(x, b, z) }",
    "multi_head_packed": "(float16[2,64,8,3,64] x) => (float16[2,64,512] y) "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 8> (x) }",
    "multi_head_packed_keys": "(float16[2,64,512] q, float16[2,77,8,2,64] k) => (float16[2,64,512] y) "
    "{ y = com.microsoft.MultiHeadAttention <num_heads = 8> (q, k) }",
}


@pytest.mark.parametrize("name", IN_CUDA)
def test_a_rule_computes_what_the_cuda_provider_does(name: str) -> None:
    ort.preload_dlls()
    model = parsed(IN_CUDA[name])
    result, found = spelled(model)
    assert found.spelled
    feeds = drawn(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=[CUDA, "CPUExecutionProvider"])
    for expected, value in zip(session.run(None, feeds), run(result, feeds), strict=True):
        difference = np.abs(value.astype(np.float32) - expected.astype(np.float32)).max()
        assert difference <= TOLERANCE * np.abs(expected.astype(np.float32)).max()


@pytest.mark.parametrize(
    ("name", "kind"), [("bert_eager_ts_fp32", "bert"), ("llama_eager_ts_fp32", "gpt2"), ("unet_ts_fp32", "unet")]
)
def test_a_model_of_onnxruntimes_optimizer_runs_by_kernels(name: str, kind: str, tmp_path: Path) -> None:
    """The export is the reference, because the CPU provider cannot run the optimized UNet."""
    ort.preload_dlls()
    export = unpack(f"{name}.onnx", tmp_path)
    fused, report = onnxfuse.optimize(by_onnxruntime(export, kind), verify=False)
    session = InferenceSession(fused.SerializeToString(), providers=[CUDA])
    runs = explain_session(session)
    assert len(runs) == len(report.fused) and [each for each in runs if each.how != "kernel"] == []
    entry = INDEX[f"{name}.onnx"]
    feeds = draw(entry["inputs"], entry["verified_sizes"][0])
    model = onnx.load(export)
    used = {each.name: feeds[each.name] for each in session.get_inputs()}
    for expected, value in zip(run(model, feeds), session.run(None, used), strict=True):
        assert np.abs(value - expected).max() <= TOLERANCE * np.abs(expected).max()
