"""The functions that compile, load and time kernels, for each of onnxruntime's execution providers that has kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.runtime import cuda_driver, cupy_backend, nvrtc
from onnxfuse.runtime.kernel_loader import LoadedKernel, is_compiled, load_kernel, machine_code
from onnxfuse.runtime.plan import Device, Kernel
from onnxfuse.runtime.provider_names import CUDA


@dataclass(frozen=True)
class Backend:
    """The functions that compile, load and time kernels for one execution provider; any thread can call them."""

    no_gpu: Callable[[], str | None]  # returns why kernels cannot run here; None if they can
    unavailable: Callable[[], str | None]  # returns why kernels cannot be compiled here; None if they can
    gpu_count: Callable[[], int]
    device: Callable[[int], Device]
    load: Callable[[Kernel, int], LoadedKernel]
    is_compiled: Callable[[Kernel, int], bool]  # whether `load` need not compile the kernel
    machine_code: Callable[[Kernel, Device], bytes]
    cannot_time: Callable[[], str | None]  # returns why kernels cannot be timed here; None if they can


BACKENDS: Final[dict[str, Backend]] = {
    CUDA: Backend(
        cuda_driver.unavailable,
        nvrtc.unavailable,
        cuda_driver.gpu_count,
        cuda_driver.gpu,
        load_kernel,
        is_compiled,
        machine_code,
        cupy_backend.unavailable,
    )
}


def device_of(provider: str, ordinal: int, tf32: bool, shared: bool = False) -> Device:
    """Return a GPU of this machine, with a session's settings: TF32, and whether other runs share the GPU."""
    return replace(BACKENDS[provider].device(ordinal), tf32=tf32, shared=shared, ordinal=ordinal)
