"""Mixed shapes: the first visit of each against later ones, and many threads on one session."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnxruntime as ort
from clocks import Clocks
from peers import relative_error, sampled
from serving_engines import (
    ENGINES,
    FIRST_SHARE,
    Bounds,
    Requests,
    Served,
    Sizes,
    agreement,
    answer,
    digits,
    in_turn,
    spread,
    timed,
    warm_up,
)

from onnxfuse.ir.dtypes import Array
from onnxfuse.runtime import late_work

LATER = 3  # visits of each shape after its first
VISITED = 64  # shapes of the requests under load
UNSEEN = 48  # shapes that each number of threads meets for the first time
SLICES = 4  # of the seconds of an engine at a number of threads, in turns with the other engine
Feeds = Mapping[str, Array]
Sessions = Mapping[str, ort.InferenceSession]


def started(served: Served, requests: Requests) -> Sessions:
    """Return a session of each engine that has answered requests of the largest size."""
    sessions = {engine: served.start(engine) for engine in ENGINES}
    for session in sessions.values():
        warm_up(session, requests.feeds(served.largest()), served.provider)
    return sessions


# --- first and later visits ------------------------------------------------------------------------------------------


def visits(served: Served, count: int, bounds: Bounds) -> dict[str, Any]:
    """Visit shapes that no session has met, in turns, then all of them again; compare the outputs at each."""
    requests, shapes = Requests(served.original, tuple(served.ranges)), served.drawn(count)
    sessions = started(served, requests)
    first: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    later: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
    for turn, sizes in bounds.within(shapes, FIRST_SHARE):
        feeds = requests.feeds(sizes)
        for engine in in_turn(turn):
            first[engine].append(timed(sessions[engine], feeds, served.provider))
            later[engine].append([])
    visited = shapes[: len(first[ENGINES[0]])]
    for turn, sizes in bounds.within(visited * LATER):
        feeds = requests.feeds(sizes)
        for engine in in_turn(turn):
            later[engine][turn % len(visited)].append(timed(sessions[engine], feeds, served.provider))
    complete = [i for i in range(len(visited)) if all(later[engine][i] for engine in ENGINES)]
    if not complete:
        raise TimeoutError(f"no shape was visited twice: {bounds.reached()}")
    found = {"asked": count, "shapes": len(complete), "stopped": bounds.reached(FIRST_SHARE) * (len(complete) < count)}
    for engine in ENGINES:
        medians = [float(np.median(later[engine][i])) for i in complete]
        found[engine] = _visits_of([visited[i] for i in complete], [first[engine][i] for i in complete], medians)
    return found | _agreement(served, requests, sessions, [visited[i] for i in complete], bounds)


def bodies(served: Served, count: int, bounds: Bounds) -> dict[str, Any]:
    """Visit the shapes of `unprepared` twice in a session of onnxruntime alone, which runs fused nodes as bodies."""
    requests, session = Requests(served.original, tuple(served.ranges)), _of_bodies(served)
    given = [requests.feeds(sizes) for _, sizes in bounds.within(served.drawn(count))]
    first, later = ([digits(timed(session, feeds, served.provider)) for feeds in given] for _ in range(2))
    return {"first_ms": first, "later_ms": later}


def _of_bodies(served: Served) -> ort.InferenceSession:
    return dataclasses.replace(served, original=served.fused).start("onnxruntime")


def unprepared(served: Served, count: int, alone: Mapping[str, Sequence[float]], bounds: Bounds) -> dict[str, Any]:
    """Visit shapes while kernels are compiled: onnxfuse, with the caches that are there.

    The first run of all, which loads libraries, is told apart from the others.

    alone  the result of `bodies`, from a process of its own: in this one, libraries are loaded and their heuristics are
           known when the bodies of all nodes run, so that they take a quarter of the time
    """
    requests, shapes = Requests(served.original, tuple(served.ranges)), served.drawn(count)
    began = time.perf_counter()
    session = served.start("onnxfuse", wait=False)
    opened = time.perf_counter() - began
    answers = [(sizes, timed(session, requests.feeds(sizes), served.provider)) for _, sizes in bounds.within(shapes)]
    answered = time.perf_counter() - began
    late_work.wait()
    compiled = time.perf_counter() - began
    of_bodies, rows = _of_bodies(served), list[dict[str, Any]]()
    for (sizes, first), body, body_later in zip(answers, alone["first_ms"], alone["later_ms"], strict=False):
        feeds = requests.feeds(sizes)
        later = timed(session, feeds, served.provider)
        apart = relative_error(sampled(answer(of_bodies, feeds, served.provider).outputs()),
                               answer(session, feeds, served.provider).outputs())  # fmt: skip
        rows.append({**sizes, "first_ms": digits(first), "body_ms": body, "body_later_ms": body_later,
                     "later_ms": digits(later), "relative_error": digits(apart)})  # fmt: skip
    if not rows:
        raise TimeoutError(f"no shape was visited: {bounds.reached() or 'none was asked for'}")
    return {"asked": count, "session_s": digits(opened), "all_answered_s": digits(answered),
            "all_compiled_s": digits(compiled), **(_others(rows[1:]) if rows[1:] else {}),
            "first_run_ms": rows[0]["first_ms"], "first_run_body_ms": rows[0]["body_ms"], "rows": rows,
            **agreement(max(row["relative_error"] for row in rows))}  # fmt: skip


def _others(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the times of the runs after the first."""
    times = {f"{kind}_ms": [row[f"{kind}_ms"] for row in rows] for kind in ("first", "body", "body_later", "later")}
    beyond = {
        f"beyond_{kind}_ms": digits(max(row["first_ms"] - row[f"{kind}_ms"] for row in rows))
        for kind in ("body", "body_later")
    }
    return {**{name: spread(each) for name, each in times.items()}, **beyond}


