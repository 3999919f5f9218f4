"""What the installed package does: `pip install -e . && pytest`."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from vocoder import vocoder

import onnxfuse
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.nvrtc import compile_cubin
from onnxfuse.runtime.plan import Device, FusedNode, TensorSpec
from onnxfuse.testing import check_kernels

CUDA = "CUDAExecutionProvider"
DEVICES = [
    Device("T4", 75, 40, 65536), Device("A100", 80, 108, 166912), Device("A10", 86, 72, 101376),
    Device("L4", 89, 58, 101376), Device("H200", 90, 132, 232448), Device("B200", 100, 148, 232448),
    Device("RTX 5090", 120, 170, 101376),
]  # fmt: skip


def test_both_forms_are_fused_and_verified() -> None:
    """Fused nodes are compared with what they replaced, and the models with each other."""
    model, report = onnxfuse.optimize(vocoder())
    assert report.counts["snake"] == 2
    assert report.verified.status == "verified"
    forms = [a.s for node in model.graph.node for a in node.attribute if a.name == "form"]
    assert forms == [b"product", b"quotient"]


def test_another_power_is_not_fused() -> None:
    """Only the second activation squares the sine by a product."""
    model = vocoder()
    (two,) = (each for each in model.graph.initializer if each.name == "two")
    two.CopyFrom(onnx.numpy_helper.from_array(np.float32(3), "two"))
    _, report = onnxfuse.optimize(model)
    assert report.counts["snake"] == 1


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_kernel_compiles(dtype: str, device: Device) -> None:
    """No GPU is needed, but the packages cuda-bindings and nvidia-cuda-nvrtc, or CuPy."""
    host = find_host("snake")
    assert host is not None
    for form, layout in ("product", "nchw"), ("quotient", "nhwc"):
        node = FusedNode("snake", "n", ("x", "alpha", "gain"), {"form": form, "layout": layout}, (dtype,))
        x = TensorSpec((2, 32, 1000) if layout == "nchw" else (2, 1000, 32), dtype)
        inputs = [x, TensorSpec((1, 32, 1), dtype), TensorSpec((1, 32, 1), dtype)]
        assert host.supports(node, [each.dtype for each in inputs], device) is None
        (plan,) = host.candidates(node, inputs, device)
        compiled = compile_cubin(plan.steps[0].kernel, device.arch)
        assert compiled.spill_stores + compiled.spill_loads == 0 and "warning" not in compiled.log


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_the_kernel_computes_what_the_body_does_on_a_cpu(arch: str) -> None:
    """No GPU is needed, but a C++ compiler, as which the kernel is compiled."""
    model, _ = onnxfuse.optimize(vocoder())
    feeds = {"mel": np.random.default_rng(1).standard_normal((2, 20, 33), dtype=np.float32)}
    checks = check_kernels(model, feeds, arch=arch)
    assert [each.fusion for each in checks] == ["snake", "snake"] and max(each.error for each in checks) < 1e-6


@pytest.mark.skipif(CUDA not in ort.get_available_providers(), reason="needs onnxruntime-gpu, CuPy and a GPU")
def test_the_kernel_computes_what_the_body_does() -> None:
    """Without TF32, so that the convolutions around it are as exact as on the CPU."""
    ort.preload_dlls()
    model, _ = onnxfuse.optimize(vocoder())
    feeds = {"mel": np.random.default_rng(1).standard_normal((2, 20, 33), dtype=np.float32)}
    bodies = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    kernels = onnxfuse.InferenceSession(model.SerializeToString(), providers=[(CUDA, {"use_tf32": 0})], wait=True)
    assert {each.how for each in onnxfuse.explain_session(kernels) if each.fusion == "snake"} == {"kernel"}
    np.testing.assert_allclose(kernels.run(None, feeds)[0], bodies.run(None, feeds)[0], atol=1e-5)
