"""Gates of channels on a GPU against float64: in front of products, and in two launches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from conv_cases import ConvCase
from gate_cases import BOTH, gated_convs
from kernel_runs import compile_all, compile_native
from test_conv_mma_gpu import check

from onnxfuse.kernels.conv import host as conv_host
from onnxfuse.kernels.conv import matrix
from onnxfuse.kernels.gemm import mma
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch, TensorSpec

pytestmark = pytest.mark.gpu

# Of networks: EfficientNet-B0's and MobileNetV3's blocks at batches of 1 and 32.
BLOCKS = (
    (112, 32, 16, 8), (56, 144, 24, 6), (28, 240, 40, 10), (14, 480, 112, 20), (7, 1152, 192, 48), (7, 960, 160, 240),
)  # fmt: skip


def convs() -> Iterator[ConvCase]:
    yield from gated_convs()
    for n, (side, c, m, _) in itertools.product((1, 32), BLOCKS):
        yield ConvCase(n, c, m, (side, side), (1, 1), extra=BOTH, activation="none")


def ways_of(case: ConvCase, device: Device) -> list[Implementation]:
    """Return the tiles with the gate in front, and what the host offers, two launches among it."""
    gemm, node = matrix.as_gemm(case.problem()), case.node()
    tiles = [mma.implementation(gemm, config, device) for config in mma.GATE_CONFIGS]
    specs = [TensorSpec(a.shape, case.dtype, case.aligned) for a in case.arrays().values()]
    assert conv_host.supports(node, [case.dtype] * len(specs), device) is None
    offered = [
        Implementation(f"plan {i}", plan.steps, plan.scratch)
        for i, plan in enumerate(conv_host.candidates(node, specs, device))
    ]
    return [*tiles, *offered]


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
