"""Products whose rows end in an ArgMax or ArgMin, on a CPU: the kernels' own sources, and every plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hopper_emulation
import numpy as np
import pytest
from architectures import H200, T4
from conv_emulation import placed
from conv_mma_emulation import launch as launch_mma
from kernel_hosts import host_of
from sampling import sampled
from selection_cases import EMPTY, FLOATS, QUANTIZED, Case
from test_matmul_nbits_emulated import _with_mma

from onnxfuse.runtime.plan import Device, Launch, Plan, Pointer
from onnxfuse.testing.emulated_launches import launch, library

pytestmark = pytest.mark.usefixtures("no_cublaslt")
STREAMED, BY_MMA = "gemm_stream", "nbits_mma"
NOT_EMULATED = ("gemm_mma", "gemm_hopper", "gemm_hopper_split")


@pytest.mark.parametrize("case", sampled([*FLOATS, *QUANTIZED], 6), ids=str)
def test_indices_are_those_of_the_body(case: Case, tmp_path: Path) -> None:
    """GPUs with and without TMA and matrix instructions; on one of few multiprocessors, a block has several tiles."""
    arrays, sources = case.arrays(), set[str]()
    for device in (H200, replace(H200, multiprocessors=2), replace(H200, arch=T4.arch)):
        for plan in plans_of(case, device)[:3]:
            steps = [step for step in plan.steps if isinstance(step, Launch)]
            if any(not _is_emulated(case, step) for step in steps):
                continue
            sources |= {step.kernel.source for step in steps}
            check(case, arrays, plan, device, tmp_path)
    assert "select_index" in sources


@pytest.mark.parametrize(
    "case", [Case((3,), 136, 72, logits=logits, last=1) for logits in ("nan", "first nan")], ids=str
)
def test_two_steps_select_the_same(case: Case, tmp_path: Path) -> None:
    """The plan that stores the product and then reduces its rows has the same rule for NaN."""
    device = replace(H200, arch=T4.arch)
    plan = plans_of(case, device)[-1]
    assert [step.kernel.source for step in plan.steps if isinstance(step, Launch)] == ["gemm_small", "region"]
    check(case, case.arrays(), plan, device, tmp_path)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_no_rows_have_no_indices(case: Case) -> None:
    (plan, *_) = plans_of(case, H200)
    assert plan.steps == () and plan.outputs[0].shape == (*case.lead, *([1] if case.keepdims else []))


def plans_of(case: Case, device: Device) -> list[Plan]:
    node, specs, host = case.node(), case.specs(), host_of(case.node().fusion)
    if device.arch < 80 and (case.dtype == "bfloat16" or np.prod(case.lead) > 8):
        return []  # bfloat16 and many rows need newer instructions
    assert host.supports(node, [spec.dtype for spec in specs], device) is None
    return list(host.candidates(node, specs, device))


def check(case: Case, arrays: dict[str, np.ndarray], plan: Plan, device: Device, folder: Path) -> None:
    """Run a plan, each kernel in its emulation, and compare the indices."""
    (y,) = plan.outputs
    found = np.full(y.shape, -1, np.int64)
    operands = {Pointer("input", i): placed(array, True) for i, array in enumerate(arrays.values())}
    operands |= {Pointer("scratch", i): np.full(size // 8 + 1, -1, np.int64) for i, size in enumerate(plan.scratch)}
    operands[Pointer("output", 0)] = found
    for step in plan.steps:
        assert isinstance(step, Launch)
        if step.kernel.source == STREAMED:
            hopper_emulation.run(step, {to: each.ctypes.data for to, each in operands.items()}, folder)
        elif step.kernel.source == BY_MMA:
            launch_mma(step, operands, device, False, folder, _with_mma)
        else:
            launch(step, library(step.kernel, folder), lambda to: operands[to].ctypes.data)
    np.testing.assert_array_equal(
        found, case.expected(arrays), err_msg=str([step.kernel.source for step in plan.steps])
    )


def _is_emulated(case: Case, step: Launch) -> bool:
    """Return whether an emulation runs a step: that of TMA swizzles only rows of 128 bytes."""
    if step.kernel.source in NOT_EMULATED:
        return False
    return step.kernel.source != STREAMED or case.layout == "nk" or int(step.kernel.defines["TILE_N"]) >= 64
