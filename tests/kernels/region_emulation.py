"""Run the kernels of many regions on a CPU, with few compilations: their texts share one translation unit."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from region_drafts import RegionProgram
from region_texts import headers_and_own

from onnxfuse.kernels.region.host import candidates
from onnxfuse.runtime.expressions import Expressions
from onnxfuse.runtime.plan import Device, Kernel, Launch, Plan, TensorSpec
from onnxfuse.runtime.symint import Trace
from onnxfuse.runtime.template import concrete, with_sizes
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import as_c_plus_plus, emulate, launcher


def plan_of(program: RegionProgram, device: Device, aligned: bool = True) -> Plan:
    """Return the plan of a program for its operands, whose dynamic dims are symbolic while it is made."""
    trace = Trace(Expressions())
    numbers = {size: i for i, size in enumerate(program.dynamic)}
    specs = [
        TensorSpec(tuple(-1 - numbers[dim] if dim in numbers else dim for dim in each.shape), each.dtype, aligned)
        for each in program.specs()
    ]
    sizes = [trace.size(i, size) for i, size in enumerate(program.dynamic)]
    (plan,) = candidates(program.node(), with_sizes(specs, sizes), device)
    assert not trace.fixed, f"sizes are used as plain integers at {', '.join(trace.fixed)}"
    return concrete(plan)


def compile_all(plans: Sequence[Plan], folder: Path) -> dict[str, ctypes.CDLL]:
    """Compile all kernels of plans together; return by kernel what launches it."""
    kernels = {repr(step.kernel): step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)}
    texts, launchers, head = [], [], ""
    for i, kernel in enumerate(kernels.values()):
        headers, own = map(as_c_plus_plus, headers_and_own(kernel, f"region_{i}"))
        head = head or headers
        texts.append(own)
        launchers.append(launcher(f"region_{i}", f"launch_{i}"))
    text = "\n".join(['#include "blocks_emulated.h"', head, *texts, *launchers])
    if not kernels:
        return {}
    name = f"regions_{hashlib.sha256(text.encode()).hexdigest()[:16]}"  # no library replaces one that is loaded
    library = load(text, {"PRECISE": 1}, ["-ffp-contract=off", "-O0"], folder / f"{name}.cc")
    return {key: getattr(library, f"launch_{i}") for i, key in enumerate(kernels)}


def results(
    programs: Sequence[RegionProgram], device: Device, folder: Path, aligned: bool = True
) -> list[list[np.ndarray]]:
    """Return the outputs of each program."""
    plans = [plan_of(each, device, aligned) for each in programs]
    compiled = compile_all(plans, folder)

    def find(kernel: Kernel, _: Path) -> object:
        return compiled[repr(kernel)]

    pairs = zip(programs, plans, strict=True)
    return [emulate(plan, list(each.operands.values()), folder, aligned, find) for each, plan in pairs]
