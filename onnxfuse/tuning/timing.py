"""Time callables in turns, and state the median and the quartiles of their runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

MIN_RUNS: Final = 10  # MIN_RUNS and MAX_RUNS are the default limits of `runs_within`
MAX_RUNS: Final = 200


@dataclass(frozen=True)
class RunTimes:
    """The seconds of a run, as the median, the quartiles and the minimum over `runs` runs."""

    median: float
    q1: float
    q3: float
    minimum: float
    runs: int

    @staticmethod
    def of(seconds: Sequence[float]) -> RunTimes:
        """Summarize the seconds of each run."""
        if len(seconds) < 2:
            return RunTimes(seconds[0], seconds[0], seconds[0], seconds[0], 1)
        q1, median, q3 = statistics.quantiles(seconds, n=4, method="inclusive")
        return RunTimes(median, q1, q3, min(seconds), len(seconds))

    def to_json(self) -> dict[str, float | int]:
        """Return plain data, with the times in milliseconds."""
        times = {"median_ms": self.median, "q1_ms": self.q1, "q3_ms": self.q3, "min_ms": self.minimum}
        return {**{name: round(1e3 * value, 5) for name, value in times.items()}, "runs": self.runs}


def interleaved(
    runs: Sequence[Callable[[], None]], count: int, before: Callable[[], None] = lambda: None
) -> list[RunTimes]:
    """Time each callable `count` times, in turns, so that changing clocks and noise affect all callables equally.

    `before` is called before every run, and is not timed.
    """
    seconds: list[list[float]] = [[] for _ in runs]
    for turn in range(count):
        for step in range(len(runs)):
            which = (turn + step) % len(runs)
            before()
            start = time.perf_counter()
            runs[which]()
            seconds[which].append(time.perf_counter() - start)
    return [RunTimes.of(each) for each in seconds]


def runs_within(seconds: float, run: Callable[[], None], least: int = MIN_RUNS, most: int = MAX_RUNS) -> int:
    """Return how many runs take about `seconds`, but at least `least` and at most `most`."""
    start = time.perf_counter()
    run()
    return max(least, min(most, int(seconds / max(time.perf_counter() - start, 1e-6))))
