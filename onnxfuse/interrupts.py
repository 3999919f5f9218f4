"""Let Ctrl-C end a command in one line at any moment, while it imports, cleans up or computes."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import FrameType

SECONDS_TO_CLEAN_UP: Final = 3.0  # after a Ctrl-C, while further ones change nothing
SECONDS_UNTIL_RAISED_AGAIN: Final = 0.02
LOADING_EXTENSIONS: Final = {"ExtensionFileLoader.create_module", "ExtensionFileLoader.exec_module"}  # of importlib

_last: float | None = None  # the time of the last Ctrl-C


def install() -> None:
    """Raise KeyboardInterrupt at Ctrl-C, once while files and processes are cleaned up."""
    signal.signal(signal.SIGINT, _raise)
    sys.unraisablehook = _raise_again


def ignore() -> None:
    """Ignore Ctrl-C from here on: the command has ended, and what is left is Python's own end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def seen() -> bool:
    """Whether there was a Ctrl-C: another exception, such as a failed import, may be what became of it."""
    return _last is not None


def _raise(number: int, frame: FrameType | None) -> None:
    global _last
    if _loads_extension(frame):
        _interrupt_later()
        return
    now = time.monotonic()
    if _last is None or now - _last > SECONDS_TO_CLEAN_UP:
        _last = now
        raise KeyboardInterrupt


def _raise_again(unraisable: Any) -> None:
    """Raise a KeyboardInterrupt again that came while an object was deleted, where Python only prints it."""
    global _last
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    _last = None
    _interrupt_later()


def _interrupt_later() -> None:
    threading.Timer(SECONDS_UNTIL_RAISED_AGAIN, _thread.interrupt_main).start()


def _loads_extension(frame: FrameType | None) -> bool:
    """Return whether a C extension is being loaded: that of onnx crashes if Python code that it runs then raises."""
    while frame is not None:
        if frame.f_code.co_qualname in LOADING_EXTENSIONS:
            return True
        frame = frame.f_back
    return False
