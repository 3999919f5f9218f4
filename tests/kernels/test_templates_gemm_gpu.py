"""Plans of templates of matrix products on a GPU: every variant that is right for a number of rows, against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_runs import NUMPY, compile_all, compile_native, lacks, launch, result, upload
from template_checks import concrete_plan, right_variants, template_of
from test_gemm_gpu import Case, expect, gpu, set_up
from test_gemm_hopper_gpu import check

from onnxfuse.kernels.gemm import hopper
from onnxfuse.kernels.gemm.hopper import HopperConfig
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec
from onnxfuse.runtime.template import Template

__all__ = ["gpu"]
pytestmark = pytest.mark.gpu

ALL = ("bias", "column_scale", "residual")
# One row; each tile of few rows, its last row and the one behind it; more rows than any tile; odd numbers of rows;
# more tiles than an H200 has multiprocessors, and many times as many.
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 100, 127, 128, 129, 191, 255, 300, 683, 1000, 2100, 4099, 9001)
# With one row, of which templates make any number: whole vectors of everything, and long k, where blocks split it; rows
# that begin anywhere; both layouts; float32.
CASES = (
    Case(1, 768, 768, "float16", "kn", ALL, "gelu"),
    Case(1, 768, 3072, "bfloat16", "nk", ("bias", "residual")),
    Case(1, 1024, 520, "float16", "nk", ("bias", "up_bias"), "silu", gated=True),
    Case(1, 257, 771, "float16", "kn", ("bias", "residual"), "relu"),
    Case(1, 770, 770, "bfloat16", "nk", ("bias", "up_bias"), "silu", gated=True),
    Case(1, 768, 256, "float16", "kn", ALL, "gelu", aligned=False),
    Case(1, 320, 640, "float32", "kn", ("bias", "residual"), "gelu", tf32=True),
    Case(1, 320, 640, "float32", "nk", ("bias", "up_bias"), "silu", gated=True, tf32=True),
)
ARCHITECTURES = (90, 80, 75)  # whose plans are made; an H200 runs those of older GPUs as well


def template(case: Case, device: Device) -> Template:
    """Return the template of a product, of which the rows are dynamic."""
    arrays = case.arrays()
    dynamic = ("x", "residual")
    inputs = [
        TensorSpec((-1, *each.shape[1:]) if name in dynamic else each.shape, case.dtype, case.aligned)
        for name, each in arrays.items()
    ]
    return template_of(case.node(tuple(arrays)), inputs, device)


def device_of(case: Case, gpu: Device, arch: int) -> Device:
    """Return the GPU as one of an older architecture."""
    if gpu.arch < arch:
        pytest.skip(f"{gpu.name} runs no plan for sm_{arch}")
    if case.dtype == "bfloat16" and arch < 80:
        pytest.skip("no GPU before sm_80 has bfloat16 products")
    return dataclasses.replace(set_up(case, gpu), arch=arch)


def run(plan: Plan, case: Case, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Run a plan, and check that it writes nothing else."""
    (y,) = plan.outputs
    assert y.shape == (case.m, case.n)
    read = [upload(value, case.aligned) for value in arrays.values()]
    written = upload(np.full(y.shape, np.nan, NUMPY[case.dtype]), case.aligned)
    launch(plan, read, [written])
    return result(written, y, case.aligned)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("product", CASES, ids=str)
def test_every_variant_at_every_size_that_it_is_right_for(gpu: Device, product: Case, arch: int) -> None:
    """Also of those that the template would not choose there: where none is nearly the best, any of them may be."""
    compile_native()
    made = template(product, device_of(product, gpu, arch))
    compile_all((kernel for each in made.variants for kernel in each.kernels), gpu)
    for m in ROWS:
        at, ran = dataclasses.replace(product, m=m), 0
        arrays = at.arrays()
        expected, slack = expect(at, arrays)
        for variant in right_variants(made, [m]):
            plan = concrete_plan(made, variant, [m])
            assert lacks(plan, gpu) is None
            names = ", ".join(kernel.source for kernel in variant.kernels)
            told = f"{m} rows by {names or 'cuBLASLt'} of {variant.hints}"
            check(told, run(plan, at, arrays), expected, slack)
            ran += 1
        assert ran, f"no plan for {m} rows"


@pytest.mark.parametrize("m", [100, 1000, 3001])
@pytest.mark.parametrize("config", [each for each in hopper.CONFIGS if each.split_k > 1], ids=lambda each: each.name)
def test_clusters_that_share_tiles_may_be_more_than_the_gpu_has_room_for(
    gpu: Device, config: HopperConfig, m: int
) -> None:
    if gpu.arch != 90:
        pytest.skip("needs a Hopper GPU")
    case = Case(m, 776, 2048, "float16", "nk", ("bias", "residual"), "relu")
    arrays = case.arrays()
    gemm, y = case.product(gpu, arrays)
    way = hopper.implementation(gemm, config, gpu)
    assert isinstance(way.steps[-1], Launch)
    plan = Plan((y,), way.steps, way.scratch)
    check(way.name, run(plan, case, arrays), *expect(case, arrays))
