"""Compile kernels with NVRTC, and load them on a CUDA GPU, through CuPy."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from onnxfuse.errors import KernelError
from onnxfuse.runtime.code_cache import cached_cubin
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.nvrtc import arch_name, compile_flags, source_text
from onnxfuse.runtime.plan import Device, Kernel

log: Final = logging.getLogger("onnxfuse")
T = TypeVar("T")
MAX_UNUSED_KERNELS: Final = 256  # that stay loaded when their sessions are gone, because the next session may use them


@dataclass(eq=False)
class LoadedKernel:
    """A kernel's entry point on a GPU, which can be launched as long as this object lives."""

    handle: int  # CUfunction
    module: object  # what unloads the code when it is deleted
    max_shared: int = 0  # bytes of dynamic shared memory that launches may use so far
    max_cluster: int = 1  # blocks of a cluster that launches may use so far


KernelKey = tuple[int, str, tuple[str, ...], str]  # GPU, entry, flags and source
_loaded: weakref.WeakValueDictionary[KernelKey, LoadedKernel] = weakref.WeakValueDictionary()
_recent: deque[LoadedKernel] = deque(maxlen=MAX_UNUSED_KERNELS)
_turns: Final[dict[KernelKey, threading.Lock]] = {}  # of kernels that are being compiled
_lock = threading.RLock()


def cupy_module() -> Any:
    """Return CuPy; if its cache folder cannot be made, let it cache compiled code in memory.

    CuPy cannot even be imported without that folder. Raises ImportError if it is not installed.
    """
    try:
        folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        log.warning("kernels are not cached on disk from now on: %s", error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        os.environ["CUPY_CACHE_DIR"] = os.sep  # this folder exists, and nothing is written into it
    return importlib.import_module("cupy")


def unavailable() -> str | None:
    """Return why kernels cannot be compiled and loaded here; None if they can."""
    try:
        cupy = cupy_module()
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); install onnxfuse[cuda]"
    except Exception as error:  # CuPy's errors have no common class
        return f"CuPy finds no usable CUDA: {error}"
    return None if count else "CuPy finds no GPU"


def load_kernel(kernel: Kernel, ordinal: int) -> LoadedKernel:
    """Return the kernel, loaded on that GPU: the same object for equal kernels while somebody holds it.

    Raises KernelError if it does not compile or cannot be loaded.
    """
    key = (ordinal, kernel.entry, (arch_name(kernel, 0), *compile_flags(kernel)), source_text(kernel.source))
    with _lock:
        if loaded := _loaded.get(key):
            return loaded
        turn = _turns.setdefault(key, threading.Lock())
    with turn:  # one thread compiles the kernel, while others compile others
        loaded = _loaded.get(key)
        if loaded is None:
            loaded = _compile_and_load(kernel, ordinal)
            with _lock:
                _loaded[key] = loaded
                _recent.append(loaded)
                _turns.pop(key, None)
        return loaded


def _compile_and_load(kernel: Kernel, ordinal: int) -> LoadedKernel:
    code = cached_cubin(kernel, gpu(ordinal).arch)
    cupy = cupy_module()
    with cupy.cuda.Device(ordinal):
        module = cupy.cuda.function.Module()
        try:
            module.load(code)
            return LoadedKernel(int(module.get_function(kernel.entry).ptr), module)
        except cupy.cuda.driver.CUDADriverError as error:
            raise KernelError(f"{kernel.source}.cu: entry {kernel.entry} cannot be loaded: {error}") from error


def retry_without_disk_cache(call: Callable[[], T]) -> T:
    """Return what `call`, which compiles through CuPy, returns; if the disk fails, call it again with CuPy's cache off.

    The cache stays off until the process ends.
    """
    try:
        return call()
    except OSError as error:
        log.warning("kernels are not cached on disk from now on: %s", error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        return call()


def machine_code(kernel: Kernel, device: Device) -> bytes:
    """Return the kernel's cubin for that GPU's architecture.  Raises KernelError if it does not compile."""
    return cached_cubin(kernel, device.arch)
