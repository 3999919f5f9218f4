"""Start onnxruntime's CUDA provider, which takes longer than importing this package and reading a model."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final

import onnxruntime as ort

from onnxfuse.runtime.plain_session import plain_session
from onnxfuse.runtime.provider_names import CPU, CUDA

ProviderOptions = Mapping[str, object]
Providers = Sequence[str | tuple[str, ProviderOptions]]
# An ONNX model with one Identity of one float, in opset 17; importing onnx to write it would take long.
PROBE: Final = (
    b'\x08\x08:;\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x11"
)
_working: Final[set[int]] = set()  # the GPUs on which the provider has started
_lock = threading.Lock()  # held while it starts


def default_providers(options: ort.SessionOptions | None) -> Providers | None:
    """Return the providers of a session for which none are named; None to leave them to the options or onnxruntime."""
    given = options is not None and options.has_providers()
    return [CUDA, CPU] if CUDA in ort.get_available_providers() and not given else None


def with_options(
    providers: Providers, provider_options: Sequence[ProviderOptions] | None
) -> Iterator[tuple[str, ProviderOptions]]:
    """Yield the names of providers with their options, which either argument may hold."""
    for item, more in zip(providers, provider_options or [{}] * len(providers), strict=False):
        name, given = (item, {}) if isinstance(item, str) else item
        yield name, {**given, **more}


def starts(ordinal: int) -> bool:
    """Return whether the CUDA provider starts on a GPU; the first call that returns True takes 0.3 s.

    onnxruntime makes a session without it if its libraries are missing.
    """
    with _lock:
        if ordinal in _working:
            return True
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1  # starting a thread for each processor takes longer than the session
        with suppress(Exception):  # onnxruntime's errors have no common class
            providers = [(CUDA, {"device_id": ordinal} if ordinal else {})]
            session = plain_session(PROBE, options, providers, enable_fallback=0)
            if CUDA in session.get_providers():
                _working.add(ordinal)
        return ordinal in _working


def start_early(
    options: ort.SessionOptions | None,
    providers: Providers | None,
    provider_options: Sequence[ProviderOptions] | None,
) -> None:
    """Start the CUDA provider in a thread if a session with these arguments will use it; `starts` waits for it."""
    for name, given in with_options(providers or default_providers(options) or (), provider_options):
        if name == CUDA and CUDA in ort.get_available_providers():
            with suppress(RuntimeError, ValueError):  # no more threads, or no number: opening the session says so
                ordinal = int(str(given.get("device_id", 0)))
                threading.Thread(target=starts, args=(ordinal,), name="onnxfuse provider").start()


def _forget() -> None:
    """Begin anew in a forked process, which does not have the thread that may hold the lock."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_forget)
