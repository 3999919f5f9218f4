"""Call the CUDA driver for GPUs and streams without CuPy, whose import takes longer than all other work."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Final

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime.native_library import libcuda
from onnxfuse.runtime.plan import Device

MAX_NAME_BYTES: Final = 256
MULTIPROCESSORS: Final = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
SHARED_PER_BLOCK: Final = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING
NO_TIMING: Final = 2  # CU_EVENT_DISABLE_TIMING
RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


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


@contextlib.contextmanager
def current_in_thread(ordinal: int) -> Iterator[None]:
    """Let a thread of its own use the GPU with that number, also while another thread captures a CUDA graph.

    Raises DriverError.
    """
    driver, device, context, mode = _driver(libcuda()), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int(RELAXED)
    _check("cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check("cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    _check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    try:
        _check("cuCtxPushCurrent", driver.cuCtxPushCurrent_v2(context))
        yield
        _check("cuCtxPopCurrent", driver.cuCtxPopCurrent_v2(ctypes.byref(context)))
    finally:
        _check("cuDevicePrimaryCtxRelease", driver.cuDevicePrimaryCtxRelease_v2(device))


class SideStream:
    """A stream of the current context, whose work takes the place of work of another stream.  Raises DriverError."""

    def __init__(self) -> None:
        self._driver = _quick_driver(libcuda())
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        _check("cuStreamCreate", self._driver.cuStreamCreate(ctypes.byref(self._stream), NON_BLOCKING))
        _check("cuEventCreate", self._driver.cuEventCreate(ctypes.byref(self._event), NO_TIMING))

    @property
    def handle(self) -> int:
        """The address of the stream."""
        return self._stream.value or 0

    @contextlib.contextmanager
    def in_place_of(self, stream: int) -> Iterator[None]:
        """Put what starts meanwhile after the work of `stream`, and before what `stream` is given afterwards.

        A CUDA graph that is captured from `stream` captures this work too.  Raises DriverError.
        """
        other = ctypes.c_void_p(stream)
        self._wait(self._stream, other)
        try:
            yield
        finally:
            self._wait(other, self._stream)

    def _wait(self, later: ctypes.c_void_p, earlier: ctypes.c_void_p) -> None:
        _check("cuEventRecord", self._driver.cuEventRecord(self._event, earlier))
        _check("cuStreamWaitEvent", self._driver.cuStreamWaitEvent(later, self._event, 0))

    def close(self) -> None:
        """Destroy the stream after its work.  Raises DriverError."""
        _check("cuStreamDestroy", self._driver.cuStreamDestroy_v2(self._stream))
        _check("cuEventDestroy", self._driver.cuEventDestroy_v2(self._event))


def is_capturing(stream: int) -> bool:
    """Return whether a stream is captured in a CUDA graph.  Raises DriverError."""
    status = ctypes.c_int()
    code = _quick_driver(libcuda()).cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    _check("cuStreamIsCapturing", code)
    return status.value != 0


@functools.cache
def _driver(path: str) -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(path)
    except OSError as error:
        raise DriverError(f"the CUDA driver cannot be opened: {error}; ONNXFUSE_LIBCUDA may name it") from error
    _check("cuInit", driver.cuInit(0))
    return driver


@functools.cache
def _quick_driver(path: str) -> ctypes.PyDLL:
    """Return the driver for functions that return at once: calls keep Python's lock.

    Each body of a run calls several, and who releases the lock may wait for a thread that makes plans.
    """
    return ctypes.PyDLL(_driver(path)._name)


def _check(call: str, code: int) -> None:
    if code:
        raise DriverError(f"the CUDA driver cannot be used: {call} returns {code}")
