"""Load the native library, which implements the fused ops for onnxruntime, and answer its requests.

The library requests templates (the plans of a node for all sizes), and sessions that run bodies (the ONNX functions of
nodes).
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime.plan import Attribute, TensorSpec
from onnxfuse.runtime.plan_bytes import input_words, read_attributes, read_inputs

ABI: Final = 17  # onnxfuse_abi in native/exports.cc
TF32: Final = 1  # TF32 to CUDA_GRAPH are flags of a session's settings
VERDICTS: Final = 2
MEASURE: Final = 4
COUNT_RUNS: Final = 8
CUDA_GRAPH: Final = 16
ALL_KERNELS: Final = 32  # a flag of requests, not of sessions
SHARED: Final = 64  # a flag of sessions: aim="throughput"
WAIT: Final = 128  # a flag of sessions: runs wait for the compiler
PACKAGE: Final = Path(__file__).parent
LIBRARY_NAME: Final = "libonnxfuse.so"  # the file name of copies of the library, for processes without Python
HINT: Final = "install a C++17 compiler and run `python -m onnxfuse.runtime.build_native`"


class NativeError(OnnxfuseError):
    """The native library is missing, is of another version, or reports an error."""


class _Request(ctypes.Structure):  # PlanRequest in native/python.h
    _fields_ = (
        ("kernel", ctypes.c_uint64),
        ("provider", ctypes.c_char_p),
        ("op", ctypes.c_char_p),
        ("node", ctypes.c_char_p),
        ("attributes", ctypes.c_void_p),
        ("attributes_size", ctypes.c_uint64),
        ("key", ctypes.POINTER(ctypes.c_int64)),
        ("key_size", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("settings", ctypes.c_int32),
    )


# PYFUNCTYPE: calls keep Python's lock, because who releases it may wait for a thread that makes plans.
_REPLY: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)


class _Interrupt(ctypes.Structure):  # Interrupt in native/python.h
    _fields_ = (
        ("ensure_gil", ctypes.c_void_p),
        ("release_gil", ctypes.c_void_p),
        ("set_exception", ctypes.c_void_p),
        ("main_thread", ctypes.c_ulong),
        ("keyboard_interrupt", ctypes.py_object),
    )


@dataclass(frozen=True)
class Request:
    """A request of the native library for a template or a body's session, because a node has none for its inputs."""

    kernel: int  # identifies the node of a session until the session ends
    provider: str
    op: str
    node: str
    attributes: Mapping[str, Attribute]
    inputs: tuple[TensorSpec, ...]  # empty if the node has not run
    device: int
    tf32: bool  # whether the session allows TF32
    verdicts: bool  # whether earlier measurements decide between candidate plans
    measure: bool  # whether candidate plans may be timed now
    count_runs: bool  # whether the session's runs are counted, so that candidate plans are timed between them
    cuda_graph: bool  # whether the session captures its runs
    shared: bool  # whether other runs use the GPU at the same time
    wait: bool  # whether the run waits until the kernels are compiled; if not, the node's body runs meanwhile
    all_kernels: bool  # whether kernels for other sizes must be loaded, too


AnswerRequest = Callable[[Request], bytes | None]  # a template's bytes; None if the node's ONNX function must run
OpenBody = Callable[[Request], int]  # what `open_body` of this module returns
ForgetNode = Callable[[int], None]
_PLAN: Final = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Request), ctypes.c_void_p)
_DROP: Final = ctypes.CFUNCTYPE(None, ctypes.c_uint64)
_NODE: Final = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Request))
_RUNS: Final = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int64), ctypes.c_size_t, ctypes.c_uint64)
_FAILED, _INTERRUPT, _RUNS_BODY = 1, 2, 3  # results of callbacks: kInterrupt and kBody in native/python.h
_kept_alive: list[object] = []  # objects that the library holds pointers to


def library_path() -> Path | None:
    """Return the compiled library beside this file; None if the package was installed without a compiler."""
    return next(iter(sorted(PACKAGE.glob("_native*.so"))), None)


