"""Kernels compiled and loaded for a GPU, through CuPy, whose disk cache other processes share."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from onnxfuse.provider.cubin import compile_cubin
from onnxfuse.provider.plan import Device, Kernel
from onnxfuse.provider.source import KernelError, architecture, options, source_text

log: Final = logging.getLogger("onnxfuse")
T = TypeVar("T")


@dataclass(eq=False)
class Function:
    """A loaded entry point; it works as long as this object lives."""

    handle: int  # CUfunction
    keep: Any  # what must not be unloaded
    configured: tuple[int, int] = field(default=(0, 1))  # dynamic shared memory and cluster size allowed so far


_loaded: weakref.WeakValueDictionary[tuple[Any, ...], Function] = weakref.WeakValueDictionary()
_recent: deque[Function] = deque(maxlen=256)  # sessions come and go; what the last ones used stays loaded
_lock = threading.RLock()


def cupy_module() -> Any:
    """CuPy, which cannot be imported where its cache folder cannot be made: there its cache is in memory.

    Raises ImportError where it is not installed.
    """
    try:
        folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        log.warning("kernels are not cached on disk from now on: %s", error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        os.environ["CUPY_CACHE_DIR"] = os.sep  # a folder that is there; nothing is written
    return importlib.import_module("cupy")


def unavailable() -> str | None:
    """Why kernels cannot be compiled here; None where they can."""
    try:
        cupy = cupy_module()
        importlib.import_module("cupy_backends.cuda.libs.nvrtc").getVersion()
        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); install onnxfuse[cuda]"
    except Exception as error:  # CuPy's own errors, which have no common class
        return f"CuPy finds no usable CUDA: {error}"
    return None if count else "CuPy finds no GPU"


@functools.cache
def gpu(ordinal: int) -> Device:
    """The GPU of that number."""
    cupy = cupy_module()
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    return Device(
        properties["name"].decode(),
        10 * properties["major"] + properties["minor"],
        properties["multiProcessorCount"],
        properties.get("sharedMemPerBlockOptin", properties["sharedMemPerBlock"]),
        ordinal=ordinal,
    )


def compile_kernel(kernel: Kernel, ordinal: int) -> Function:
    """The kernel on that GPU; the same object for the same kernel, while somebody holds it.  Raises KernelError."""
    text = source_text(kernel.source)
    flags = options(kernel)
    if kernel.arch_specific:
        flags += (f"-arch={architecture(kernel, gpu(ordinal).arch)}",)
    key = (ordinal, kernel.entry, flags, text)
    with _lock:
        function = _loaded.get(key)
        if function is None:
            function = _loaded[key] = _compile(kernel, text, flags, ordinal)
            _recent.append(function)
        return function


def _compile(kernel: Kernel, text: str, flags: tuple[str, ...], ordinal: int) -> Function:
    cupy = cupy_module()
    with cupy.cuda.Device(ordinal):
        raw = cupy.RawKernel(text, kernel.entry, options=flags)
        try:
            return Function(despite_disk(lambda: int(raw.kernel.ptr)), raw)
        except cupy.cuda.compiler.CompileException as error:
            raise KernelError(f"{kernel.source}.cu does not compile: {error}") from error
        except cupy.cuda.driver.CUDADriverError as error:
            raise KernelError(f"{kernel.source}.cu: entry {kernel.entry} cannot be loaded: {error}") from error


def despite_disk(call: Callable[[], T]) -> T:
    """What `call` returns, which compiles through CuPy: once more without CuPy's cache where the disk has failed."""
    try:
        return call()
    except OSError as error:
        log.warning("kernels are not cached on disk from now on: %s", error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        return call()


def cubin(kernel: Kernel, device: Device) -> bytes:
    """The kernel's machine code."""
    return compile_cubin(kernel, device.arch).code
