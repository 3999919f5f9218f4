"""Another GPU, driver, library, kernel or relevant option makes another environment."""

from __future__ import annotations

import dataclasses
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from onnxfuse.runtime import environment
from onnxfuse.runtime.environment import kernel_environment, session_environment
from onnxfuse.runtime.plan import Device

DEVICE = Device("NVIDIA H200", 90, 132, 227 * 1024)
CUDA = "CUDAExecutionProvider"


def test_another_gpu_or_setting_is_another_environment() -> None:
    one = kernel_environment(CUDA, DEVICE)
    assert kernel_environment(CUDA, dataclasses.replace(DEVICE, ordinal=1)) == one
    for other in (
        kernel_environment(CUDA, dataclasses.replace(DEVICE, name="NVIDIA L4")),
        kernel_environment(CUDA, dataclasses.replace(DEVICE, tf32=False)),
        kernel_environment("CPUExecutionProvider", DEVICE),
    ):
        assert other != one
    assert set(one) == {"provider", "gpu", "arch", "multiprocessors", "tf32", "driver", "nvrtc", "libraries",
                        "onnxfuse", "onnxruntime", "kernels"}  # fmt: skip


@pytest.mark.parametrize("options, same", [
    ({}, True), ({"device_id": 1, "gpu_mem_limit": 1 << 30, "enable_cuda_graph": "1"}, True),
    ({"prefer_nhwc": "0", "cudnn_conv_algo_search": "EXHAUSTIVE"}, True), ({"sdpa_kernel": False}, True),
    ({"prefer_nhwc": "1"}, False), ({"cudnn_conv_algo_search": "HEURISTIC"}, False), ({"sdpa_kernel": 2}, False),
    ({"an_option_of_later_versions": "yes"}, False),
])  # fmt: skip
def test_options_that_change_what_bodies_run_as_change_the_environment(options: dict[str, Any], same: bool) -> None:
    assert (session_environment(CUDA, DEVICE, options) == session_environment(CUDA, DEVICE, {})) == same


def test_texts_and_numbers_of_an_option_are_the_same() -> None:
    found = [session_environment(CUDA, DEVICE, {"prefer_nhwc": value}) for value in (1, "1", True, "true")]
    assert found == [found[0]] * 4


@pytest.mark.parametrize("name", ["driver_version", "nvrtc_version", "library_versions"])
def test_another_version_is_another_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    one = kernel_environment(CUDA, DEVICE)
    monkeypatch.setattr(environment, name, lambda *_: "other")
    assert kernel_environment(CUDA, DEVICE) != one


def test_another_onnxfuse_is_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxfuse's version is known without package metadata, which a frozen program lacks."""

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", missing)
    one = kernel_environment(CUDA, DEVICE)
    monkeypatch.setattr(environment, "__version__", "9.9")
    assert kernel_environment(CUDA, DEVICE) != one


def test_another_kernel_is_another_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import onnxfuse.kernels

    one = kernel_environment(CUDA, DEVICE)
    (tmp_path / "mine.cu").write_text("// mine")
    monkeypatch.setattr(onnxfuse.kernels, "__path__", [*onnxfuse.kernels.__path__, str(tmp_path)])
    assert kernel_environment(CUDA, DEVICE) != one


def test_the_driver_is_read_from_where_the_kernel_module_says_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)\n"
        "GCC version:  gcc version 15.3.0 (GCC)\n"
    )
    monkeypatch.setattr(environment, "DRIVER_VERSION_FILE", tmp_path / "version")
    assert environment.driver_version.__wrapped__() == "580.159.04"
