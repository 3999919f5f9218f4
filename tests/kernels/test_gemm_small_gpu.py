"""Kernels of few rows against float64, in configs that hosts choose for other shapes and GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import test_gemm_gpu
from kernel_runs import DTYPES
from test_gemm_gpu import Case, gpu

from onnxfuse.kernels.gemm import small
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.gemm.stream import TMA_ARCH, StreamConfig, fits, implementation
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device

__all__ = ["gpu"]
pytestmark = pytest.mark.gpu

# Tiles of 8 to 64 rows; boxes of half a swizzled row, a whole one and two; one warp and many, which have a whole ring,
# a part or nothing of k; sums of one block and of a cluster.
STREAMS = [
    StreamConfig(*sizes)
    for sizes in [
        (8, 32, 3), (8, 64, 2, 8), (8, 128, 2, 2, 8), (16, 32, 4, 1), (16, 64, 2, 4, 2), (16, 128, 3, 2, 4),
        (32, 64, 2, 4, 8), (32, 128, 2, 2), (64, 32, 2, 4), (64, 64, 3, 2, 2),
    ]
]  # fmt: skip
# One vector of everything; rows and columns beyond the last tile; k beyond the last stage, less than the warps have,
# and several rounds of every ring.
SIZES = [(1, 8, 8), (8, 264, 1000), (33, 72, 3000), (64, 1024, 512)]


def streamed() -> Iterator[Case]:
    for i, ((m, n, k), layout) in enumerate(itertools.product(SIZES, ("kn", "nk"))):
        dtypes = ("float16", "bfloat16") if i % 4 < 2 else ("bfloat16", "float16")
        yield Case(m, n, k, dtypes[0], layout, ("bias", "column_scale", "residual"), "gelu")
        yield Case(m, n, k, dtypes[1], layout, ("bias", "up_bias"), "silu", gated=True)


def older() -> Iterator[Case]:
    for (m, n, k), dtype, layout in itertools.product(SIZES, DTYPES, ("kn", "nk")):
        yield Case(m, n, k, dtype, layout, ("bias", "residual"), "relu", tf32=dtype == "float32")


@pytest.mark.parametrize("case", list(streamed()), ids=str)
def test_every_stream(gpu: Device, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    if gpu.arch < TMA_ARCH:
        pytest.skip(f"TMA needs compute capability {TMA_ARCH}")

    def implementations_of(gemm: Gemm, device: Device) -> tuple[list[Implementation], list[Implementation]]:
        chosen = [stream for stream in STREAMS if fits(gemm, stream, device)]
        gemms = [replace(gemm, weights_constant=i % 2 == 0) for i in range(len(chosen))]
        return [implementation(each, stream) for each, stream in zip(gemms, chosen, strict=True)], []

    monkeypatch.setattr(test_gemm_gpu, "implementations_of", implementations_of)
    test_gemm_gpu.check_all(case, gpu)


@pytest.mark.parametrize("case", list(older()), ids=str)
def test_what_older_gpus_run(gpu: Device, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def implementations_of(gemm: Gemm, device: Device) -> tuple[list[Implementation], list[Implementation]]:
        return small.implementations(gemm, replace(device, arch=80)), []

    monkeypatch.setattr(test_gemm_gpu, "implementations_of", implementations_of)
    test_gemm_gpu.check_all(case, gpu)
