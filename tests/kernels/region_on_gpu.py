"""Run the kernels of many regions on a GPU, with few compilations: their texts share one program of NVRTC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from region_drafts import NUMPY, RegionProgram
from region_emulation import plan_of
from region_texts import joined

from onnxfuse.runtime import nvrtc
from onnxfuse.runtime.plan import Device, Launch, Plan, Pointer

cupy: Any = pytest.importorskip("cupy")
SCALARS = {"int32": np.int32, "int64": np.int64, "float32": np.float32}
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
GUARD_BYTES = 64  # behind each output, which nothing writes


def module_of(plans: Sequence[Plan], arch: int) -> Any:
    """Compile all kernels of plans together; that of step k of plan i is `region_i_k`.

    NVRTC gets the flags of a session, because CuPy would add -ftz=true, which flushes subnormal numbers.
    """
    steps = {f"region_{i}_{k}": step for i, plan in enumerate(plans) for k, step in enumerate(plan.steps)}
    kernels = {entry: step.kernel for entry, step in steps.items() if isinstance(step, Launch)}
    flags = [f"-arch=sm_{arch}", "-std=c++17", "-DPRECISE=1", *nvrtc.COMMON_FLAGS, *nvrtc._cuda_include_flags()]
    code, _ = nvrtc._compile(joined(kernels), "regions.cu", flags)
    module = cupy.cuda.function.Module()
    module.load(code)
    return module


def run(plan: Plan, kernels: Sequence[Any], arrays: Sequence[np.ndarray], aligned: bool) -> list[np.ndarray]:
    """Launch the kernels of a plan; return the outputs, around which nothing is written."""
    read = [_placed(each, aligned) for each in arrays]
    written = [_placed(np.zeros(spec.shape, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
    scratch = [_placed(np.full(size, 0xFF, np.uint8), True) for size in plan.scratch]
    buffers = {"input": read, "output": written, "scratch": scratch}
    for step, kernel in zip(plan.steps, kernels, strict=True):
        assert isinstance(step, Launch)
        arguments = [
            buffers[each.kind][each.index][1] if isinstance(each, Pointer) else SCALARS[each.type](each.value)
            for each in step.arguments
        ]
        cupy.cuda.driver.funcSetAttribute(kernel.ptr, MAX_DYNAMIC_SHARED, step.shared)
        kernel(step.grid, step.block, tuple(arguments), shared_mem=step.shared)
    for (whole, view), spec in zip(written, plan.outputs, strict=True):
        end = view.data.ptr - whole.data.ptr + view.nbytes
        assert bool((whole[end:] == 0xFF).all()), f"written beyond the end of {spec}"
    return [
        view.get().view(NUMPY[spec.dtype]).reshape(spec.shape)
        for (_, view), spec in zip(written, plan.outputs, strict=True)
    ]


def _placed(array: np.ndarray, aligned: bool) -> tuple[Any, Any]:
    start = 16 if aligned else array.dtype.itemsize
    whole = cupy.full(start + array.nbytes + GUARD_BYTES, 0xFF, dtype=cupy.uint8)
    view = whole[start : start + array.nbytes]
    if array.nbytes:
        view.set(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return whole, view


def results(programs: Sequence[RegionProgram], device: Device, aligned: bool = True) -> list[list[np.ndarray]]:
    """Return the outputs of each program."""
    plans = [plan_of(each, device, aligned) for each in programs]
    module, found = module_of(plans, device.arch), []
    for i, (program, plan) in enumerate(zip(programs, plans, strict=True)):
        kernels = [module.get_function(f"region_{i}_{k}") for k in range(len(plan.steps))]
        found.append(run(plan, kernels, list(program.operands.values()), aligned))
    return found
