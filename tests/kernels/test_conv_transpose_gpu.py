"""Transposed convolutions against float64: phases, layouts, dtypes, alignment, epilogues, and a fused node's plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conv_cases import NUMPY
from conv_transpose_cases import (
    BOTH,
    DEPTHWISE,
    HOPPER,
    SAME,
    WITH_VECTORS,
    ConvTransposeCase,
    depthwise,
    products,
    shapes,
    shuffled,
    widths,
)
from kernel_runs import RELATIVE, compile_all, compile_native, in_turns, launch, result, upload

from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.conv.mma import MMA_ARCH, ConvConfig, is_exact, k_tiles
from onnxfuse.kernels.conv_transpose import depthwise as depthwise_host
from onnxfuse.kernels.conv_transpose import hopper, host, mma
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu

# The error of sums in fp32, relative to the sum of their terms' magnitudes; with TF32, two operands are rounded.
SUMS = {"fp32": 1e-6, "tf32": 2.0**-10}
ACTIVATION_16 = 2.5e-5  # relative, of an activation for 16-bit results, which a residual may cancel


def epilogues() -> Iterator[ConvTransposeCase]:
    for extra in ((), ("bias",), ("residual",), BOTH):
        for residual_first in (True, False)[: 1 + ("residual" in extra)]:
            given: dict[str, Any] = {"extra": extra, "residual_first": residual_first}
            yield ConvTransposeCase(2, 32, 64, (9, 9), (3, 3), (2, 2), SAME, **given)
            yield shuffled(2, 32, 60, (9, 7), (2, 2), activation="silu", **given)
            yield depthwise(2, 32, (9, 7), (4, 4), (2, 2), SAME, activation="silu", **given)
    for activation in sorted(set(ACTIVATIONS) - {"relu"}):
        yield ConvTransposeCase(2, 32, 64, (9, 9), (3, 3), (2, 2), SAME, activation=activation)
    yield from (*WITH_VECTORS["mma"], *WITH_VECTORS["depthwise"])


def large() -> Iterator[ConvTransposeCase]:
    """Yield convolutions of more tiles than multiprocessors, of much k, and of networks."""
    yield ConvTransposeCase(4, 64, 72, (61, 59), (4, 4), (2, 2), SAME, extra=BOTH)
    yield ConvTransposeCase(1, 1024, 64, (8, 8), (4, 4), (2, 2), SAME, extra=BOTH)
    yield ConvTransposeCase(1, 511, 130, (7, 7), (3, 3), (2, 2), SAME, output_padding=(1, 1))
    yield ConvTransposeCase(1, 100, 3, (40, 40), (4, 4), (2, 2), SAME, activation="tanh")
    yield ConvTransposeCase(1, 21, 21, (12, 12), (64, 64), (32, 32), (16, 16, 16, 16), extra=())
    yield shuffled(2, 256, 128, (32, 32), (2, 2))
    yield shuffled(2, 64, 1, (160, 160), (2, 2), activation="sigmoid")
    yield depthwise(2, 64, (64, 64), (4, 4), (2, 2), SAME)
    yield depthwise(1, 21, (12, 12), (64, 64), (32, 32), (16, 16, 16, 16), extra=())


@pytest.fixture(scope="module")
def device() -> Device:
    return gpu(0)


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile what the tests launch, by several compilers at once: one at a time, these kernels take minutes."""
    compile_native()
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if isinstance(case, ConvTransposeCase) and item.path == request.path:
            ways = ways_by_wgmma if "wgmma" in item.name else ways_of
            steps = (step for way in ways(case, gpu(0)) for step in way.steps)
            compile_all((step.kernel for step in steps if isinstance(step, Launch)), gpu(0))


def ways_of(case: ConvTransposeCase, device: Device) -> list[Implementation]:
    """Return every vector of a depthwise one; else a third of the tiles, and one with slices of k."""
    conv = case.problem()
    if case.w_hwio:
        return [depthwise_host.implementation(conv, width, device) for width in depthwise_host.widths(conv)]
    every = mma.configs(conv, device)
    found = in_turns(every, case, 3)
    if k_tiles(mma.equivalent(conv), found[0].tile) > 1:
        found.append(ConvConfig(found[0].tile, 3))
    return [mma.implementation(conv, config, device) for config in dict.fromkeys(found)]


def ways_by_wgmma(case: ConvTransposeCase, device: Device) -> list[Implementation]:
    """Return half of the tiles, in turns from case to case."""
    conv = case.problem()
    found = hopper.fitting(conv, device) if hopper.why_not(conv, device) is None else []
    return [hopper.implementation(conv, config, device) for config in in_turns(found, case, 2)]


