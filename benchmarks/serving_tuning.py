"""Tuning in the background of a server: the latency of requests before, while and after a session measures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
from peers import relative_error, sampled
from serving_engines import Bounds, Requests, Served, agreement, answer, digits, timed, warm_up

from onnxfuse.ir.dtypes import Array

SIZES = 4  # of requests, in turns
PAUSE = 0.05  # seconds between requests; longer than the 20 ms behind a run in which nothing is measured
STEADY_SECONDS = 6.0  # of requests to each session before and after
MEASURED = "measured between runs"  # in a line of onnxfuse's log, for each kernel and size
Feeds = Mapping[str, Array]


class Measurements(logging.Handler):
    """The seconds, from when this is made, at which onnxfuse's log told of measurements."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.start, self.at = time.monotonic(), list[float]()

    def emit(self, record: logging.LogRecord) -> None:
        if MEASURED in record.getMessage():
            self.at.append(time.monotonic() - self.start)


def background(served: Served, seconds: float, bounds: Bounds) -> dict[str, Any]:
    """Send requests with pauses to a session that is never tuned, to one that tunes meanwhile, and to both.

    seconds  of requests to the second session before both are compared; what is left is measured then

    Raises RuntimeError on the CPU, where nothing is measured.
    """
    if served.provider == "cpu":
        raise RuntimeError("tune='background' measures kernels, which need a GPU; give --provider cuda")
    requests, sizes = Requests(served.original, tuple(served.ranges)), served.drawn(SIZES)
    pool, largest = [requests.feeds(each) for each in sizes], requests.feeds(served.largest())
    plain = _started(replace(served, tune="never"), pool, largest)
    expected = [sampled(answer(plain, feeds, served.provider).outputs()) for feeds in pool]
    rows = _rows("before", {"never": plain}, pool, served, _until(bounds, STEADY_SECONDS))
    measurements = _observed()
    tuned = _started(replace(served, tune="background"), pool, largest)
    rows += _rows("during", {"background": tuned}, pool, served, _until(bounds, seconds))
    both = {"never": plain, "background": tuned}
    rows += _rows("after", both, pool, served, _until(bounds, 2 * STEADY_SECONDS))
    outputs = [answer(tuned, feeds, served.provider).outputs() for feeds in pool]
    apart = max(relative_error(one, other) for one, other in zip(expected, outputs, strict=True))
    return {"sizes": sizes, "pause_ms": 1e3 * PAUSE, "measured": len(measurements.at), "stopped": bounds.reached(),
            "measured_at_s": [digits(each) for each in measurements.at], "rows": rows,
            **agreement(apart)}  # fmt: skip


def _started(served: Served, pool: Sequence[Feeds], largest: Feeds) -> ort.InferenceSession:
    """Return a session that has seen all requests."""
    session = served.start("onnxfuse")
    warm_up(session, largest, served.provider)
    for feeds in pool:
        warm_up(session, feeds, served.provider)
    return session


def _observed() -> Measurements:
    """Count measurements from now on; the processes of serving.py show no log of their own."""
    measurements, log = Measurements(), logging.getLogger("onnxfuse")
    logging.disable(logging.NOTSET)
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(measurements)
    return measurements


def _until(bounds: Bounds, seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() < end and not bounds.reached()


def _rows(
    phase: str,
    sessions: Mapping[str, ort.InferenceSession],
    pool: Sequence[Feeds],
    served: Served,
    goes_on: Callable[[], bool],
) -> list[dict[str, Any]]:
    """Send each request to the sessions in turns, with pauses, and return a row of each session."""
    times: dict[str, list[list[float]]] = {tune: [[] for _ in pool] for tune in sessions}
    turn = 0
    while goes_on() or turn < len(pool):
        for tune, session in sessions.items():
            time.sleep(PAUSE)
            times[tune][turn % len(pool)].append(timed(session, pool[turn % len(pool)], served.provider))
        turn += 1
    return [_row(phase, tune, found) for tune, found in times.items()]


def _row(phase: str, tune: str, times: Sequence[Sequence[float]]) -> dict[str, Any]:
    every = np.concatenate([np.asarray(each) for each in times])
    p50, p99, worst = np.percentile(every, [50, 99, 100])
    return {"phase": phase, "tune": tune, "requests": len(every), "p50_ms": digits(p50), "p99_ms": digits(p99),
            "worst_ms": digits(worst), "median_ms_by_size": [digits(np.median(each)) for each in times]}  # fmt: skip
