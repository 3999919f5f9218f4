"""Disentangled attention on a CPU: the launches of its plans against float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from architectures import H200, T4
from attention_cases import NUMPY
from conv_emulation import placed
from disentangled_cases import CASES, formula
from sampling import by_parts, in_turn
from test_group_query_attention_emulated import run

from onnxfuse.kernels.attention import host
from onnxfuse.runtime.plan import Device, Launch, Pointer


@by_parts(2)
@pytest.mark.parametrize("device", [T4, H200], ids=lambda device: f"sm_{device.arch}")
@pytest.mark.parametrize(("turn", "name"), [*enumerate(CASES)])
def test_plans(turn: int, name: str, device: Device, part: int, tmp_path: Path) -> None:
    case = CASES[name]
    inputs = case.inputs()
    expected, tolerance = formula(case, inputs)
    exact = dataclasses.replace(device, tf32=False)
    if name == "large_heads" and device is T4:
        with pytest.raises(ValueError, match="as far as the shared memory of T4 goes"):
            host.candidates(case.node(), case.specs(), exact)
        return
    plans = host.candidates(case.node(), case.specs(), exact)
    assert len(plans) == 3 or device is T4, "blocks of 64, 32 and 16 queries"
    for plan in in_turn(plans, turn, part, 2):
        (spec,), (step,) = plan.outputs, plan.steps
        assert isinstance(step, Launch)
        arrays = {Pointer("input", i): placed(each, case.aligned) for i, each in enumerate(inputs.values())}
        y = arrays[Pointer("output", 0)] = placed(np.full(spec.shape, 7.0, NUMPY[spec.dtype]), case.aligned)
        run(step, arrays, tmp_path)
        np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
        assert np.nan_to_num(np.abs(y.astype(np.float64) - expected) - tolerance, nan=-1.0).max() <= 0
