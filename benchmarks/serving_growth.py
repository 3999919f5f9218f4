"""What grows in a server: the memory of a process over many shapes, and a cache of keys and values, step by step."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from peers import relative_error, sampled
from serving_engines import (
    ENGINES,
    FIRST_SHARE,
    MIB,
    Bounds,
    Requests,
    Served,
    agreement,
    answer,
    digits,
    in_turn,
    resident,
    spread,
    used_on_device,
    warm_up,
)

from onnxfuse.ir.dtypes import Array
from onnxfuse.tuning.bound_session import BoundSession, Provider, Value

SAMPLES = 50  # of the memory
PAST, PRESENT = "past_key_values", "present"  # begin the names of the cache among the inputs and outputs
FIRST_PASSES = 3  # of the growing cache, in which every step has a new shape, each in new sessions
LATER_PASSES = 2  # after the last of them, in its sessions
NEIGHBOURS = 4  # steps on either side that a step is compared with
LIMIT = 1.2  # of a step's time to its neighbours'


# --- memory ----------------------------------------------------------------------------------------------------------


def memory(served: Served, engine: str, count: int, bounds: Bounds) -> dict[str, Any]:
    """Visit shapes once in one engine, and sample the memory of this process and of the GPU, which it has to itself."""
    requests, shapes = Requests(served.original, tuple(served.ranges)), served.drawn(count)
    before = _sample(served)
    session = served.start(engine)
    loaded = _sample(served)
    warm_up(session, requests.feeds(served.largest()), served.provider)
    samples, visited = [{"shapes": 0, **_sample(served)}], 0
    every = max(1, count // SAMPLES)
    for turn, sizes in bounds.within(shapes):
        answer(session, requests.feeds(sizes), served.provider)
        visited = turn + 1
        if visited % every == 0:
            samples.append({"shapes": visited, **_sample(served)})
    if visited % every:
        samples.append({"shapes": visited, **_sample(served)})
    return {"engine": engine, "asked": count, "shapes": visited, "stopped": bounds.reached() * (visited < count),
            "session": _difference(loaded, before), "requests": _difference(samples[-1], loaded),
            "second_half": _difference(samples[-1], samples[len(samples) // 2]), "samples": samples}  # fmt: skip


def _sample(served: Served) -> dict[str, float]:
    """Return the MiB that are in use."""
    device = used_on_device(served.provider)
    found = {"host_mib": resident() / MIB} | ({} if device is None else {"gpu_mib": device / MIB})
    return {name: round(value, 2) for name, value in found.items()}


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before[name], 2) for name in ("host_mib", "gpu_mib") if name in after}


def beyond_onnxruntime(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return by how much onnxfuse's session and requests take more memory than onnxruntime's, as a share of these."""
    totals = [
        {kind: results[engine]["session"][f"{kind}_mib"] + results[engine]["requests"][f"{kind}_mib"]
         for kind in ("host", "gpu") if f"{kind}_mib" in results[engine].get("session", ())}
        for engine in ENGINES
    ]  # fmt: skip
    plain, fused = totals
    return {kind: digits(fused[kind] / plain[kind] - 1) for kind in plain if kind in fused and plain[kind] > 0}


# --- a growing cache -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """How long a step took, and what may have interrupted it."""

    milliseconds: float
    gpu_mib: float  # by which the GPU's memory in use grew
    switches: int  # of the processor to another thread, which this one did not ask for
    collections: int  # of all of Python's objects


class Decoder:
    """A session that decodes one token at a step, with the keys and values that its last step left on the device."""

    def __init__(self, session: ort.InferenceSession, provider: Provider, cache: Mapping[str, Value]) -> None:
        self._session, self._provider, self._cache = session, provider, dict(cache)
        self.last: BoundSession | None = None

    def step(self, feeds: Mapping[str, Array]) -> Step:
        """Decode a token."""
        before = self._interruptions()
        start = time.perf_counter()
        self.last = answer(self._session, {**feeds, **self._cache}, self._provider)
        milliseconds = 1e3 * (time.perf_counter() - start)
        grown, switches, collections = (b - a for a, b in zip(before, self._interruptions(), strict=True))
        values = self.last.values()
        self._cache = {name: values[name.replace(PAST, PRESENT)] for name in self._cache}
        return Step(milliseconds, round(grown / MIB, 2), switches, collections)

    def _interruptions(self) -> tuple[int, int, int]:
        """Return the bytes in use on the GPU, the thread's involuntary switches, and the collections of all objects."""
        switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        return used_on_device(self._provider) or 0, switches, gc.get_stats()[2]["collections"]


