"""What grows in a server: the memory of a process over many shapes, and a cache of keys and values, step by step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
LATER_PASSES = 2  # of the growing cache, after the one in which every step has a new shape
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


class Decoder:
    """A session that decodes one token at a step, with the keys and values that its last step left on the device."""

    def __init__(self, session: ort.InferenceSession, provider: Provider, cache: Mapping[str, Value]) -> None:
        self._session, self._provider, self._cache = session, provider, dict(cache)
        self.last: BoundSession | None = None

    def step(self, feeds: Mapping[str, Array]) -> float:
        """Decode a token; return the milliseconds."""
        start = time.perf_counter()
        self.last = answer(self._session, {**feeds, **self._cache}, self._provider)
        milliseconds = 1e3 * (time.perf_counter() - start)
        values = self.last.values()
        self._cache = {name: values[name.replace(PAST, PRESENT)] for name in self._cache}
        return milliseconds


def growing_cache(served: Served, tokens: int, bounds: Bounds) -> dict[str, Any]:
    """Decode from a cache of one token to one of so many, in both engines in turns, a few times over.

    In the first pass every step has a shape that the session has not met.  Of the later passes, the shortest time of
    each step counts.  Raises TimeoutError if the bounds allow no two steps.
    """
    requests = Requests(served.original, ())
    sessions = {engine: served.start(engine) for engine in ENGINES}
    first, outputs = _decode(served, requests, sessions, tokens - 1, bounds, FIRST_SHARE)
    steps = len(first[ENGINES[0]])
    if steps < 2:
        raise TimeoutError(f"fewer than two steps: {bounds.reached(FIRST_SHARE)}")
    found: dict[str, Any] = {engine: {"first": _steps(first[engine])} for engine in ENGINES}
    found |= {"asked": tokens - 1, "steps": steps, "stopped": bounds.reached(FIRST_SHARE) * (steps < tokens - 1)}
    found |= agreement(relative_error(sampled(outputs[0]), outputs[1]))
    later = [_decode(served, requests, sessions, steps, bounds, 1.0)[0] for _ in range(LATER_PASSES)]
    for engine in ENGINES:
        complete = [each[engine] for each in later if len(each[engine]) == steps]
        if complete:
            found[engine]["later"] = _steps([min(times) for times in zip(*complete, strict=True)])
    return found


def _decode(
    served: Served, requests: Requests, sessions: Mapping[str, ort.InferenceSession], steps: int, bounds: Bounds,
    share: float,
) -> tuple[dict[str, list[float]], list[dict[str, Array]]]:  # fmt: skip
    """Decode in turns from a cache of one token; return the milliseconds of each step, and the last outputs."""
    growing, cache = _cache_of(requests)
    sizes = dict.fromkeys(requests.usual, 1)
    start = {name: value for name, value in requests.feeds(sizes).items() if name in cache}
    decoders = {engine: Decoder(sessions[engine], served.provider, start) for engine in ENGINES}
    times: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for turn, past in bounds.within(range(1, steps + 1), share):
        drawn = requests.feeds({**sizes, growing: past}, without=cache)
        feeds = {name: np.ones_like(value) if "mask" in name else value for name, value in drawn.items()}
        for engine in in_turn(turn):
            times[engine].append(decoders[engine].step(feeds))
    last = [decoders[engine].last for engine in ENGINES]
    return times, [each.outputs() for each in last if each]


def _cache_of(requests: Requests) -> tuple[str, tuple[str, ...]]:
    """Return the dim that grows, and the inputs that are the cache.  Raises SystemExit for a model without them."""
    cache = [each for each in requests.inputs if each.name.startswith(PAST)]
    growing = cache[0].dims[2] if cache and len(cache[0].dims) > 2 else None
    if not isinstance(growing, str):
        raise SystemExit(f"the decoder has no inputs '{PAST}...' with a dynamic third dim, which a cache would have")
    return growing, tuple(each.name for each in cache)


def _steps(times: Sequence[float]) -> dict[str, Any]:
    """Summarize the milliseconds of steps, and how far each is above the median of its neighbours."""
    around = [[*times[max(0, i - NEIGHBOURS) : i], *times[i + 1 : i + 1 + NEIGHBOURS]] for i in range(len(times))]
    ratios = [time / float(np.median(near)) for time, near in zip(times, around, strict=True)]
    over = [1 + i for i, ratio in enumerate(ratios) if ratio > LIMIT]
    return {"step_ms": spread(times), "to_neighbours": spread(ratios), "worst_at_past": 1 + int(np.argmax(ratios)),
            "over_limit": len(over), "over_at_past": over}  # fmt: skip
