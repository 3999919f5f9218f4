"""Load machine code on GPUs through the native library, each kernel once."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Final

from onnxfuse.errors import KernelError
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.code_cache import cached_cubin, is_cached
from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.nvrtc import arch_name, compile_flags, identity
from onnxfuse.runtime.plan import Device, Kernel

MAX_UNUSED_KERNELS: Final = 256  # kernels that stay loaded after their sessions end, for later sessions


@dataclass(eq=False)
class LoadedKernel:
    """A kernel's entry point on a GPU, which can be launched as long as this object lives."""

    handle: int  # CUfunction
    module: object  # an object whose deletion unloads the code
    max_shared: int = 0  # bytes of dynamic shared memory that launches are allowed so far
    max_cluster: int = 1  # blocks per cluster that launches are allowed so far


@dataclass(eq=False)
class _Module:
    """Loaded machine code, which is unloaded with the last kernel that needs it."""

    ordinal: int
    handle: int  # CUmodule

    def __del__(self) -> None:
        native.load().onnxfuse_unload(self.ordinal, self.handle)


KernelKey = tuple[int, str, tuple[str, ...], str | bytes]  # GPU, entry, flags, and digest of the source or machine code
_loaded: weakref.WeakValueDictionary[KernelKey, LoadedKernel] = weakref.WeakValueDictionary()
_recent: deque[LoadedKernel] = deque(maxlen=MAX_UNUSED_KERNELS)
_turns: Final[dict[KernelKey, threading.Lock]] = {}  # locks of kernels that are being compiled
_refused: Final[dict[KernelKey, KernelError]] = {}  # kernels that do not compile; they are not tried again
_lock = threading.RLock()


def load_cubin(code: bytes, entry: str, ordinal: int) -> LoadedKernel:
    """Load machine code on GPU number `ordinal`, and return the kernel `entry`.  Raises NativeError."""
    module, function = native.load_function(native.driver(), ordinal, code, entry)
    return LoadedKernel(function, _Module(ordinal, module))


def load_kernel(kernel: Kernel, ordinal: int) -> LoadedKernel:
    """Return a kernel, loaded on GPU number `ordinal`; equal kernels share one object while it is in use.

    Raises KernelError if the kernel does not compile, NativeError if it cannot be loaded.
    """
    key = _key(kernel, ordinal)
    with _lock:
        if loaded := _loaded.get(key):
            return loaded
        if refused := _refused.get(key):
            raise KernelError(*refused.args)
        turn = _turns.setdefault(key, threading.Lock())
    with turn:  # only one thread compiles this kernel; other threads may compile other kernels
        loaded = _loaded.get(key)
        if loaded is None:
            try:
                code = cached_cubin(kernel, gpu(ordinal).arch)
            except KernelError as error:
                _refused[key] = KernelError(*error.args)
                raise
            loaded = load_cubin(code, kernel.entry, ordinal)
            with _lock:
                _loaded[key] = loaded
                _recent.append(loaded)
                _turns.pop(key, None)
        return loaded


def is_compiled(kernel: Kernel, ordinal: int) -> bool:
    """Return whether a kernel is loaded on GPU number `ordinal`, or its machine code is on disk."""
    try:
        return _key(kernel, ordinal) in _loaded or is_cached(kernel, gpu(ordinal).arch)
    except KernelError:  # there is no compiler, and thus no text to look up
        return False


def _key(kernel: Kernel, ordinal: int) -> KernelKey:
    own = kernel.code or identity(kernel).digest
    return ordinal, kernel.entry, (arch_name(kernel, 0), *compile_flags(kernel)), own


def machine_code(kernel: Kernel, device: Device) -> bytes:
    """Return a kernel's cubin for the architecture of a GPU.  Raises KernelError if the kernel does not compile."""
    return cached_cubin(kernel, device.arch)
