"""Plans of templates of rows, elements and pixels at sizes of all kinds on a CPU, emulated, against float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from architectures import A100, H200
from kernel_hosts import first_plan
from row_template_cases import TemplateCase, all_cases, sizes_by_variant
from sampling import sampled
from template_checks import concrete_plan

from onnxfuse.runtime.plan import FusedNode, TensorSpec
from onnxfuse.testing.emulated_launches import emulate

MULTIPROCESSORS = 2  # so that few rows are planned for like many
ELEMENTS = 1 << 14  # of a tensor, at most
# Long rows belong to blocks of many threads, which take long one after the other.
CASES = [
    case
    for case in all_cases()
    if case.elements((2, 2, 2)) <= ELEMENTS and not any(dim > 1023 for each in case.shapes.values() for dim in each)
]


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("case", sampled(CASES, 27), ids=str)
def test_plans_of_any_size(case: TemplateCase, aligned: bool, tmp_path: Path) -> None:
    # Blocks that form clusters are emulated where their shared memory is dynamic, which that of rows.cuh is not.
    gpu = H200 if case.attributes.get("layout") == "nhwc" else A100
    template = case.template("float16", dataclasses.replace(gpu, multiprocessors=MULTIPROCESSORS), aligned)
    found = 0
    for variant, sizes in sizes_by_variant(case, template, ELEMENTS, 1):
        arrays = case.arrays("float16", sizes)
        written = emulate(concrete_plan(template, variant, sizes), list(arrays.values()), tmp_path, aligned)
        for each, expected in zip(written, case.expected(arrays), strict=True):
            np.testing.assert_allclose(each.astype(np.float64), expected, rtol=2e-3, atol=2e-3, err_msg=f"{sizes}")
        found += 1
    assert found, "no variant takes so few elements"


def test_short_channels_take_narrower_vectors(tmp_path: Path) -> None:
    """Few elements are divided into vectors narrower than alignment allows, of which a channel then has more."""
    shape, dtype = (3, 16, 8), "float32"
    random = np.random.default_rng(1)
    x, scale, bias = (random.standard_normal(each).astype(dtype) for each in (shape, shape[1:2], shape[1:2]))
    attributes = {"groups": 16, "epsilon": 1e-5, "activation": "none"}
    node = FusedNode("group_norm", "n", ("x", "scale", "bias"), attributes, (dtype,))
    plan = first_plan(node, [TensorSpec(each.shape, dtype) for each in (x, scale, bias)], H200)
    (y,) = emulate(plan, [x, scale, bias], tmp_path, True)
    wide = x.astype(np.float64)
    centered = wide - wide.mean(-1, keepdims=True)
    norm = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, norm * scale[:, None] + bias[:, None], rtol=1e-5, atol=1e-6)
