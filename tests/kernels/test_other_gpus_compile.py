"""Hosts have plans for the GPUs that are not at hand, which compile for the one that runs them in GPU tests."""

from __future__ import annotations

import pytest
from other_gpus import HOPPER_ONLY, OTHER_GPUS, Node, nodes, plans, sources
from sampling import sampled

from onnxfuse.kernels.gemm import cublaslt
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.plan import Device, Launch
from onnxfuse.runtime.plan_bytes import ALGORITHM_WORDS
from onnxfuse.runtime.run_plan import Algorithm

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")

from onnxfuse.runtime.nvrtc import compile_cubin

AT_HAND = 90


@pytest.fixture(autouse=True)
def cublaslt_that_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuBLASLt, which a machine without a GPU cannot ask, propose one algorithm for each product."""
    proposed = Algorithm((0,) * ALGORITHM_WORDS, workspace_bytes=0)
    monkeypatch.setattr(cublaslt, "_is_available", lambda: True)
    monkeypatch.setattr(run_plan, "algorithms", lambda matmul, ordinal, max_count: [proposed])


@pytest.mark.parametrize(("name", "node"), sampled(nodes(), 3), ids=lambda each: each if isinstance(each, str) else "")
def test_the_first_plan_compiles_for_the_gpu_at_hand(name: str, node: Node) -> None:
    for device in OTHER_GPUS:
        for step in (step for plan in plans(node, device)[:1] for step in plan.steps):
            if isinstance(step, Launch):
                assert not step.kernel.arch_specific
                assert step.shared <= device.shared_per_block
                assert compile_cubin(step.kernel, AT_HAND).code, f"{step.kernel} as planned for {device.name}"


@pytest.mark.parametrize("device", OTHER_GPUS, ids=lambda device: device.name)
def test_no_plan_has_what_only_another_gpu_has(device: Device) -> None:
    for name, node in nodes():
        for plan in plans(node, device):
            assert not sources(plan) & HOPPER_ONLY, name
            for step in plan.steps:
                if isinstance(step, Launch):
                    assert (step.cluster == 1 and not step.pdl) or device.arch >= 90, name
