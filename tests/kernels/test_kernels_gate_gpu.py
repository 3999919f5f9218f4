"""Gates of channels on a GPU against float64: in front of products, in two launches, and what computes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from conv_cases import NUMPY, ConvCase
from gate_cases import BOTH, SqueezeCase, gated_convs, squeezes
from kernel_runs import RELATIVE, compile_all, compile_native, launch, result, upload
from template_checks import concrete_plan, template_of
from test_conv_mma_gpu import check
from test_templates_squeeze import CASES, DIMS, described

from onnxfuse.kernels.conv import host as conv_host
from onnxfuse.kernels.conv import matrix
from onnxfuse.kernels.gemm import hopper, mma
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.squeeze_excite import host
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

# Of networks: EfficientNet-B0's and MobileNetV3's blocks at batches of 1 and 32.
BLOCKS = (
    (112, 32, 16, 8), (56, 144, 24, 6), (28, 240, 40, 10), (14, 480, 112, 20), (7, 1152, 192, 48), (7, 960, 160, 240),
)  # fmt: skip
ERRORS = {"float32": 4e-6, "float16": 6e-4, "bfloat16": 4.5e-3}  # of gates, relative to 1 plus their size


def convs() -> Iterator[ConvCase]:
    yield from gated_convs()
    for n, (side, c, m, _) in itertools.product((1, 32), BLOCKS):
        yield ConvCase(n, c, m, (side, side), (1, 1), extra=BOTH, activation="none")


def ways_of(case: ConvCase, device: Device) -> list[Implementation]:
    """Return tiles of both kinds with the gate in front, and what the host offers, two launches among it."""
    gemm, node = matrix.as_gemm(case.problem()), case.node()
    tiles = [mma.implementation(gemm, config, device) for config in mma.GATE_CONFIGS]
    tiles += hopper.implementations(gemm, device)
    splits = [config for config in hopper.CONFIGS if config.split_k > 1 and hopper.fits(gemm, config, device)]
    if hopper.implementations(gemm, device) and splits:
        tiles += [hopper.implementation(gemm, splits[case.c % len(splits)], device)]
    specs = [TensorSpec(a.shape, case.dtype, case.aligned) for a in case.arrays().values()]
    assert conv_host.supports(node, [case.dtype] * len(specs), device) is None
    offered = [
        Implementation(f"plan {i}", plan.steps, plan.scratch)
        for i, plan in enumerate(conv_host.candidates(node, specs, device))
    ]
    return [*tiles, *offered]


def squeezed() -> Iterator[SqueezeCase]:
    yield from squeezes()
    for n, (side, c, _, s) in itertools.product((1, 2, 33), BLOCKS):
        yield SqueezeCase(n, (side, side), c, s)


def plans_of(case: SqueezeCase, device: Device) -> list[Plan]:
    return host.candidates(case.node(), case.specs(), replace(device, tf32=False))


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile what the tests launch, by several compilers at once."""
    compile_native()
    kernels = []
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") and item.path == request.path else None
        if isinstance(case, ConvCase):
            ways = ways_of(case, replace(gpu(0), tf32=case.tf32))
            kernels += [step.kernel for way in ways for step in way.steps if isinstance(step, Launch)]
        if isinstance(case, SqueezeCase):
            plans = plans_of(case, gpu(0))
            kernels += [step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)]
    compile_all(kernels, gpu(0))


@pytest.mark.parametrize("case", list(convs()), ids=str)
def test_products_of_gated_images(case: ConvCase) -> None:
    device = replace(gpu(0), tf32=case.tf32)
    if device.arch < mma.MMA_ARCH:
        pytest.skip(f"products in tiles of mma.sync need compute capability {mma.MMA_ARCH}")
    check(case, ways_of(case, device), exact=False)


def test_products_of_gated_images_in_float32_without_tf32() -> None:
    """No tile takes them, so that the gated image is stored first."""
    case = ConvCase(2, 64, 24, (9, 7), (1, 1), dtype="float32", extra=BOTH)
    device = replace(gpu(0), tf32=False)
    specs = [TensorSpec(a.shape, case.dtype) for a in case.arrays().values()]
    plans = conv_host.candidates(case.node(), specs, device)
    assert plans and all(len(plan.steps) > 1 for plan in plans)
    check(case, [Implementation("two", plan.steps, plan.scratch) for plan in plans], exact=True)


def check_gate(case: SqueezeCase, plans: list[Plan]) -> None:
    arrays = case.arrays()
    expected = case.expect(arrays)
    read = [upload(value, case.aligned) for value in arrays.values()]
    for plan in plans:
        (spec,) = plan.outputs
        written = upload(np.full(spec.shape, np.nan, NUMPY[case.dtype]), case.aligned)
        launch(plan, read, [written])
        found = result(written, spec, case.aligned).astype(np.float64)
        rounded = 1 if len(plan.steps) == 1 else 6  # the mean and the first product's results are rounded between steps
        limit = (rounded * ERRORS[case.dtype] + RELATIVE[case.dtype]) * (1 + np.abs(expected))
        assert found.shape == expected.shape
        np.testing.assert_array_less(np.abs(found - expected), limit, err_msg=f"{len(plan.steps)} launches")


@pytest.mark.parametrize("case", list(squeezed()), ids=str)
def test_gates_of_images(case: SqueezeCase) -> None:
    check_gate(case, plans_of(case, gpu(0)))


@pytest.mark.parametrize(("case", "dims"), [(c, d) for c in CASES for d in DIMS], ids=str)
def test_gates_at_any_size(case: SqueezeCase, dims: tuple[int, ...]) -> None:
    template = template_of(*described(case, dims), gpu(0))
    for n, h, w in ((1, 1, 1), (3, 31, 9), (35, 14, 14)):
        whole = (n, h, w)
        found = tuple(size if dim < 0 else dim for size, dim in zip(whole, dims, strict=True))
        sizes = [size for size, dim in zip(whole, dims, strict=True) if dim < 0]
        variant = template.chosen(sizes)
        assert variant is not None
        check_gate(replace(case, n=found[0], sizes=found[1:]), [concrete_plan(template, variant, sizes)])


def test_results_are_the_same_in_every_run() -> None:
    """Sums over pixels, channels and blocks have a fixed order."""
    case = SqueezeCase(33, (14, 14), 480, 20)
    (spec,), arrays = plans_of(case, gpu(0))[0].outputs, case.arrays()
    read, found = [upload(value) for value in arrays.values()], []
    for _ in range(20):
        written = upload(np.zeros(spec.shape, NUMPY[case.dtype]))
        launch(plans_of(case, gpu(0))[0], read, [written])
        found.append(result(written, spec, True).tobytes())
    assert len(set(found)) == 1
