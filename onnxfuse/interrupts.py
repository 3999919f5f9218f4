"""End a command with one line at Ctrl-C, at any moment: while it imports, computes or cleans up."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import FrameType

SECONDS_TO_CLEAN_UP: Final = 3.0  # time after a Ctrl-C during which any further Ctrl-C is ignored
SECONDS_UNTIL_RAISED_AGAIN: Final = 0.02
# Functions during which a Ctrl-C is delayed.  In importlib's functions, onnx's extension crashes if Python code that it
# runs raises.  In Worker.start, an error would leave the new process running, because it is not recorded yet.
UNINTERRUPTED: Final = {"ExtensionFileLoader.create_module", "ExtensionFileLoader.exec_module", "Worker.start"}

_last: float | None = None  # the time of the last Ctrl-C


def install() -> None:
    """Make Ctrl-C raise KeyboardInterrupt, but only once within SECONDS_TO_CLEAN_UP, so that cleaning up can finish."""
    signal.signal(signal.SIGINT, _raise)
    sys.unraisablehook = _raise_again


def ignore() -> None:
    """Ignore Ctrl-C from here on: the command has ended, and only Python's shutdown remains."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def seen() -> bool:
    """Return whether Ctrl-C was pressed; it can have become another exception, such as a failed import."""
    return _last is not None


def _raise(number: int, frame: FrameType | None) -> None:
    global _last
    if _is_uninterrupted(frame):
        _interrupt_later()
        return
    now = time.monotonic()
    if _last is None or now - _last > SECONDS_TO_CLEAN_UP:
        _last = now
        raise KeyboardInterrupt


def _raise_again(unraisable: Any) -> None:
    """Raise a KeyboardInterrupt again that arrived while an object was deleted: Python only prints it."""
    global _last
    if unraisable.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(unraisable)
        return
    _last = None
    _interrupt_later()


def _interrupt_later() -> None:
    threading.Timer(SECONDS_UNTIL_RAISED_AGAIN, _thread.interrupt_main).start()


def _is_uninterrupted(frame: FrameType | None) -> bool:
    """Return whether the frame or one of its callers belongs to a function of UNINTERRUPTED."""
    while frame is not None:
        if frame.f_code.co_qualname in UNINTERRUPTED:
            return True
        frame = frame.f_back
    return False