def check(case: ConvTransposeCase, ways: Sequence[Implementation | Plan], device: Device) -> None:
    arrays = case.arrays()
    expected, magnitude = case.expect(arrays)
    rounded = case.dtype == "float32" and not case.w_hwio and not is_exact(case.problem(), device)
    slack = SUMS["tf32" if rounded else "fp32"] * (magnitude + np.abs(expected))
    if case.dtype != "float32":
        slack = slack + ACTIVATION_16 * np.abs(expected)
        if "residual" in case.extra and not case.residual_first:
            slack = slack + ACTIVATION_16 * np.abs(expected - arrays["residual"].astype(np.float64))
    tiny = 1e-7 if case.dtype == "float16" else 1e-30  # fp16 has no smaller number
    spec = TensorSpec((case.n, *case.y_sizes, case.m), case.dtype, case.aligned)
    read = [upload(value, case.aligned) for value in arrays.values()]
    assert ways
    for number, way in enumerate(ways):
        written = upload(np.full(spec.shape, np.nan, NUMPY[case.dtype]), case.aligned)
        launch(Plan((spec,), way.steps, way.scratch), read, [written])
        y = result(written, spec, case.aligned).astype(np.float64)
        excess = np.abs(y - expected) - (slack + RELATIVE[case.dtype] * np.abs(expected) + tiny)
        place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
        told = f"way {number} at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
        assert (excess <= 0).all(), told


def check_all(case: ConvTransposeCase, device: Device) -> None:
    if case.dtype == "bfloat16" and device.arch < MMA_ARCH:
        pytest.skip(f"bfloat16 needs compute capability {MMA_ARCH}")
    check(case, ways_of(case, device), device)


@pytest.mark.parametrize("case", list(shapes()), ids=str)
def test_shapes(device: Device, case: ConvTransposeCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize("case", list(widths()), ids=str)
def test_widths(device: Device, case: ConvTransposeCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize("case", list(products()), ids=str)
def test_products(device: Device, case: ConvTransposeCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize("case", DEPTHWISE, ids=str)
def test_depthwise(device: Device, case: ConvTransposeCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize("case", list(epilogues()), ids=str)
def test_epilogues(device: Device, case: ConvTransposeCase) -> None:
    check_all(case, device)


@pytest.mark.parametrize("case", list(large()), ids=str)
def test_large(device: Device, case: ConvTransposeCase) -> None:
    check_all(case, device)


def by_wgmma() -> Iterator[ConvTransposeCase]:
    yield from (*HOPPER, *WITH_VECTORS["hopper"])
    yield ConvTransposeCase(32, 512, 256, (16, 16), (4, 4), (2, 2), SAME)
    yield shuffled(8, 256, 128, (32, 32), (2, 2), extra=BOTH)
    yield shuffled(2, 64, 64, (160, 160), (2, 2), dtype="bfloat16", extra=BOTH, residual_first=False)
    for activation in ("none", "silu", "gelu"):
        yield ConvTransposeCase(2, 64, 128, (24, 24), (4, 4), (2, 2), SAME, activation=activation)


@pytest.mark.parametrize("case", list(by_wgmma()), ids=str)
def test_tiles_by_wgmma(device: Device, case: ConvTransposeCase) -> None:
    if device.arch != 90:
        pytest.skip("wgmma needs compute capability 9.0")
    check(case, ways_by_wgmma(case, device), device)


@pytest.mark.parametrize(
    "case",
    [
        ConvTransposeCase(2, 64, 64, (13, 11), (4, 4), (2, 2), SAME, extra=()),
        ConvTransposeCase(2, 64, 64, (9, 11), (3, 3), (2, 2), SAME, extra=(), activation="none", output_padding=(1, 1)),
        shuffled(2, 64, 64, (13, 11), (2, 2), extra=(), activation="none"),
        shuffled(2, 64, 64, (16, 16), (2, 2), extra=BOTH),
        ConvTransposeCase(2, 64, 64, (13, 11), (4, 4), (2, 2), SAME, group=4, extra=BOTH),
    ],
    ids=str,
)  # fmt: skip
def test_every_plan_of_a_host(device: Device, case: ConvTransposeCase) -> None:
    """cuDNN's are among them where it has engines that need not be compiled."""
    check(case, host.implementations(case.problem(), device), device)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_plans_of_older_gpus(device: Device, dtype: str) -> None:
    """The plans of a GPU with less shared memory run here too."""
    older = replace(device, arch=80, shared_per_block=101376)
    for case in (
        ConvTransposeCase(2, 64, 64, (13, 11), (3, 3), (2, 2), SAME, dtype=dtype, extra=BOTH),
        shuffled(2, 64, 64, (13, 11), (2, 2), dtype=dtype, extra=BOTH),
    ):
        check(case, mma.implementations(case.problem(), older), older)