@functools.cache
def load(path: Path | None = None) -> ctypes.CDLL:
    """Return the library, which is loaded once.  Raises NativeError if it is missing or of another version."""
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
    return library


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the library after it has opened the CUDA driver.  Raises NativeError."""
    library = load()
    check(library.onnxfuse_open_driver(libcuda().encode()))
    return library


def libcuda() -> str:
    """Return the name of the CUDA driver's library: $ONNXFUSE_LIBCUDA, or the usual name, which the system looks up."""
    return os.environ.get("ONNXFUSE_LIBCUDA", "libcuda.so.1")


def _declare(library: ctypes.CDLL) -> None:
    text, handle, size = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
    number, unsigned = ctypes.c_int, ctypes.c_uint32
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "onnxfuse_prepare": (None, [text, text, number]),
        "onnxfuse_set_callbacks": (None, [handle, handle, handle, handle]),
        "onnxfuse_add_attributes": (None, [text, text]),
        "onnxfuse_keep_plans": (size, [size]),
        "onnxfuse_take_runs": (None, [ctypes.c_uint64, _RUNS]),
        "onnxfuse_new_nodes": (None, [_NODE]),
        "onnxfuse_has_node": (number, [ctypes.c_uint64]),
        "onnxfuse_drop_bodies": (None, [ctypes.c_uint64]),
        "onnxfuse_give": (text, [ctypes.c_uint64, text, size]),
        "onnxfuse_next_number": (ctypes.c_uint64, []),
        "onnxfuse_expect_templates": (None, [ctypes.c_uint64]),
        "onnxfuse_open_body": (text, [text, number, number, text, size, ctypes.POINTER(handle)]),
        "onnxfuse_run_on_zeros": (text, [handle, handle, size]),
        "onnxfuse_close_body": (None, [handle]),
        "onnxfuse_kernels_alive": (ctypes.c_int64, []),
        "onnxfuse_plans_made": (ctypes.c_int64, []),
        "onnxfuse_plans_alive": (ctypes.c_int64, []),
        "onnxfuse_open_driver": (text, [text]),
        "onnxfuse_load": (text, [number, ctypes.c_char_p, text, ctypes.POINTER(handle), ctypes.POINTER(handle)]),
        "onnxfuse_configure": (text, [number, handle, unsigned, number]),
        "onnxfuse_unload": (text, [number, handle]),
        "onnxfuse_open_cublaslt": (text, [text]),
        "onnxfuse_cublaslt_version": (text, [ctypes.POINTER(ctypes.c_uint64)]),
        "onnxfuse_open_cudnn": (text, [text]),
        "onnxfuse_cudnn_version": (text, [ctypes.POINTER(ctypes.c_uint64)]),
        "onnxfuse_read_plan": (text, [number, text, size, handle, size, handle, size, handle, handle]),
        "onnxfuse_free_plan": (None, [handle]),
        "onnxfuse_run": (text, [number, handle, handle, handle, handle, handle, ctypes.c_uint64]),
        "onnxfuse_algorithms": (text, [number, text, size, number, handle, handle]),
        "onnxfuse_engines": (text, [number, text, size, number, size, handle, handle]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def connect(library: ctypes.CDLL, answer: AnswerRequest, open_body: OpenBody, forget: ForgetNode) -> None:
    """Make the library call `answer` for plans, `open_body` for sessions of bodies, `forget` for nodes that are gone.

    The library makes these calls until Python exits. An exception of `answer` or `open_body` becomes an onnxruntime
    error. A program may catch that error, so KeyboardInterrupt and SystemExit also raise KeyboardInterrupt in the main
    thread: native/python.cc says how.
    """
    reply_with = _REPLY(_address(library.onnxfuse_reply))

    def replied(call: Callable[[], bytes | None], reply: int) -> int:
        try:
            data = call()
            code = _RUNS_BODY if data is None else 0
        except BaseException as error:  # no exception may reach C++
            data = f"{type(error).__name__}: {error}".encode(errors="replace")
            code = _FAILED if isinstance(error, Exception) else _INTERRUPT
        reply_with(reply, data or b"", len(data or b""))
        return code

    def on_plan(request: Any, reply: int) -> int:
        return replied(lambda: answer(_read(request.contents)), reply)

    def on_body(request: Any, reply: int) -> int:
        return replied(lambda: open_body(_read(request.contents)).to_bytes(8, sys.byteorder), reply)

    python = ctypes.pythonapi
    functions = (python.PyGILState_Ensure, python.PyGILState_Release, python.PyThreadState_SetAsyncExc)
    interrupt = _Interrupt(*map(_address, functions), threading.main_thread().ident, KeyboardInterrupt)
    callbacks = (_PLAN(on_plan), _PLAN(on_body), _DROP(forget))
    _kept_alive.extend((*callbacks, interrupt))
    library.onnxfuse_set_callbacks(*map(_address, callbacks), ctypes.addressof(interrupt))
    atexit.register(library.onnxfuse_set_callbacks, None, None, None, None)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _read(raw: Any) -> Request:
    return Request(
        raw.kernel,
        raw.provider.decode(),
        raw.op.decode(),
        raw.node.decode(),
        read_attributes(ctypes.string_at(raw.attributes, raw.attributes_size)),
        read_inputs(raw.key[: raw.key_size] if raw.key_size else []),
        raw.device,
        bool(raw.settings & TF32),
        bool(raw.settings & VERDICTS),
        bool(raw.settings & MEASURE),
        bool(raw.settings & COUNT_RUNS),
        bool(raw.settings & CUDA_GRAPH),
        bool(raw.settings & SHARED),
        bool(raw.settings & WAIT),
        bool(raw.settings & ALL_KERNELS),
    )


def open_body(provider: str, device: int, tf32: bool, model: bytes) -> int:
    """Open a session for a body: a model with inputs i0, i1, ... and outputs o0, o1, ...  Return its address.

    Raises NativeError if onnxruntime refuses the model.
    """
    body = ctypes.c_void_p()
    check(load().onnxfuse_open_body(provider.encode(), device, tf32, model, len(model), ctypes.byref(body)))
    return body.value or 0


def close_body(body: int) -> None:
    """Close the session of a body that no node has got."""
    load().onnxfuse_close_body(body)


def run_on_zeros(body: int, inputs: Sequence[TensorSpec]) -> None:
    """Run the session of a body once on zeros of these shapes.  Raises NativeError if the body refuses them."""
    words = input_words(inputs)
    check(load().onnxfuse_run_on_zeros(body, (ctypes.c_int64 * len(words))(*words), len(words)))


def new_nodes() -> list[Request]:
    """Return requests, without inputs, for all nodes that have no template yet, in all sessions."""
    found: list[Request] = []
    load().onnxfuse_new_nodes(_NODE(lambda raw: found.append(_read(raw.contents))))
    return found


def has_node(kernel: int) -> bool:
    """Return whether the session of a node still exists."""
    return bool(load().onnxfuse_has_node(kernel))


def take_runs(kernel: int) -> list[tuple[tuple[TensorSpec, ...], int]]:
    """Return the inputs at which a node, or an equal one, ran since the last call, and how often.

    The list is empty if the node's session is gone, or does not count its runs.
    """
    rows: list[tuple[list[int], int]] = []
    load().onnxfuse_take_runs(kernel, _RUNS(lambda key, size, runs: rows.append((key[:size], runs))))
    return [(read_inputs(key), runs) for key, runs in rows]


def give_template(kernel: int, data: bytes) -> None:
    """Make later runs of a node use the plans of a template; do nothing if the node is gone.  Raises NativeError."""
    check(load().onnxfuse_give(kernel, data, len(data)))


def check(message: bytes | None) -> None:
    """Raise NativeError with the message of the library; do nothing if it is None."""
    if message is not None:
        raise NativeError(message.decode(errors="replace"))


def load_function(library: ctypes.CDLL, device: int, cubin: bytes, entry: str) -> tuple[int, int]:
    """Load a cubin on a device and return the handles of its module and of its entry.  Raises NativeError."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    check(library.onnxfuse_load(device, cubin, entry.encode(), ctypes.byref(module), ctypes.byref(function)))
    return module.value or 0, function.value or 0
