"""Count the runs of sessions that are in flight, and do work on the GPU between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

QUIET_SECONDS: Final = 0.02  # work starts this long after the last run has ended; it never starts between closer runs
PATIENCE_SECONDS: Final = 2.0  # how long work waits for QUIET_SECONDS without a run; it holds GPU memory meanwhile
MAX_ATTEMPTS: Final = 10  # maximum number of calls of one piece of work; it is repeated if a run began meanwhile


class Alone(Protocol):
    """Waits if needed, calls `work`, perhaps several times, and returns its result."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Call `work`."""


class MeasuringStopped(BaseException):
    """Raised to end a measurement, because runs leave no time for it, or no session exists any more.

    Like asyncio.CancelledError, it is not an Exception, because it is not a failure of the measured plan.
    """


def at_once(work: Callable[[], T]) -> T:
    """Call `work` at once and return its result; for callers that need not wait until no run is in flight."""
    return work()


class RunsInFlight:
    """Counts the runs of some sessions that have begun and not ended; its methods are thread-safe."""

    def __init__(self, goes_on: Callable[[], bool]) -> None:
        """Begin with no runs; waiting ends as soon as `goes_on` returns False."""
        self._goes_on = goes_on
        self.forget()

    def forget(self) -> None:
        """Count from 0 again; a forked process calls this, because it has none of its parent's runs."""
        self._lock = threading.Lock()
        self._running = self._begun = 0
        self._ended = float("-inf")

    def begin(self) -> None:
        """Count a run that begins."""
        with self._lock:
            self._running += 1
            self._begun += 1

    def end(self) -> None:
        """Count a run that has ended."""
        with self._lock:
            self._running -= 1
            self._ended = time.monotonic()

    def alone(self, work: Callable[[], T]) -> T:
        """Call `work` while no run is in flight, and return its result; call it again if a run began meanwhile.

        Raises MeasuringStopped if runs leave no time for that.
        """
        for _ in range(MAX_ATTEMPTS):
            begun = self.wait_for_none(PATIENCE_SECONDS)
            result = work()
            if begun == self._begun:
                return result
        raise MeasuringStopped

    def wait_for_none(self, seconds: float) -> int:
        """Wait until no run is in flight and the last one ended QUIET_SECONDS ago; return how many runs have begun.

        Raises MeasuringStopped after `seconds`, or if `goes_on` (see `__init__`) returns False.
        """
        deadline = time.monotonic() + seconds
        while self._goes_on():
            with self._lock:
                now = time.monotonic()
                wait = QUIET_SECONDS if self._running else self._ended + QUIET_SECONDS - now
                if wait <= 0:
                    return self._begun
            if now + wait > deadline:
                break
            time.sleep(wait)
        raise MeasuringStopped
