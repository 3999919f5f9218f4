"""Norms with elementwise operators in their epilogue, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import H200
from joined_cases import GroupNormCase, JoinedCase, NormCase, group_norm_case, norm_case
from sampling import sampled

from onnxfuse.kernels.norms import host
from onnxfuse.runtime.plan import Launch
from onnxfuse.testing.emulated_launches import emulate

CASES = [
    norm_case("modulated", NormCase("layer_norm", (2, 3), 40)),
    norm_case("broadcasts", NormCase("layer_norm", (2, 3), 40)),
    norm_case("mixed", NormCase("rms_norm", (2, 3), 21, scale_dtype="float32")),
    norm_case("several", NormCase("add_layer_norm", (5,), 1032, has_sum=True)),
    norm_case("chain", NormCase("add_rms_norm", (2, 2), 24, "bfloat16", has_sum=True)),
    norm_case("modulated", NormCase("add_rms_norm", (2, 2), 20, "float32")),
    norm_case("only float32", NormCase("layer_norm", (7,), 16)),
    group_norm_case("broadcasts", GroupNormCase((2, 8, 3, 12), 4, "nchw")),
    group_norm_case("several", GroupNormCase((2, 6, 5, 7), 3, "nchw", "float32")),
    group_norm_case("broadcasts", GroupNormCase((2, 3, 5, 16), 4)),
    group_norm_case("modulated", GroupNormCase((1, 9, 7, 24), 2, dtype="bfloat16")),
]


@pytest.mark.parametrize("aligned", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("each", sampled(CASES, 4), ids=str)
def test_every_plan(each: JoinedCase, aligned: bool, tmp_path: Path) -> None:
    """One kernel computes all, or one the norm and another the program, in every plan."""
    made = each.made()
    node, specs = made.node(), made.specs(aligned)
    assert host.supports(node, [spec.dtype for spec in specs], H200) is None
    plans = host.candidates(node, specs, H200)
    sources = [[step.kernel.source for step in plan.steps if isinstance(step, Launch)] for plan in plans]
    assert all(each[0].startswith(node.fusion) for each in sources)
    in_one, apart = (["region" in each for each in sources].count(found) for found in (False, True))
    assert in_one and apart and "region" not in sources[0]
    for plan in plans:
        made.check(emulate(plan, made.arrays, tmp_path, aligned), in_two_steps=len(plan.steps) > 1)
