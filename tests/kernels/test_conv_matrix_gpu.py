"""Pointwise convolutions by every kind of kernel of the matrix products, against float64: residuals, dtypes, rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from conv_cases import BOTH, ConvCase
from kernel_runs import compile_all, compile_native
from test_conv_mma_gpu import KINDS, check

from onnxfuse.kernels.conv import matrix
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.gemm import cublaslt, hopper, mma, small
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch

pytestmark = pytest.mark.gpu

# One pixel, few pixels, those of a late stage and of an early one; channels that are whole vectors and that are not.
IMAGES = ((1, (1, 1)), (2, (2, 4)), (2, (7, 5)), (4, (28, 27)))
CHANNELS = ((256, 128), (96, 264), (65, 130), (64, 33))
MAX_OF_A_KIND = 3


def cases() -> Iterator[ConvCase]:
    for (n, sizes), (c, m), (dtype, tf32) in itertools.product(IMAGES, CHANNELS, KINDS):
        for residual_first in (True, False):
            yield ConvCase(n, c, m, sizes, (1, 1), dtype=dtype, tf32=tf32, extra=BOTH, residual_first=residual_first)
    for residual_first, activation in itertools.product((True, False), ("silu", "none")):
        for n, sizes in IMAGES:
            yield ConvCase(n, 128, 96, sizes, (1, 1), extra=("residual",), residual_first=residual_first,
                           activation=activation)  # fmt: skip
    for n, sizes in IMAGES:
        yield ConvCase(n, 128, 96, sizes, (1, 1), extra=BOTH, aligned=False)
        yield ConvCase(n, 128, 96, sizes, (1, 1), extra=(), constant=False)
    yield ConvCase(2, 64, 64, (35,), (1,), extra=BOTH)
    yield ConvCase(2, 64, 64, (5, 6, 7), (1, 1, 1), extra=BOTH)


def ways_of(conv: Conv, device: Device) -> list[Implementation]:
    """Return what the host offers, and some of each kind, also of those that it holds to be slower."""
    gemm = matrix.as_gemm(conv)
    kinds = (
        small.implementations, hopper.implementations, mma.implementations, mma.implementations_of_copies,
        cublaslt.implementations,
    )  # fmt: skip
    every = [*matrix.implementations(conv, device), *(way for of in kinds for way in of(gemm, device)[:MAX_OF_A_KIND])]
    return list({way.name: way for way in every}.values())


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile what the tests launch, by several compilers at once: one at a time, these kernels take minutes."""
    compile_native()
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec"):
            device, case = gpu(0), item.callspec.params["case"]
            steps = [step for way in ways_of(case.problem(), with_tf32(case, device)) for step in way.steps]
            compile_all((step.kernel for step in steps if isinstance(step, Launch)), device)


def with_tf32(case: ConvCase, device: Device) -> Device:
    return replace(device, tf32=case.tf32)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_kind_matches_float64(case: ConvCase) -> None:
    device = with_tf32(case, gpu(0))
    if case.dtype == "bfloat16" and device.arch < mma.MMA_ARCH:
        pytest.skip(f"bfloat16 needs compute capability {mma.MMA_ARCH}")
    check(case, ways_of(case.problem(), device), exact=not case.tf32)
