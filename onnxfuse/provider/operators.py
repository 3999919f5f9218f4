"""The functions that run as kernels, registered with session options as operators of a provider."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.provider import native
from onnxfuse.provider.model import Call, attribute_kinds
from onnxfuse.provider.target import NoTarget, Target, native_library

_registered: Final[weakref.WeakKeyDictionary[Any, tuple[frozenset[str], int]]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


def register_operators(
    options: ort.SessionOptions, target: Target | NoTarget, calls: Sequence[Call], bodies: set[str], measure: bool
) -> None:
    """Register the functions that these nodes call as operators of the target's provider, once for all threads.

    bodies   functions that run as they are
    measure  candidates of a kernel may be timed

    Raises UsageError where these options have operators that do not fit, OnnxfuseError where onnxruntime refuses them.
    """
    ops = {call.op: [c for c in calls if c.op == call.op] for call in calls}
    with _lock:
        done = _registered.get(options)
        if done is not None:
            _refuse_clash(done, target, ops, bodies, measure)
        if isinstance(target, NoTarget) or not ops:
            return
        lines = [f"{op} {attribute_kinds(same)}" for op, same in sorted(ops.items())]
        settings = target.settings(measure)
        library = native_library()
        library.onnxfuse_prepare(target.provider.encode(), "\n".join(lines).encode(), settings)
        if done is not None:
            return
        try:
            options.register_custom_ops_library(str(Path(library._name).resolve()))
        except Exception as error:  # onnxruntime's errors have no common class
            raise OnnxfuseError(f"onnxruntime does not accept the operators of onnxfuse: {error}") from error
        _registered[options] = frozenset(ops), settings


def _refuse_clash(
    done: tuple[frozenset[str], int], target: Target | NoTarget, ops: Collection[str], bodies: set[str], measure: bool
) -> None:
    """Raise UsageError where session options that have operators already cannot serve this model too."""
    here, settings = done
    if clash := sorted(here & bodies) or sorted(set(ops) - here):
        what = "as a kernel, but here its body" if clash[0] in here else "not as a kernel, but here its kernel"
        raise UsageError(
            f"another model was registered with these session options; they run {clash[0]} {what} must run; "
            "make new SessionOptions for each model"
        )
    if isinstance(target, NoTarget) or not ops:
        return
    now = target.settings(measure)
    for flag, name in (native.TF32, "use_tf32"), (native.MEASURE, "tune other than 'never'"):
        if (settings ^ now) & flag:
            raise UsageError(
                f"another model was registered with these session options and {name} = {int(bool(settings & flag))}, "
                f"here it is {int(bool(now & flag))}; make new SessionOptions for each setting"
            )
