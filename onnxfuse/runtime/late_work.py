"""Threads for work that runs do not wait for: above all, compiling kernels."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Final, TypeVar

PATIENCE: Final = 0.02  # seconds that a run waits for its kernels, if nothing else is being compiled
MAX_THREADS: Final = 4  # maximum threads that `soon` works in
# Seconds for which a thread that makes plans keeps Python from the program whose run has ended.  Python's default is
# 0.005.
SWITCH_INTERVAL: Final = 0.00002
T = TypeVar("T")
_working: Final[set[threading.Thread]] = set()
_intervals: Final[list[float]] = []  # the switch interval before these threads started, while they work
_exits: Final = threading.Event()
_answers: Final[deque[Callable[[], None]]] = deque()  # work of `soon` that has not begun
_unanswered: Final[set[Future[Any]]] = set()  # results of `soon` that are not there yet
_answering = 0  # threads that do the work of `soon`
_lock = threading.Lock()  # guards the others


def start(work: Callable[[], None], name: str) -> None:
    """Do some work in a thread, for whose end Python waits before it exits.

    Raises RuntimeError if the process cannot have another thread.
    """

    def run() -> None:
        try:
            work()
        finally:
            _ends(threading.current_thread())

    thread = threading.Thread(target=run, name=name, daemon=True)
    _begins(thread)
    try:
        thread.start()
    except RuntimeError:  # the process has too many threads
        _ends(thread)
        raise


def _begins(thread: threading.Thread) -> None:
    with _lock:
        _working.add(thread)
        if not _intervals:
            _intervals.append(sys.getswitchinterval())
            sys.setswitchinterval(min(SWITCH_INTERVAL, _intervals[0]))


def _ends(thread: threading.Thread) -> None:
    with _lock:
        _working.discard(thread)
        if not _working and _intervals:
            sys.setswitchinterval(_intervals.pop())


def soon(make: Callable[[], T], late: Callable[[T], None]) -> T | None:
    """Return the result of `make` if a thread has it within PATIENCE seconds.

    Otherwise, return None now, and call `late` with the result once `make` has it.  While other work goes on, the
    compiler is probably busy, so that this function waits for nothing.

    Passes on the errors that `make` raises in time; later ones are dropped.
    """
    answer: Future[T] = Future()
    _unanswered.add(answer)
    answer.add_done_callback(_unanswered.discard)
    patience = 0.0 if _working else PATIENCE

    def work() -> None:
        try:
            answer.set_result(make())
        except BaseException as error:
            answer.set_exception(error)

    def deliver(done: Future[T]) -> None:
        if not done.exception():
            late(done.result())

    _add(work)
    try:
        return answer.result(patience)
    except TimeoutError:
        answer.add_done_callback(deliver)  # at once if it is done by now
        return None


def _add(work: Callable[[], None]) -> None:
    """Let one of at most MAX_THREADS threads do some work, after the work that was added earlier."""
    global _answering
    with _lock:
        _answers.append(work)
        begins = _answering < MAX_THREADS
        _answering += begins
    if begins:
        try:
            start(_answer_all, "onnxfuse late answer")
        except RuntimeError:  # the process has too many threads: a later thread does the work
            with _lock:
                _answering -= 1


def _answer_all() -> None:
    global _answering
    while True:
        with _lock:
            if not _answers or exits():
                _answering -= 1
                return
            work = _answers.popleft()
        work()


def wait_for_answers() -> None:
    """Wait until all work that `soon` was given by now is done; work that has not begun is done here."""
    waited = list(_unanswered)
    while True:
        with _lock:
            if not _answers:
                break
            work = _answers.popleft()
        work()
    wait_for(waited)


def exits() -> bool:
    """Return whether Python exits, so that no more work should begin."""
    return _exits.is_set()


def wait() -> None:
    """Wait until all threads of this module have ended, and those that they start."""
    while started := [each for each in list(_working) if each.is_alive()]:  # `join` refuses one that starts just now
        for thread in started:
            thread.join()


@atexit.register
def _stop() -> None:
    """Wait for running compilations, because the compiler's library must not be unloaded while they use it."""
    _exits.set()
    wait()


def _forget() -> None:
    """Begin anew in a forked process, which has none of its parent's threads."""
    global _answering, _lock
    _working.clear()
    _answers.clear()
    _unanswered.clear()
    while _intervals:
        sys.setswitchinterval(_intervals.pop())
    _answering, _lock = 0, threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows cannot fork
    os.register_at_fork(after_in_child=_forget)
