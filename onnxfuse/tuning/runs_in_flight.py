"""Count the runs of sessions that are in flight, and do work on the GPU between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

T = TypeVar("T")

QUIET_SECONDS: Final = 0.02  # since the last run ended: a server whose requests follow more closely is left alone
PATIENCE_SECONDS: Final = 2.0  # of waiting for that with memory allocated for a trial
MAX_ATTEMPTS: Final = 10  # at a piece of work during which runs began


class Alone(Protocol):
    """Returns what `work` returns, which it calls now or later, and perhaps more than once."""

    def __call__(self, work: Callable[[], T], /) -> T:
        """Call `work`."""


class MeasuringStopped(BaseException):
    """A measurement is given up, because runs leave no time for it or their sessions are gone.

    It is no Exception, as asyncio.CancelledError is none: it is no failure of the plan that was measured.
    """


def at_once(work: Callable[[], T]) -> T:
    """Return what `work` returns: no run is in flight whose time it would take."""
    return work()


class RunsInFlight:
    """The runs of some sessions that have begun and not ended; any thread may call its methods."""

    def __init__(self, goes_on: Callable[[], bool]) -> None:
        """Count no runs yet; `goes_on` says whether waiting still makes sense."""
        self._goes_on = goes_on
        self.forget()

    def forget(self) -> None:
        """Count from 0 again, as a forked process must: its only thread has none of these runs."""
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
        """Return what `work` returns, called while no run is in flight; it is called again if one began meanwhile.

        Raises MeasuringStopped if runs leave no time for that.
        """
        for _ in range(MAX_ATTEMPTS):
            begun = self.wait_for_none(PATIENCE_SECONDS)
            result = work()
            if begun == self._begun:
                return result
        raise MeasuringStopped

    def wait_for_none(self, seconds: float) -> int:
        """Return how many runs have begun, when none is in flight and the last one ended QUIET_SECONDS ago.

        Raises MeasuringStopped after so many seconds.
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