def _visits_of(shapes: Sequence[Sizes], first: Sequence[float], later: Sequence[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(first, later, strict=True)]
    rows = [
        {**sizes, "first_ms": digits(a), "later_ms": digits(b)}
        for sizes, a, b in zip(shapes, first, later, strict=True)
    ]
    return {"first_ms": spread(first), "later_ms": spread(later), "first_to_later": spread(ratios),
            "worst_at": shapes[int(np.argmax(ratios))], "visits": rows}  # fmt: skip


def _agreement(
    served: Served, requests: Requests, sessions: Sessions, shapes: Sequence[Sizes], bounds: Bounds
) -> dict[str, Any]:
    """Return the largest difference of the engines' outputs over shapes, relative to the norm."""
    worst, compared = 0.0, 0
    for _, sizes in bounds.within(shapes):
        feeds = requests.feeds(sizes)
        expected, outputs = (answer(sessions[each], feeds, served.provider).outputs() for each in ENGINES)
        worst, compared = max(worst, relative_error(sampled(expected), outputs)), compared + 1
    return {"compared": compared, **(agreement(worst) if compared else {})}


# --- load ------------------------------------------------------------------------------------------------------------


def load(served: Served, threads: Sequence[int], seconds: float, limit: int, bounds: Bounds) -> dict[str, Any]:
    """Serve mixed shapes from each number of threads: such as were visited before, then such as no session has met.

    seconds  for each engine at each number of threads
    limit    of the requests in that time
    """
    requests, shapes = Requests(served.original, tuple(served.ranges)), _shapes_under_load(served, len(threads))
    sessions = started(served, requests)
    clocks = Clocks() if served.provider == "cuda" else None
    pool = [requests.feeds(sizes) for sizes in shapes[:VISITED]]
    visited = []
    for turn, feeds in bounds.within(pool, FIRST_SHARE):
        visited.append(feeds)
        for engine in in_turn(turn):
            answer(sessions[engine], feeds, served.provider)
    rows: list[dict[str, Any]] = []
    served_by = []
    for turn, count in bounds.within(threads):
        served_by.append(count)
        rows += _visited_shapes(served, sessions, visited, count, seconds, limit, clocks)
        new = shapes[VISITED + turn * UNSEEN : VISITED + (turn + 1) * UNSEEN]
        rows += _unseen_shapes(served, sessions, [requests.feeds(sizes) for sizes in new], count, turn)
    stopped = bounds.reached() if (len(visited), len(served_by)) < (len(pool), len(threads)) else ""
    return {"asked": list(threads), "shapes": len(visited), "stopped": stopped, "rows": rows}


def _shapes_under_load(served: Served, steps: int) -> list[Sizes]:
    """Return the shapes of the pool, then those that each step meets for the first time; fewer from small ranges."""
    available = int(np.prod([high - low + 1 for low, high in served.ranges.values()])) - 1
    return served.drawn(min(available, VISITED + steps * UNSEEN))


def _visited_shapes(
    served: Served, sessions: Sessions, pool: Sequence[Feeds], threads: int, seconds: float, limit: int,
    clocks: Clocks | None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a row of each engine, which take turns with slices of the time; both answer the same requests in order."""
    order = np.random.default_rng(served.seed).integers(0, len(pool), limit)
    waiting = {engine: iter([pool[i] for i in order]) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    spent, start = dict.fromkeys(ENGINES, 0.0), time.perf_counter()
    for turn in range(SLICES):
        for engine in in_turn(turn):
            found, wall = closed_loop(_client(sessions[engine], served), waiting[engine], threads, seconds / SLICES)
            times[engine] += found
            spent[engine] += wall
    sampled_clocks = clocks.since(start) if clocks else {}
    return [_row(engine, "visited", threads, times[engine], spent[engine]) | sampled_clocks for engine in ENGINES]


def _unseen_shapes(
    served: Served, sessions: Sessions, pool: Sequence[Feeds], threads: int, turn: int
) -> list[dict[str, Any]]:
    """Return a row of each engine for shapes that it meets for the first time, each once; none if none are left."""
    rows = {}
    for engine in in_turn(turn) if pool else ():
        times, wall = closed_loop(_client(sessions[engine], served), iter(pool), threads, float("inf"))
        rows[engine] = _row(engine, "unseen", threads, times, wall)
    return [rows[engine] for engine in ENGINES if engine in rows]


def _client(session: ort.InferenceSession, served: Served) -> Callable[[Feeds], object]:
    return lambda feeds: answer(session, feeds, served.provider)


def closed_loop(
    serve: Callable[[Feeds], object], waiting: Iterator[Feeds], threads: int, seconds: float
) -> tuple[list[float], float]:
    """Let each thread send its next request when its last one is answered.

    Returns the milliseconds of each request, and the seconds from the first request to the last answer.
    """
    taking, until = threading.Lock(), time.perf_counter() + seconds

    def client(_: int) -> list[float]:
        times = []
        while time.perf_counter() < until:
            with taking:
                feeds = next(waiting, None)
            if feeds is None:
                break
            start = time.perf_counter()
            serve(feeds)
            times.append(1e3 * (time.perf_counter() - start))
        return times

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as clients:
        times = list(itertools.chain.from_iterable(clients.map(client, range(threads))))
    return times, time.perf_counter() - start


def _row(engine: str, shapes: str, threads: int, times: Sequence[float], seconds: float) -> dict[str, Any]:
    latency = np.percentile(times, [50, 90, 99, 100])
    names = ("p50_ms", "p90_ms", "p99_ms", "worst_ms")
    return {"engine": engine, "shapes": shapes, "threads": threads, "requests": len(times),
            "requests_per_s": digits(len(times) / seconds),
            **{name: digits(value) for name, value in zip(names, latency, strict=True)}}  # fmt: skip
