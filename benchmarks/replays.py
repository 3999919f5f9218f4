"""Time calls in CUDA graphs that are replayed in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

REPLAYS = 9
GRAPH_US = 400.0  # of work in a graph, at least

Calls = list[Callable[[], Any]]


@dataclass(frozen=True)
class Captured:
    """A CUDA graph of `count` calls; the calls keep the tensors alive."""

    graph: torch.cuda.CUDAGraph
    count: int
    calls: Calls


def captured(calls: Calls) -> Captured:
    """Capture as many rounds of the calls as take GRAPH_US."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        one = elapsed(calls[-1])
    rounds = max(1, math.ceil(GRAPH_US / (len(calls) * max(one, 1.0))))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # torch.cuda.graph() would collect garbage, which takes longer than the measurement
        graph.capture_begin()
        try:
            for _ in range(rounds):
                for call in calls:
                    call()
        finally:
            graph.capture_end()
    graph.replay()
    return Captured(graph, rounds * len(calls), calls)


def in_turns(graphs: dict[str, Captured], replays: int = REPLAYS) -> dict[str, float]:
    """Return the microseconds of a call in each graph, the median of its replays."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, each in graphs.items():
            times[name].append(elapsed(each.graph.replay) / each.count)
    return {name: statistics.median(found) for name, found in times.items()}


def per_call(calls: Calls) -> float:
    """Return the microseconds of a call, in a CUDA graph of repeated `calls`."""
    return in_turns({"": captured(calls)})[""]


def elapsed(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(1000 * start.elapsed_time(end))
