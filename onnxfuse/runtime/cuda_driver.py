"""Call the CUDA driver for GPUs without CuPy, whose import takes longer than all other work."""

from __future__ import annotations

import ctypes
import functools
from typing import Final

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime.native_library import libcuda
from onnxfuse.runtime.plan import Device

MAX_NAME_BYTES: Final = 256
MULTIPROCESSORS: Final = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
SHARED_PER_BLOCK: Final = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


class DriverError(OnnxfuseError):
    """The CUDA driver is missing, or reports an error."""


def unavailable() -> str | None:
    """Return why kernels cannot run here; None if there is a GPU."""
    try:
        return None if gpu_count() else "the CUDA driver finds no GPU"
    except DriverError as error:
        return str(error)


def gpu_count() -> int:
    """Return how many GPUs there are.  Raises DriverError."""
    count = ctypes.c_int()
    _check("cuDeviceGetCount", _driver(libcuda()).cuDeviceGetCount(ctypes.byref(count)))
    return count.value


def cuda_version() -> tuple[int, int]:
    """Return the newest version of CUDA whose code the driver runs.  Raises DriverError."""
    number = ctypes.c_int()
    _check("cuDriverGetVersion", _driver(libcuda()).cuDriverGetVersion(ctypes.byref(number)))
    return number.value // 1000, number.value % 1000 // 10


def gpu(ordinal: int) -> Device:
    """Return the properties of the GPU with that number.  Raises DriverError."""
    return _gpu(libcuda(), ordinal)


@functools.cache
def _gpu(path: str, ordinal: int) -> Device:
    driver, device, name = _driver(path), ctypes.c_int(), ctypes.create_string_buffer(MAX_NAME_BYTES)
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check("cuDeviceGetName", driver.cuDeviceGetName(name, MAX_NAME_BYTES, device))
    numbers = []
    for attribute in (MAJOR, MINOR, MULTIPROCESSORS, SHARED_PER_BLOCK):
        value = ctypes.c_int()
        _check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
        numbers.append(value.value)
    major, minor, multiprocessors, shared = numbers
    return Device(name.value.decode(), 10 * major + minor, multiprocessors, shared, ordinal=ordinal)


@functools.cache
def _driver(path: str) -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(path)
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be opened: {error}; ONNXFUSE_LIBCUDA may name it") from error
    _check("cuInit", driver.cuInit(0))
    return driver


def _check(call: str, code: int) -> None:
    if code:
        raise DriverError(f"the CUDA driver cannot be used: {call} returns {code}")
