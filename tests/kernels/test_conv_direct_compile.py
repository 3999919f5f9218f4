"""Depthwise, grouped and stem convolutions compile for every architecture, and stay in registers; no GPU needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
from architectures import A100, DEVICES, H200, T4, check_compiles, to_compile
from conv_cases import (
    DEPTHWISE,
    DEPTHWISE_MMA,
    DEPTHWISE_SLIDING,
    GROUPED,
    STEMS,
    WITH_VECTORS,
    ConvCase,
    depthwise,
    image,
    large_shapes,
)
from sampling import by_parts

from onnxfuse.kernels.conv import depthwise as depthwise_host
from onnxfuse.kernels.conv import depthwise_mma, depthwise_sliding, grouped, host, stem
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, Kernel, Launch

PARTS = 126  # of the kernels, of which one is compiled in a plain run

HOSTS = {
    "depthwise": depthwise_host,
    "depthwise_mma": depthwise_mma,
    "depthwise_sliding": depthwise_sliding,
    "grouped": grouped,
    "stem": stem,
}
SMALL = {
    "depthwise": DEPTHWISE,
    "depthwise_mma": DEPTHWISE_MMA,
    "depthwise_sliding": DEPTHWISE_SLIDING,
    "grouped": GROUPED,
    "stem": STEMS,
}
LARGE = {
    **large_shapes(),
    "depthwise_mma": large_shapes()["depthwise"],
    "depthwise_sliding": [case for case in large_shapes()["depthwise"] if case.strides == (1, 1)],
}


def ways(device: Device) -> Iterator[Implementation]:
    """Yield all implementations of well-known convolutions in fp16, and the first of others and of small ones."""
    for kind, cases in LARGE.items():
        for case in cases:
            yield from HOSTS[kind].implementations(case.problem(), device)
        for dtype in ("float32", "bfloat16"):
            other = dataclasses.replace(cases[0], dtype=dtype, tf32=True, extra=("bias", "residual"))
            yield from HOSTS[kind].implementations(other.problem(), device)[:1]
    for kind, cases in SMALL.items():
        for case in (*cases, *WITH_VECTORS[kind]):
            yield from HOSTS[kind].implementations(case.problem(), device)[:1]


@functools.cache
def launches(device: Device) -> list[Launch]:
    steps = [step for way in ways(device) for step in way.steps]
    return [step for step in steps if isinstance(step, Launch)]


def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of these implementations, each once."""
    return list({repr(step.kernel): step.kernel for step in launches(device)}.values())


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device, stack=0)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_launches_fit_the_device(device: Device) -> None:
    for step in launches(device):
        assert 0 < step.grid[0] < 2**31 and 0 < step.grid[1] <= 65535 and step.grid[2] == 1
        assert 0 < step.block[0] <= 1024
        assert step.shared <= device.shared_per_block
        assert step.pdl == (device.arch >= 90)


@pytest.mark.parametrize("kind", HOSTS)
def test_implementations_are_few_and_differ(kind: str) -> None:
    for case in (*LARGE[kind], *SMALL[kind]):
        found = HOSTS[kind].implementations(case.problem(), H200)
        assert 0 < len(found) <= 6
        assert len({way.name for way in found}) == len(found)


@pytest.mark.parametrize("kind", HOSTS)
def test_an_empty_batch_has_no_implementation(kind: str) -> None:
    for case in SMALL[kind]:
        assert HOSTS[kind].implementations(dataclasses.replace(case, n=0).problem(), H200) == []


def test_what_other_kernels_run() -> None:
    """A channel multiplier, exact fp32, old GPUs, many channels: conv_mma.cu takes what these kernels leave."""
    multiplier = ConvCase(1, 8, 24, (9, 9), (3, 3), group=8, w_hwio=True)
    assert depthwise_host.implementations(multiplier.problem(), H200) == []
    exact = image(1, 3, 16, (20, 24), (7, 7), dtype="float32")
    assert stem.implementations(exact.problem(), H200) == []
    assert stem.implementations(image(1, 3, 16, (20, 24), (7, 7)).problem(), T4) == []
    assert stem.implementations(image(1, 5, 16, (20, 24), (7, 7)).problem(), A100) == []
    assert stem.implementations(image(1, 3, 16, (20, 24), (3, 3), (), (), (2, 2)).problem(), A100) == []
    assert grouped.implementations(ConvCase(1, 256, 256, (9, 9), (3, 3), group=2).problem(), H200) == []
    assert grouped.implementations(ConvCase(1, 12, 12, (9, 9), (3, 3), group=3).problem(), H200) == []
    assert grouped.implementations(ConvCase(1, 64, 64, (9, 9), (3, 3), group=8, aligned=False).problem(), H200) == []


def test_depthwise_convolutions_have_both_kinds() -> None:
    """The tuner compares the matrix units with CUDA cores; the latter alone run what the former do not compute."""
    large = large_shapes()["depthwise"][1]
    names = [way.name for way in host.implementations(large.problem(), H200) if way.name.startswith("depthwise")]
    assert [sum(f"depthwise_{kind}" in name for name in names) for kind in ("sliding", "mma", "")] == [3, 3, 8]
    others = (
        dataclasses.replace(large, dtype="float32", tf32=True),
        dataclasses.replace(large, aligned=False),
        depthwise(1, 20, (28, 28), (5, 5)),
        depthwise(1, 16, (28, 28), (9, 9)),
        depthwise(1, 16, (8, 8, 8), (3, 3, 3)),
    )
    for case in others:
        assert depthwise_mma.implementations(case.problem(), H200) == []
        assert depthwise_host.implementations(case.problem(), H200)
    assert depthwise_mma.implementations(large.problem(), T4) == []


def test_a_filter_of_very_many_taps_is_left_to_others() -> None:
    """The weights of one channel do not fit shared memory."""
    long = depthwise(1, 8, (70000,), (60000,))
    assert depthwise_host.implementations(long.problem(), H200) == []
