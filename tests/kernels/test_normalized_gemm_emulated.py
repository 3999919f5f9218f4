"""Products that normalize their rows on a CPU: the source and the plans of gemm_stream.cu."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

import numpy as np
import pytest
from architectures import H200
from hopper_emulation import run
from normalized_cases import FEW_ROWS, NUMPY, Case, check
from sampling import sampled

from onnxfuse.kernels.gemm import stream
from onnxfuse.kernels.gemm.host import candidates
from onnxfuse.runtime.plan import Launch, Pointer, Step

SMALL = [replace(case, k=min(case.k, 2048)) for case in FEW_ROWS]


@pytest.mark.parametrize("case", sampled(SMALL, 3), ids=str)
def test_rows_are_normalized_in_shared_memory(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block or two compute a tile, or a cluster of up to eight, which these sizes do not need."""
    arrays, different = case.arrays(), {}
    for device in (replace(H200, multiprocessors=4), H200):
        for plan in candidates(case.node(), case.specs(), device):
            different[repr(plan)] = plan
        monkeypatch.setattr(stream, "_is_better", lambda *_: True)
    whole = [(plan.steps[0], plan.outputs) for plan in different.values() if len(plan.steps) == 1]
    steps = [(step, outputs) for step, outputs in whole if _is_emulated(case, step)]
    assert {step.cluster for step, _ in steps} - {1} or case.k < 128
    for step, outputs in steps:
        results = [np.full(y.shape, np.nan, NUMPY[y.dtype]) for y in outputs]
        addresses = {Pointer("input", i): array.ctypes.data for i, array in enumerate(arrays.values())}
        addresses |= {Pointer("output", i): array.ctypes.data for i, array in enumerate(results)}
        run(step, addresses, tmp_path)
        check(case, arrays, results)


def _is_emulated(case: Case, step: Step) -> TypeGuard[Launch]:
    """Return whether a step normalizes rows of x, and swizzles only rows of 128 bytes."""
    if not isinstance(step, Launch) or step.kernel.defines.get("NORM") != 1:
        return False
    return case.layout == "nk" or int(step.kernel.defines["TILE_N"]) >= 64
