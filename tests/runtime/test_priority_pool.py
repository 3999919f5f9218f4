"""Tasks run in threads, the longest first, while more are added."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from onnxfuse.runtime import priority_pool
from onnxfuse.runtime.priority_pool import PriorityThreadPool


def test_the_longest_task_that_waits_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority_pool, "MAX_THREADS", 1)
    begun, go_on, ran = threading.Event(), threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        go_on.wait(10)

    with PriorityThreadPool() as pool:
        pool.add(0, first)
        assert begun.wait(10)
        for length in 3, 0, 7, 5:
            pool.add(length, partial(ran.append, length))
        go_on.set()
    assert ran == [7, 5, 3, 0]


def test_as_many_tasks_run_at_once_as_the_process_may_use_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority_pool.os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    meeting, threads = threading.Barrier(3, timeout=10), set()

    def task() -> None:
        meeting.wait()
        threads.add(threading.get_ident())

    with PriorityThreadPool() as pool:
        for _ in range(6):
            pool.add(1, task)
    assert len(threads) == 3


def test_all_tasks_run_although_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority_pool, "MAX_THREADS", 1)
    ran: list[int] = []

    def fail() -> None:
        raise KeyError("first")

    tasks: list[Callable[[], None]] = [fail, partial(ran.append, 1), partial(ran.append, 2)]
    with pytest.raises(KeyError, match="first"), PriorityThreadPool() as pool:
        for task in tasks:
            pool.add(1, task)
    assert ran == [1, 2]


def test_what_has_not_begun_is_dropped_if_the_body_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority_pool, "MAX_THREADS", 1)
    begun, ran = threading.Event(), list[int]()

    def first() -> None:
        begun.set()
        time.sleep(0.1)

    with pytest.raises(ValueError, match="of the body"), PriorityThreadPool() as pool:
        pool.add(0, first)
        assert begun.wait(10)
        pool.add(1, partial(ran.append, 1))
        raise ValueError("of the body")
    assert not ran


def test_nothing_to_do_starts_no_thread() -> None:
    before = threading.active_count()
    with PriorityThreadPool():
        assert threading.active_count() == before