def growing_cache(served: Served, tokens: int, bounds: Bounds) -> dict[str, Any]:
    """Decode from a cache of one token to one of so many, in both engines in turns, a few times over.

    In the first passes, each in new sessions, every step has a shape that the session has not met: `first` are the
    times of one of them, and `first_of_all` the shortest of each step, because a host interrupts other steps in each
    pass.  `later` are the shortest times of the passes that follow in the last sessions.

    Raises TimeoutError if the bounds allow no two steps.
    """
    requests, wanted = Requests(served.original, ()), tokens - 1
    passes: list[dict[str, list[Step]]] = []
    outputs: list[dict[str, Array]] = []
    for _ in range(FIRST_PASSES):
        sessions = {engine: served.start(engine) for engine in ENGINES}
        steps, outputs = _decode(served, requests, sessions, wanted, bounds, FIRST_SHARE)
        passes.append(steps)
        if len(steps[ENGINES[0]]) < wanted:
            break
    count = min(len(each[ENGINES[0]]) for each in passes)
    if count < 2:
        raise TimeoutError(f"fewer than two steps: {bounds.reached(FIRST_SHARE)}")
    found: dict[str, Any] = {
        engine: {"first": _steps(passes[0][engine][:count]), "first_of_all": _steps(_fastest(passes, engine, count))}
        for engine in ENGINES
    }
    found |= {"asked": wanted, "steps": count, "passes": len(passes)}
    found |= {"stopped": bounds.reached(FIRST_SHARE) * (count < wanted or len(passes) < FIRST_PASSES)}
    found |= agreement(relative_error(sampled(outputs[0]), outputs[1]))
    later = [_decode(served, requests, sessions, count, bounds, 1.0)[0] for _ in range(LATER_PASSES)]
    complete = [each for each in later if len(each[ENGINES[-1]]) == count]
    for engine in ENGINES if complete else ():
        found[engine]["later"] = _steps(_fastest(complete, engine, count))
    return found


def _fastest(passes: Sequence[Mapping[str, Sequence[Step]]], engine: str, count: int) -> list[Step]:
    """Return the fastest of each of the first steps."""
    rows = zip(*(each[engine][:count] for each in passes), strict=True)
    return [min(row, key=lambda step: step.milliseconds) for row in rows]


def _decode(
    served: Served, requests: Requests, sessions: Mapping[str, ort.InferenceSession], steps: int, bounds: Bounds,
    share: float,
) -> tuple[dict[str, list[Step]], list[dict[str, Array]]]:  # fmt: skip
    """Decode in turns from a cache of one token; return the steps, and the last outputs."""
    growing, cache = _cache_of(requests)
    sizes = dict.fromkeys(requests.usual, 1)
    start = {name: value for name, value in requests.feeds(sizes).items() if name in cache}
    decoders = {engine: Decoder(sessions[engine], served.provider, start) for engine in ENGINES}
    made: dict[str, list[Step]] = {engine: [] for engine in ENGINES}
    for turn, past in bounds.within(range(1, steps + 1), share):
        drawn = requests.feeds({**sizes, growing: past}, without=cache)
        feeds = {name: np.ones_like(value) if "mask" in name else value for name, value in drawn.items()}
        for engine in in_turn(turn):
            made[engine].append(decoders[engine].step(feeds))
    last = [decoders[engine].last for engine in ENGINES]
    return made, [each.outputs() for each in last if each]


def _cache_of(requests: Requests) -> tuple[str, tuple[str, ...]]:
    """Return the dim that grows, and the inputs that are the cache.  Raises SystemExit for a model without them."""
    cache = [each for each in requests.inputs if each.name.startswith(PAST)]
    growing = cache[0].dims[2] if cache and len(cache[0].dims) > 2 else None
    if not isinstance(growing, str):
        raise SystemExit(f"the decoder has no inputs '{PAST}...' with a dynamic third dim, which a cache would have")
    return growing, tuple(each.name for each in cache)


def _steps(steps: Sequence[Step]) -> dict[str, Any]:
    """Summarize steps, how far each is above the median of its neighbours, and those that are beyond a limit."""
    times = [each.milliseconds for each in steps]
    around = [[*times[max(0, i - NEIGHBOURS) : i], *times[i + 1 : i + 1 + NEIGHBOURS]] for i in range(len(times))]
    ratios = [time / float(np.median(near)) for time, near in zip(times, around, strict=True)]
    over = [
        {"past": 1 + i, "ms": digits(each.milliseconds), "to_neighbours": digits(ratios[i]), "gpu_mib": each.gpu_mib,
         "switches": each.switches, "collections": each.collections}
        for i, each in enumerate(steps) if ratios[i] > LIMIT
    ]  # fmt: skip
    return {"step_ms": spread(times), "to_neighbours": spread(ratios), "worst_at_past": 1 + int(np.argmax(ratios)),
            "over_limit": len(over), "over": over}  # fmt: skip
