"""Regions of long programs whose kernels are small: benchmarks/host_seconds.py times how long they compile."""

from __future__ import annotations

import numpy as np
from architectures import H200
from region_cases import all_cases
from region_drafts import RegionProgram
from region_emulation import plan_of

from onnxfuse.runtime.plan import Launch

CASES = all_cases()


def functions(count: int, row: int) -> RegionProgram:
    """Functions of rows of this length that take many instructions, each of which reads the one before."""
    program = RegionProgram()
    x = program.operand(np.zeros((2**21 // row, row), np.float16))
    for i in range(count):
        x = program.op(("Sin", "Cos", "Tanh", "Exp", "Erf", "Log")[i % 6], x)
    program.outputs = [x]
    return program


def followed(program: RegionProgram, op: str, **attributes: object) -> RegionProgram:
    program.outputs = [program.op(op, program.outputs[0], **attributes)]
    return program


QUICK = {
    **{name: CASES[name] for name in ("windows of Swin", "modulate of DiT", "a loss, dynamic")},
    "60 functions": functions(60, 64),
    "a Transpose of 36 functions": followed(functions(36, 64), "Transpose", perm=[1, 0]),
    "a Softmax of 24 functions": followed(functions(24, 4096), "Softmax", axis=1),
}


def first_launch(program: RegionProgram) -> Launch:
    """Return the first kernel of a region on an H200."""
    return next(step for step in plan_of(program, H200).steps if isinstance(step, Launch))
