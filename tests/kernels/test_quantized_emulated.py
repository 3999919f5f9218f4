"""Products and convolutions of integers on a CPU: the kernels' own sources and plans, with emulated instructions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hopper_emulation
import numpy as np
import pytest
from architectures import H200
from conv_emulation import launch_emulated
from quantized_cases import NUMPY, SAME, Case
from sampling import sampled

from onnxfuse.ir.dtypes import FLOAT8
from onnxfuse.kernels.quantized.host import candidates
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer
from onnxfuse.testing.emulated_launches import launch, library

OWN = ("quantized_gemm", "quantized_conv")  # kernels that run by the instructions of Hopper
CASES = [
    Case(70, 40, 256), Case(140, 72, 144, x_zero=131), Case(33, 35, 272, x_dtype="int8", x_zero=-7, bias=False),
    Case(65, 64, 128, dtype="float16", per_column=False),
    Case(2, 64, 128, sizes=(9, 11), kernel=(3, 3), pads=SAME),
    Case(1, 35, 128, sizes=(9, 11), kernel=(3, 3), pads=SAME, x_zero=77),
    Case(1, 40, 256, sizes=(12, 7), kernel=(3, 2), pads=(0, 1, 2, 1), dilations=(2, 1), x_dtype="int8", x_zero=-128),
    Case(1, 64, 128, sizes=(5, 5), kernel=(1, 1), x_zero=9),
    Case(33, 40, 128, x_zero=5, sums=True),
    Case(1, 35, 3, sizes=(11, 13), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4, x_zero=128, sums=True),
    Case(1, 40, 3, sizes=(11, 16), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4, x_zero=128, first=True),
    Case(2, 24, 3, sizes=(9, 20), kernel=(3, 3), pads=(0, 1, 2, 1), dtype="float16", x_dtype="int8", first=True),
    Case(2, 35, 4, sizes=(8, 12), kernel=(2, 2), strides=(2, 2), per_column=False, first=True, dtype="float16"),
    Case(1, 16, 4, sizes=(8, 11), kernel=(2, 3), strides=(2, 1), pads=SAME, x_zero=9, per_column=False, first=True),
    Case(1, 64, 3, sizes=(16, 24), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4, x_zero=3, first=True, after="relu"),
    Case(2, 40, 5, sizes=(3, 4, 5), kernel=(2, 3, 2), pads=(0, 1, 2, 1, 1, 0), dilations=(1, 1, 2), x_dtype="int8"),
    Case(1, 64, 128, sizes=(2, 9), kernel=(3, 5), pads=(2, 4, 2, 3), dilations=(1, 2), x_zero=9, sums=True),
    Case(2, 32, 32, sizes=(9, 11), kernel=(3, 3), pads=SAME, group=32, x_zero=131),
    Case(1, 24, 24, sizes=(9, 8), kernel=(5, 5), pads=(2, 1, 2, 3), group=24, x_dtype="int8", x_zero=-7, after="relu"),
    Case(1, 36, 36, sizes=(7, 9), kernel=(3, 3), pads=SAME, group=36, after="residual", per_column=False),
    Case(2, 16, 16, sizes=(12, 9), kernel=(3, 2), strides=(1, 2), group=16, dtype="float16", bias=False),
    Case(70, 96, 256, after="relu"), Case(133, 72, 144, x_dtype="int8", x_zero=5, after="relu"),
    Case(70, 40, 256, after="residual"), Case(70, 100, 256, after="residual"), Case(65, 36, 128, dtype="float16"),
    Case(70, 40, 256, x_dtype=FLOAT8, w_dtype=FLOAT8), Case(133, 35, 272, x_dtype=FLOAT8, w_dtype=FLOAT8, bias=False),
    Case(65, 64, 144, x_dtype=FLOAT8, w_dtype=FLOAT8, after="residual"),
    Case(140, 104, 656, x_dtype=FLOAT8, w_dtype=FLOAT8, dtype="float16", per_column=False, after="relu"),
    Case(2, 64, 128, x_dtype=FLOAT8, w_dtype=FLOAT8, sizes=(9, 11), kernel=(3, 3), pads=SAME),
    Case(1, 40, 256, x_dtype=FLOAT8, w_dtype=FLOAT8, sizes=(9, 7), kernel=(3, 2), after="residual"),
    Case(1, 35, 3, x_dtype=FLOAT8, w_dtype=FLOAT8, sizes=(11, 13), kernel=(7, 7), strides=(2, 2), pads=(3,) * 4),
]  # fmt: skip


@pytest.mark.parametrize("case", sampled(CASES, 3), ids=str)
def test_matches_exact_sums(case: Case, tmp_path: Path) -> None:
    device = replace(H200, multiprocessors=3)
    arrays = case.arrays()
    whole = np.empty((int(np.prod(case.y_shape)) + 64,), NUMPY[case.node().output_dtypes[0]])
    every = candidates(case.node(), case.specs(), device)
    plans = [p for p in every if isinstance(p.steps[-1], Launch) and multiplies_integers(p.steps[-1].kernel)]
    assert plans
    for plan in plans[:2]:
        whole.view(np.uint8)[:] = 0xFF  # floats are NaN
        run(plan, list(arrays.values()), whole, tmp_path)
        count = int(np.prod(case.y_shape))
        case.check(arrays, whole[:count].reshape(case.y_shape), exact=True)
        assert (whole[count:].view(np.uint8) == 0xFF).all(), "written beyond the end"


def multiplies_integers(kernel: Kernel) -> bool:
    return kernel.source in OWN or bool(kernel.defines.get("EIGHT_BITS"))


def run(plan: Plan, arrays: list[np.ndarray], y: np.ndarray, folder: Path) -> None:
    """Run the launches of a plan, which write y."""
    scratch = [np.full(size, 0xFF, np.uint8) for size in plan.scratch]
    arrays = [np.ascontiguousarray(each) for each in arrays]
    addresses = {Pointer("input", i): each.ctypes.data for i, each in enumerate(arrays)}
    addresses |= {Pointer("scratch", i): each.ctypes.data for i, each in enumerate(scratch)}
    addresses[Pointer("output", 0)] = y.ctypes.data
    for step in plan.steps:
        assert isinstance(step, Launch)
        if step.kernel.source in ("conv_stem", "conv_depthwise_sliding"):
            launch_emulated(step, arrays, [y], folder)
        elif step.kernel.source in OWN:
            hopper_emulation.run(step, addresses, folder)
        else:
            launch(step, library(step.kernel, folder), addresses.__getitem__)
