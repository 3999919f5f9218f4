"""Gates of channels on a CPU, by the kernels' own sources: in front of products, and what computes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architectures import A100, H200
from conv_cases import ConvCase
from conv_mma_emulation import check_emulated
from gate_cases import SqueezeCase, gated_convs, squeezes
from sampling import sampled

from onnxfuse.kernels.conv import matrix
from onnxfuse.kernels.gemm import mma
from onnxfuse.kernels.squeeze_excite import host
from onnxfuse.runtime.plan import Device
from onnxfuse.testing.emulated_launches import emulate

EVERY = 9  # of the cases, in a plain run of the tests
ERRORS = {"float32": 2e-6, "float16": 6e-4, "bfloat16": 4.5e-3}  # of gates, relative to 1 plus their size


@pytest.mark.parametrize(("index", "case"), sampled(enumerate(gated_convs()), EVERY), ids=str)
def test_products_of_gated_images(index: int, case: ConvCase, tmp_path: Path) -> None:
    gemm, device = matrix.as_gemm(case.problem()), replace(H200, tf32=case.tf32)
    way = mma.implementation(gemm, mma.GATE_CONFIGS[index % len(mma.GATE_CONFIGS)], device)
    check_emulated(case, way, device, exact=False, at_once=index % 2 == 1, folder=tmp_path)


@pytest.mark.parametrize("config", sampled(mma.GATE_CONFIGS, len(mma.GATE_CONFIGS)), ids=lambda config: config.name)
def test_every_tile(config: mma.MmaConfig, tmp_path: Path) -> None:
    case = ConvCase(3, 80, 72, (7, 13), (1, 1), extra=("bias", "gate"))
    way = mma.implementation(matrix.as_gemm(case.problem()), config, H200)
    check_emulated(case, way, H200, exact=False, at_once=False, folder=tmp_path)


@pytest.mark.parametrize("case", sampled(squeezes(), 4), ids=str)
def test_gates_of_images(case: SqueezeCase, tmp_path: Path) -> None:
    arrays, node = case.arrays(), case.node()
    problem = host.problem_of(node, case.specs())
    plan = host.in_one_launch(node, case.specs(), problem, H200)
    assert plan is not None and len(plan.steps) == 1
    (found,) = emulate(plan, list(arrays.values()), tmp_path, case.aligned)
    expected = case.expect(arrays)
    np.testing.assert_array_less(np.abs(found - expected), ERRORS[case.dtype] * (1 + np.abs(expected)))


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
def test_how_many_launches_compute_a_gate(device: Device) -> None:
    """One where blocks form clusters, unless an image is so large that its few blocks would take longest."""
    small, large = SqueezeCase(32, (14, 14), 480, 20), SqueezeCase(1, (640, 640), 32, 8)
    counts = [[len(plan.steps) for plan in host.candidates(c.node(), c.specs(), device)] for c in (small, large)]
    assert counts == ([[1, 3], [3, 1]] if device is H200 else [[3], [4]])


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
def test_weights_of_rows_make_the_same_plans(device: Device) -> None:
    of_images = SqueezeCase(8, (14, 14), 480, 20)
    of_rows = replace(of_images, rows=True)
    plans, others = (host.candidates(of_images.node(), c.specs(), device) for c in (of_images, of_rows))
    assert plans == others
    specs = [*of_images.specs()[:3], *of_rows.specs()[3:]]
    with pytest.raises(ValueError, match=r"required at least 3 axes of x, and as many of w and w_2, or two"):
        host.candidates(of_images.node(), specs, device)
