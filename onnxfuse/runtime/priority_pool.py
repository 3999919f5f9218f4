"""Run tasks in threads, the longest first, while more are added, so that no long task is left for the end."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Final

MAX_THREADS: Final = 32
_Task = Callable[[], None]


def processors() -> int:
    """Return how many processors this process may use: a container may get a few of a machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class PriorityThreadPool:
    """A context manager that waits for its tasks at its end, and then raises the first error of a task.

    If the `with` block raises an error, tasks that have not begun are dropped.
    """

    def __init__(self, threads: int | None = None) -> None:
        """Set the largest number of threads, by default that of `processors`; start none yet."""
        self._max_threads = threads or min(MAX_THREADS, processors())
        self._tasks: queue.PriorityQueue[tuple[int, int, _Task | None]] = queue.PriorityQueue()
        self._numbers = count()  # of tasks of equal length, the one that was added first runs first
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def add(self, length: int, task: _Task) -> None:
        """Add a task; `length` estimates how long it takes, in any unit."""
        self._put(length, task)
        if len(self._threads) < self._max_threads:
            thread = threading.Thread(target=self._work, name="onnxfuse loader", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _put(self, length: int, task: _Task | None) -> None:
        self._tasks.put((-length, next(self._numbers), task))

    def _work(self) -> None:
        while task := self._tasks.get()[2]:
            try:
                task()
            except BaseException as error:  # the waiting thread raises the error
                self._errors.append(error)

    def __enter__(self) -> PriorityThreadPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while error and not self._tasks.empty():
            self._tasks.get()
        for _ in self._threads:
            self._put(-1, None)  # ends a thread; shorter than every task, so that it is taken last
        for thread in self._threads:
            thread.join()
        if self._errors and not error:
            raise self._errors[0]
