"""The native library: one operator that onnxruntime runs under the names of fused ops."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.errors import OnnxfuseError
from onnxfuse.provider.plan import TensorSpec
from onnxfuse.provider.wire import Attribute, read_attributes, read_inputs

ABI: Final = 5
TF32: Final = 1  # settings of a session, added up
MEASURE: Final = 2
MANY_PLANS: Final = 4096  # of a node: a cache that grows to so many tokens meets as many shapes, again and again
PACKAGE: Final = Path(__file__).parent
HINT: Final = "install a C++17 compiler and run `python -m onnxfuse.provider.build_native`"


class NativeError(OnnxfuseError):
    """The native library is missing, does not fit, or reports an error."""


class _Request(ctypes.Structure):  # PlanRequest in native/python.h
    _fields_ = (
        ("kernel", ctypes.c_uint64),
        ("provider", ctypes.c_char_p),
        ("op", ctypes.c_char_p),
        ("node", ctypes.c_char_p),
        ("attributes", ctypes.c_void_p),
        ("attributes_size", ctypes.c_uint64),
        ("words", ctypes.POINTER(ctypes.c_int64)),
        ("word_count", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("settings", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Request:
    """A node of a session met new input shapes."""

    kernel: int  # identifies the node of this session until it is dropped
    provider: str
    op: str
    node: str
    attributes: Mapping[str, Attribute]
    inputs: tuple[TensorSpec, ...]
    device: int
    tf32: bool  # the session allows it
    measure: bool  # the session lets candidates be timed


Plan = Callable[[Request], bytes]
Drop = Callable[[int], None]
_PLAN: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Request), ctypes.c_void_p)
_DROP: Final = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_FAILED, _STOP = 1, 2  # kStop in native/python.h
_handlers: list[Any] = []  # what the library may call must stay alive


def library_path() -> Path | None:
    """The compiled library beside this file; None where the package was installed without a compiler."""
    return next(iter(sorted(PACKAGE.glob("_native*.so"))), None)


@functools.cache
def load(path: Path | None = None) -> ctypes.CDLL:
    """The library, loaded once.  Raises NativeError where it is missing or of another version."""
    path = path or library_path()
    if path is None:
        raise NativeError(f"the native library of onnxfuse is missing; {HINT}")
    try:
        library = ctypes.CDLL(str(path))
        found = library.onnxfuse_abi()
    except (OSError, AttributeError) as error:
        raise NativeError(f"cannot load the native library of onnxfuse: {error}; {HINT}") from error
    if found != ABI:
        raise NativeError(f"the native library {path} has interface {found}, required {ABI}; {HINT}")
    _declare(library)
    library.onnxfuse_keep_plans(MANY_PLANS)
    return library


@functools.cache
def driver() -> ctypes.CDLL:
    """The library, with the CUDA driver open.  Raises NativeError."""
    library = load()
    check(library.onnxfuse_open_driver(libcuda().encode()))
    return library


def libcuda() -> str:
    """The CUDA driver's library: $ONNXFUSE_LIBCUDA, or what the system finds under its usual name."""
    return os.environ.get("ONNXFUSE_LIBCUDA", "libcuda.so.1")


def _declare(library: ctypes.CDLL) -> None:
    text, handle, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
    number, unsigned = ctypes.c_int, ctypes.c_uint32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "onnxfuse_prepare": (None, [text, text, number]),
        "onnxfuse_set_callbacks": (None, [handle, handle, handle]),
        "onnxfuse_reply": (None, [handle, ctypes.c_char_p, size]),
        "onnxfuse_keep_plans": (None, [size]),
        "onnxfuse_kernels_alive": (ctypes.c_int64, []),
        "onnxfuse_open_driver": (text, [text]),
        "onnxfuse_load": (text, [number, ctypes.c_char_p, text, ctypes.POINTER(handle), ctypes.POINTER(handle)]),
        "onnxfuse_configure": (text, [number, handle, unsigned, number]),
        "onnxfuse_unload": (text, [number, handle]),
        "onnxfuse_open_cublaslt": (text, [text]),
        "onnxfuse_cublaslt_version": (text, [ctypes.POINTER(ctypes.c_uint64)]),
        "onnxfuse_read_plan": (text, [number, text, size, handle, size, handle, size, handle, handle]),
        "onnxfuse_free_plan": (None, [handle]),
        "onnxfuse_run": (text, [number, handle, handle, handle, handle, handle, ctypes.c_uint64]),
        "onnxfuse_algorithms": (text, [number, text, size, number, handle, handle]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def connect(library: ctypes.CDLL, plan: Plan, drop: Drop) -> None:
    """Let the library ask `plan` for plans and tell `drop` which nodes are gone, until Python exits.

    What `plan` raises is the text of an onnxruntime error; KeyboardInterrupt and SystemExit stop the main thread
    besides, by a KeyboardInterrupt, as Ctrl-C does.
    """

    def on_plan(request: Any, reply: int) -> int:
        try:
            answer, code = plan(_read(request.contents)), 0
        except BaseException as error:  # must not reach C++
            answer = f"{type(error).__name__}: {error}".encode(errors="replace")
            code = _FAILED if isinstance(error, Exception) else _STOP
        library.onnxfuse_reply(reply, answer, len(answer))
        return code

    handlers = (_PLAN(on_plan), _DROP(drop), ctypes.pythonapi.PyErr_SetInterrupt)
    _handlers.extend(handlers)
    library.onnxfuse_set_callbacks(*(ctypes.cast(handler, ctypes.c_void_p) for handler in handlers))
    atexit.register(library.onnxfuse_set_callbacks, None, None, None)


def _read(raw: Any) -> Request:
    return Request(
        raw.kernel,
        raw.provider.decode(),
        raw.op.decode(),
        raw.node.decode(),
        read_attributes(ctypes.string_at(raw.attributes, raw.attributes_size)),
        read_inputs(raw.words[: raw.word_count]),
        raw.device,
        bool(raw.settings & TF32),
        bool(raw.settings & MEASURE),
    )


def check(message: bytes | None) -> None:
    """Raise NativeError with a message of the library; nothing where there is none."""
    if message is not None:
        raise NativeError(message.decode(errors="replace"))


def load_function(library: ctypes.CDLL, device: int, cubin: bytes, entry: str) -> tuple[int, int]:
    """(module, function) handles of a cubin's entry on a device."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(library.onnxfuse_load(device, cubin, entry.encode(), ctypes.byref(module), ctypes.byref(function)))
    return module.value or 0, function.value or 0
