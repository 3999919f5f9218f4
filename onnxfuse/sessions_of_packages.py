"""Kernels in sessions that other packages open, where those take neither sessions nor session options."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from onnxfuse.errors import NO_ONNXRUNTIME, MissingPackageError

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingPackageError(f"{NO_ONNXRUNTIME} ({error})") from error

from onnxfuse.runtime.plain_session import initialize
from onnxfuse.session import InferenceSession

_lock: Final = threading.Lock()
_blocks: Final[list[Mapping[str, Any]]] = []  # the arguments of the blocks that run


@contextmanager
def all_sessions(**arguments: Any) -> Iterator[None]:
    """Run fused nodes as kernels in every onnxruntime.InferenceSession that is opened in a `with` block.

    arguments  arguments of `onnxfuse.InferenceSession` after the first four, such as wait=True, for each session

    Packages open sessions by themselves, often at the first call of a model. In the block, these are opened as
    `onnxfuse.InferenceSession` opens them, in all threads of the process; sessions of models without fused nodes stay
    as they are. After the block, its sessions keep their kernels. Of overlapping blocks, the last one applies.

        with onnxfuse.all_sessions():
            detector = YOLO("fused.onnx", task="detect")
            detector(image)  # opens the session

    Opening a session raises the errors of `onnxfuse.InferenceSession`, and UsageError for tune="background" in a
    subclass of onnxruntime.InferenceSession.
    """
    with _lock:
        _blocks.append(arguments)
        ort.InferenceSession.__init__ = _initialize
    try:
        yield
    finally:
        with _lock:
            _blocks.pop(next(i for i, each in enumerate(_blocks) if each is arguments))
            if not _blocks:
                ort.InferenceSession.__init__ = initialize


def _initialize(session: ort.InferenceSession, *given: Any, **named: Any) -> None:
    """Open a session whose constructor was called in a block."""
    with _lock:
        arguments = _blocks[-1] if _blocks else {}
    InferenceSession(*given, **{**arguments, **named}, into=session)
