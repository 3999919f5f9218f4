"""Add custom operators to session options: one for each ONNX function whose calls run as kernels."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnxruntime as ort

from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.fused_calls import Call, attribute_kinds
from onnxfuse.runtime.target import NoTarget, Target, native_library


@dataclass(frozen=True)
class _Registration:
    """The operators that were registered with some session options, and the settings of their sessions."""

    ops: frozenset[str]
    settings: int  # flags of native_library.py: TF32, VERDICTS and so on


_registrations: Final[weakref.WeakKeyDictionary[ort.SessionOptions, _Registration]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def register_operators(
    options: ort.SessionOptions, target: Target | NoTarget, calls: Sequence[Call], bodies: set[str], settings: int
) -> None:
    """Register the functions that `calls` name as operators of the target's provider; any thread can call this.

    bodies    functions that must not be registered, because onnxruntime runs their nodes as ONNX functions
    settings  flags of native_library.py that are the same for all nodes; see `Target.settings`

    Raises UsageError if the options already have operators that do not fit the calls or the settings;
    OnnxfuseError if onnxruntime refuses the operators.
    """
    calls_of_op = {call.op: [c for c in calls if c.op == call.op] for call in calls}
    with _lock:
        registered = _registrations.get(options)
        if registered is not None:
            _refuse_clash(registered, target, calls_of_op, bodies, settings)
        if isinstance(target, NoTarget) or not calls_of_op:
            return
        lines = [f"{op} {attribute_kinds(same)}" for op, same in sorted(calls_of_op.items())]
        library, provider, names = native_library(), target.provider.encode(), "\n".join(lines).encode()
        if registered is not None:
            library.onnxfuse_add_attributes(provider, names)
            return
        library.onnxfuse_prepare(provider, names, settings)
        try:
            options.register_custom_ops_library(str(Path(library._name).resolve()))
        except Exception as error:  # onnxruntime's errors have no common class
            raise OnnxfuseError(f"onnxruntime does not accept the operators of onnxfuse: {error}") from error
        _registrations[options] = _Registration(frozenset(calls_of_op), settings)


def registered_operators(options: ort.SessionOptions) -> frozenset[str]:
    """Return the functions that are registered as operators with session options."""
    with _lock:
        found = _registrations.get(options)
        return found.ops if found else frozenset()


def _refuse_clash(
    registered: _Registration, target: Target | NoTarget, ops: Collection[str], bodies: set[str], settings: int
) -> None:
    """Raise UsageError if session options with operators of another model do not fit this model and its settings."""
    if clash := sorted(registered.ops & bodies) or sorted(set(ops) - registered.ops):
        is_registered = clash[0] in registered.ops
        what = "as a kernel, but here its body" if is_registered else "not as a kernel, but here its kernel"
        raise UsageError(
            f"another model was registered with these session options; they run {clash[0]} {what} must run; "
            "make new SessionOptions for each model"
        )
    if isinstance(target, NoTarget) or not ops:
        return
    flags = (
        (native.TF32, "use_tf32"),
        (native.SHARED, "aim='throughput'"),
        (native.VERDICTS, "tune other than 'never'"),
        (native.COUNT_RUNS, "tune='background'"),
        (native.CUDA_GRAPH, "enable_cuda_graph with tune='background'"),
    )
    if settings & ~registered.settings & native.WAIT:
        raise UsageError(
            "a model was registered with these session options for sessions that do not wait for the compiler; "
            "this one waits, by wait=True or enable_cuda_graph; make new SessionOptions, or open this session first"
        )
    for flag, name in flags:
        if (registered.settings ^ settings) & flag:
            raise UsageError(
                f"a model was registered with these session options and {name} = "
                f"{int(bool(registered.settings & flag))}, here it is {int(bool(settings & flag))}; "
                "make new SessionOptions for each setting"
            )
