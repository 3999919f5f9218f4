"""The plans of templates of convolutions on a GPU, at many sizes, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from conv_cases import NUMPY, ConvCase
from dynamic_convs import DynamicConv, convolutions, gated, transposed
from kernel_runs import RELATIVE, compile_all, compile_native, launch, result, upload
from template_checks import concrete_plan, template_of

from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

MAX_IMAGES = 5
SIDES = {1: 1500, 2: 45, 3: 14}  # by the number of spatial axes
SEEDS = 8
SUMS = {"fp32": 3.4e-6, "tf32": 1.7 * 2.0**-10}  # of the terms' magnitudes
ACTIVATION_16 = 2.5e-5
NO_BF16_ARCH = 75


def devices(case: ConvCase) -> Iterator[Device]:
    """Yield the GPU, and the same with two multiprocessors, for which small sizes are planned like large ones."""
    whole = replace(gpu(0), tf32=case.tf32)
    yield from (whole, replace(whole, multiprocessors=2))


def described(conv: DynamicConv) -> list[tuple[ConvCase, Plan]]:
    """Return the plans at many sizes, the smallest ones too."""
    found = []
    for device in devices(conv.case):
        template = template_of(conv.case.node(), conv.inputs(), device)
        for seed in range(SEEDS):
            small = {axes: side // (20 if seed == 0 else 1) for axes, side in SIDES.items()}
            case = conv.sized(seed, 1 if seed == 0 else MAX_IMAGES, small)
            sizes = conv.sizes_at(case)
            variant = template.chosen(sizes)
            assert variant, f"no variant for {sizes}"
            found.append((case, concrete_plan(template, variant, sizes)))
    return found


@pytest.mark.parametrize("conv", [*convolutions(), *transposed(), *gated()], ids=str)
def test_matches_float64_at_any_size(conv: DynamicConv) -> None:
    if conv.case.dtype == "bfloat16" and gpu(0).arch <= NO_BF16_ARCH:
        pytest.skip("the GPU has no bfloat16")
    compile_native()
    plans = described(conv)
    compile_all((step.kernel for _, plan in plans for step in plan.steps if isinstance(step, Launch)), gpu(0))
    for case, plan in plans:
        arrays = case.arrays()
        expected, magnitude = case.expect(arrays)
        spec = TensorSpec((case.n, *case.y_sizes, case.m), case.dtype, case.aligned)
        assert plan.outputs[0].shape == spec.shape
        read = [upload(value, case.aligned) for value in arrays.values()]
        written = upload(np.full(spec.shape, np.nan, NUMPY[case.dtype]), case.aligned)
        launch(plan, read, [written])
        y = result(written, spec, case.aligned).astype(np.float64)
        slack = SUMS["tf32" if case.tf32 and case.dtype == "float32" else "fp32"] * (magnitude + np.abs(expected))
        slack = slack + (0 if case.dtype == "float32" else ACTIVATION_16) * np.abs(expected)
        excess = np.abs(y - expected) - (slack + RELATIVE[case.dtype] * np.abs(expected) + 1e-7)
        place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
        told = f"{case} at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
        assert (excess <= 0).all(), told
