"""Norms with elementwise operators in their epilogue, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import H200
from emulated_launches import emulate
from joined_cases import JoinedCase, NormCase, norm_case
from sampling import sampled

from onnxfuse.kernels.norms import host
from onnxfuse.runtime.plan import Launch

CASES = [
    norm_case("modulated", NormCase("layer_norm", (2, 3), 40)),
    norm_case("broadcasts", NormCase("layer_norm", (2, 3), 40)),
    norm_case("mixed", NormCase("rms_norm", (2, 3), 21, scale_dtype="float32")),
    norm_case("several", NormCase("add_layer_norm", (5,), 1032, has_sum=True)),
    norm_case("chain", NormCase("add_rms_norm", (2, 2), 24, "bfloat16", has_sum=True)),
    norm_case("modulated", NormCase("add_rms_norm", (2, 2), 20, "float32")),
    norm_case("only float32", NormCase("layer_norm", (7,), 16)),
]


@pytest.mark.parametrize("aligned", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("each", sampled(CASES, 3), ids=str)
def test_every_plan(each: JoinedCase, aligned: bool, tmp_path: Path) -> None:
    """One kernel computes all, or one the norm and another the program, in every plan."""
    made = each.made()
    node, specs = made.node(), made.specs(aligned)
    assert host.supports(node, [spec.dtype for spec in specs], H200) is None
    plans = host.candidates(node, specs, H200)
    sources = [[step.kernel.source for step in plan.steps if isinstance(step, Launch)] for plan in plans]
    assert sources == [[node.fusion], [node.fusion, "region"]]
    for plan in plans:
        made.check(emulate(plan, made.arrays, tmp_path, aligned), in_two_steps=len(plan.steps) > 1)
