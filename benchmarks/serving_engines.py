"""What the parts of serving.py share: the two engines, the sizes of requests, and the bounds of time and memory."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from peers import TOLERANCE

from onnxfuse.ir.dtypes import Array
from onnxfuse.runtime import late_work
from onnxfuse.runtime.plan import Aim
from onnxfuse.session import InferenceSession
from onnxfuse.tuning.bound_session import (
    PROVIDERS,
    WARM_UP_RUNS,
    BoundSession,
    Provider,
    Value,
    bind,
    check_available,
)
from onnxfuse.tuning.dispatch import TunePolicy
from onnxfuse.verify.input_uses import integer_uses
from onnxfuse.verify.inputs import generate_inputs, model_inputs, sizes_to_try

ENGINES = ("onnxruntime", "onnxfuse")
FIRST_SHARE = 0.6  # of a part's seconds, for first visits of shapes: where they are slow, there are fewer
MIB = 2**20
Sizes = dict[str, int]


@dataclass(frozen=True)
class Served:
    """A model as each engine runs it, where it runs, and the sizes of requests."""

    original: str
    fused: str
    provider: Provider
    tune: TunePolicy
    ranges: Mapping[str, tuple[int, int]]  # of dynamic dims, both ends included
    seed: int
    aim: Aim = "latency"

    def start(self, engine: str, wait: bool = True) -> ort.InferenceSession:
        """Open a session from a file: onnxruntime's of the original, or onnxfuse's of the optimized model.

        wait  compile all kernels before; what that takes is measured by cold starts

        Raises RuntimeError where the provider does not start.
        """
        check_available(self.provider)
        options, wanted = ort.SessionOptions(), PROVIDERS[self.provider]
        options.log_severity_level = 4
        if engine == "onnxruntime":
            session = ort.InferenceSession(self.original, options, [wanted])
        else:
            session = InferenceSession(self.fused, options, [wanted], tune=self.tune, aim=self.aim, wait=wait)
            if wait:
                late_work.wait()
        if session.get_providers()[0] != wanted:
            raise RuntimeError(f"{wanted} does not start")
        return session

    def largest(self) -> Sizes:
        """Return the largest size of every dim."""
        return {name: high for name, (_, high) in self.ranges.items()}

    def drawn(self, count: int) -> list[Sizes]:
        """Return different sizes, drawn from the seed, without the largest: sessions warm up at that.

        Raises SystemExit if the ranges have too few of them.
        """
        lengths = [high - low + 1 for low, high in self.ranges.values()]
        available = math.prod(lengths) - 1  # the last one is the largest
        if count > available:
            raise SystemExit(f"{count} shapes are asked for, and the ranges hold {available}; widen one with --range")
        chosen = np.random.default_rng(self.seed).choice(available, count, replace=False)
        places = zip(*np.unravel_index(chosen, lengths), strict=True)
        lows = [low for low, _ in self.ranges.values()]
        return [{name: low + int(i) for name, low, i in zip(self.ranges, lows, place, strict=True)} for place in places]


class Requests:
    """The inputs of a model at any sizes; their values come from the names of the inputs."""

    def __init__(self, path: str, dims: Sequence[str]) -> None:
        """Read the model's inputs.  Raises SystemExit unless `dims` are among its dynamic dims."""
        model = onnx.load(path)
        self.inputs = model_inputs(model)
        self._uses = integer_uses(model)
        self.usual: Sizes = next(sizes_to_try(self.inputs, {}))
        if unknown := set(dims) - self.usual.keys():
            known = ", ".join(self.usual)
            raise SystemExit(f"the dynamic dims of '{path}' are {known or 'none'}; not {', '.join(sorted(unknown))}")

    def feeds(self, sizes: Mapping[str, int], without: Sequence[str] = ()) -> dict[str, Array]:
        """Return the inputs at these sizes, but those named in `without`."""
        wanted = [each for each in self.inputs if each.name not in without]
        return generate_inputs(wanted, {**self.usual, **sizes}, self._uses, {})


def answer(session: ort.InferenceSession, feeds: Mapping[str, Value], provider: Provider) -> BoundSession:
    """Answer a request: its inputs come from the host, and its outputs stay on the device, newly allocated.

    A run ends when its own stream has.  `BoundSession.run` would then wait for the whole device, that is, for the
    requests of other threads (CUDAExecutionProvider::Sync calls cudaDeviceSynchronize).
    """
    bound = bind(session, feeds, provider)
    session.run_with_iobinding(bound.binding)
    return bound


def timed(session: ort.InferenceSession, feeds: Mapping[str, Value], provider: Provider) -> float:
    """Return the milliseconds that a request takes."""
    start = time.perf_counter()
    answer(session, feeds, provider)
    return 1e3 * (time.perf_counter() - start)


def warm_up(session: ort.InferenceSession, feeds: Mapping[str, Value], provider: Provider) -> None:
    """Answer the first requests of a session."""
    for _ in range(WARM_UP_RUNS):
        answer(session, feeds, provider)


def in_turn(turn: int) -> Sequence[str]:
    """Return the engines, each of them first in every other turn."""
    return ENGINES if turn % 2 == 0 else ENGINES[::-1]


def agreement(apart: float) -> dict[str, Any]:
    """Return how far outputs of the engines are apart, relative to the norm, and whether that is rounding."""
    return {"relative_error": digits(apart) if math.isfinite(apart) else None, "agrees": apart <= TOLERANCE}


# --- bounds ----------------------------------------------------------------------------------------------------------


class Bounds:
    """What ends a part before it is complete: its seconds, or the resident memory of its process."""

    def __init__(self, seconds: float, memory: float) -> None:
        self._start, self._seconds, self._memory = time.monotonic(), seconds, memory

    def reached(self, share: float = 1.0) -> str:
        """Return which bound is reached, "" if none is; `share` is of the seconds."""
        if time.monotonic() - self._start > share * self._seconds:
            return f"the {share * self._seconds:.0f} s are spent"
        if resident() > self._memory:
            return f"the process holds more than {self._memory / 2**30:.1f} GiB"
        return ""

    def left(self) -> float:
        """Return the seconds that are left, at least one."""
        return max(1.0, self._start + self._seconds - time.monotonic())

    def within(self, steps: Sequence[Any], share: float = 1.0) -> Iterator[tuple[int, Any]]:
        """Yield steps with their numbers until a bound is reached."""
        return enumerate(itertools.takewhile(lambda _: not self.reached(share), steps))


def resident() -> int:
    """Return the resident bytes of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def used_on_device(provider: Provider) -> int | None:
    """Return the bytes of GPU 0 that are in use, by all processes; None on the CPU."""
    if provider == "cpu":
        return None
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return int(total - free)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, high percentiles and the largest of values."""
    median, p90, p99, worst = np.percentile(values, [50, 90, 99, 100])
    return {"median": digits(median), "p90": digits(p90), "p99": digits(p99), "worst": digits(worst)}


def digits(value: float) -> float:
    """Return the number with five significant digits, which is what a measurement has."""
    return float(f"{value:.5g}")
