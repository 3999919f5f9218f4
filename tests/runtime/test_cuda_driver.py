"""What the CUDA driver says of GPUs; the driver is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from stand_in import Stage, stage

from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.cuda_driver import DriverError
from onnxfuse.runtime.plan import Device


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    result = stage(monkeypatch)
    yield result
    result.cuda.fake_gpus(2)


def test_a_gpu_is_described(driver: Stage) -> None:
    assert cuda_driver.unavailable() is None
    assert cuda_driver.gpu_count() == 2
    found = cuda_driver.gpu(1)
    assert (found, found.ordinal) == (Device("stand-in", 90, 132, 232448), 1)


def test_a_gpu_that_is_not_there_is_an_error(driver: Stage) -> None:
    with pytest.raises(DriverError, match="the CUDA driver cannot be used: cuDeviceGet returns 101"):
        cuda_driver.gpu(7)


@pytest.mark.parametrize(
    "count, why",
    [(0, "the CUDA driver finds no GPU"), (-1, "the CUDA driver cannot be used: cuDeviceGetCount returns 100")],
)
def test_a_machine_without_gpus_says_so(driver: Stage, count: int, why: str) -> None:
    driver.cuda.fake_gpus(count)
    assert cuda_driver.unavailable() == why


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXFUSE_LIBCUDA", "/none/libcuda.so")
    assert str(cuda_driver.unavailable()).startswith("the CUDA driver cannot be opened: /none/libcuda.so")
