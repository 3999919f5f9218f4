"""Plan templates of scans: few kernels for all lengths and batches, whose results are those of onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from architectures import H200
from scan_cases import CASES, SIZES, expected, fused
from template_checks import check_template, concrete_plan, right_variants, template_of

from onnxfuse.runtime.plan import TensorSpec
from onnxfuse.testing.emulated_launches import emulate

STATIC = {"n": SIZES["n"], "h": SIZES["h"], "v": SIZES["v"], "c": SIZES["c"]}
DYNAMIC = ("b", "t")


def specs(name: str) -> tuple[TensorSpec, ...]:
    """Return the specs of a case's operands with a dynamic batch and length."""
    case = CASES[name]
    call = fused(case.model(STATIC))
    dims = {each.split(":")[0]: each.split(":")[1].split(",") for each in case.inputs.split()}
    return tuple(
        TensorSpec(
            tuple(-1 - DYNAMIC.index(d) if d in DYNAMIC else int(STATIC.get(d, d)) for d in dims[each]), "float32"
        )
        for each in call.proto.input
    )


@pytest.mark.parametrize("name", ["selective", "gated delta", "selective with operators around it"])
def test_few_kernels_take_all_sizes(name: str) -> None:
    check_template(fused(CASES[name].model(STATIC)).node, specs(name), H200, max_kernels=3, tries=20, own_tilings=True)


@pytest.mark.parametrize("name", ["selective", "selective with operators around it"])
def test_plans_of_templates_at_all_sizes(name: str, tmp_path: Path) -> None:
    case, call = CASES[name], fused(CASES[name].model(STATIC))
    template = template_of(call.node, specs(name), H200)
    for batch, steps in ((2, 11), (1, 1), (3, 8), (2, 0), (0, 4)):
        arrays = case.arrays({**SIZES, "b": batch, "t": steps})
        sizes = [batch, steps] if "b" in case.inputs.split(":")[1].split(",")[0] else [steps, batch]
        plan = concrete_plan(template, right_variants(template, sizes)[0], sizes)
        own = emulate(plan, [arrays[each] for each in call.proto.input], tmp_path)
        if batch and steps:
            wanted = expected(case.model(), arrays)
            for found, output in zip(own, call.proto.output, strict=True):
                np.testing.assert_allclose(found, wanted[output], 1e-5, 1e-5)
