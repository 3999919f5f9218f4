"""Plan templates of gates of channels: any batch, height and width, by few kernels, which all compile."""

from __future__ import annotations

import random

import pytest
from architectures import A100, DEVICES, H200, check_compiles, to_compile
from gate_cases import SqueezeCase
from sampling import sampled
from template_checks import check_template, template_of

from onnxfuse.runtime.plan import Device, FusedNode, Kernel, TensorSpec

pytestmark = pytest.mark.usefixtures("no_cublaslt")  # whose products follow the mean before sm_90
MAX_KERNELS = 24  # of three nodes
DIMS = ((-1, 28, 28), (-1, -2, -3), (1, -1, -2))
CASES = [SqueezeCase(1, (28, 28), c, s) for c, s in ((144, 6), (960, 240), (33, 7))]


def described(case: SqueezeCase, dims: tuple[int, ...]) -> tuple[FusedNode, tuple[TensorSpec, ...]]:
    """Return a node and its inputs; the number of a dynamic size k is -1 - k."""
    x, *weights = case.specs()
    return case.node(), (TensorSpec((*dims, case.channels), x.dtype), *weights)


@pytest.mark.parametrize("device", [H200, A100], ids=lambda device: device.name)
@pytest.mark.parametrize(("case", "dims"), sampled([(c, d) for c in CASES for d in DIMS], 4), ids=str)
def test_templates_say_what_their_host_says(case: SqueezeCase, dims: tuple[int, ...], device: Device) -> None:
    node, inputs = described(case, dims)

    def sizes(seed: int) -> list[int]:
        chance = random.Random(seed)
        return [int(200 ** chance.random()) for dim in dims if dim < 0]

    check_template(node, inputs, device, max_kernels=MAX_KERNELS, sizes=sizes)


@pytest.mark.parametrize("device", sampled(DEVICES, len(DEVICES)), ids=lambda device: device.name)
def test_kernels_compile(device: Device) -> None:
    def kernels_of(device: Device) -> list[Kernel]:
        found = (template_of(*described(case, dims), device) for case in CASES for dims in DIMS[:2])
        return [kernel for template in found for kernel in template.kernels if kernel.source == "squeeze_excite"]

    for kernel in to_compile(device, kernels_of):
        check_compiles(kernel, device, stack=0)
