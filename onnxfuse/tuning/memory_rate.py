"""Evict the cache of a device before a run, and measure how fast the device copies memory."""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from typing import Final

import numpy as np

from onnxfuse.runtime.cupy_backend import retry_without_disk_cache
from onnxfuse.tuning.bound_session import Provider
from onnxfuse.tuning.timing import interleaved

MIN_COPY_BYTES: Final = 64 * 2**20  # read plus written; a smaller copy takes little longer than its launch
MAX_COPY_BYTES: Final = 2**30  # a larger copy does not reach a higher rate


def cache_eviction(provider: Provider, ordinal: int = 0) -> Callable[[], None]:
    """Return a function that evicts all data from a GPU's L2 cache, by reading other memory, and waits for that.

    On the CPU, and on CUDA without CuPy, the function does nothing.
    """
    with contextlib.suppress(ImportError):
        if provider == "cuda":
            return _cuda_eviction(ordinal)
    return lambda: None


def _cuda_eviction(ordinal: int) -> Callable[[], None]:
    import cupy

    with cupy.cuda.Device(ordinal) as device:
        size = 2 * device.attributes["L2CacheSize"]
        words = cupy.ndarray((size // 4,), cupy.uint32, cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0))

    def read() -> None:
        with cupy.cuda.Device(ordinal) as device:
            # Reading fills the cache.  Written data would be flushed to memory later, while other code is timed.
            retry_without_disk_cache(words.max)
            device.synchronize()

    return read


def copy_rate(provider: Provider, moved: int) -> float | None:
    """Return the rate of a copy in bytes per second; `moved` is the sum of the bytes that it reads and writes.

    The rate, too, counts bytes read plus bytes written.  `moved` is clamped to MIN_COPY_BYTES and MAX_COPY_BYTES.
    Returns None on CUDA without CuPy.
    """
    try:
        return _rate(provider, max(MIN_COPY_BYTES, min(MAX_COPY_BYTES, moved)) // 2)
    except ImportError:
        return None


@functools.cache
def _rate(provider: Provider, size: int) -> float:
    seconds = _cuda_copy(size) if provider == "cuda" else _cpu_copy(size)
    return 2 * size / seconds


def _cpu_copy(size: int, repeats: int = 9) -> float:
    """Return the seconds of a copy of `size` bytes."""
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    return interleaved([lambda: np.copyto(target, source)], repeats)[0].median


def _cuda_copy(size: int, repeats: int = 25) -> float:
    """Return the seconds of a copy of `size` bytes."""
    import cupy

    source, target = cupy.ones(size, cupy.uint8), cupy.zeros(size, cupy.uint8)
    times: list[float] = []
    for _ in range(repeats):
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        before.record()
        target.data.copy_from_device_async(source.data, size, cupy.cuda.get_current_stream())
        after.record()
        after.synchronize()
        times.append(cupy.cuda.get_elapsed_time(before, after) / 1e3)
    del source, target
    cupy.get_default_memory_pool().free_all_blocks()
    return statistics.median(times)
