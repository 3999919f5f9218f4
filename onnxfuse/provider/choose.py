"""Which of several plans runs a node: the fastest on this GPU of those that compute the same."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Final, Protocol

from onnxfuse.provider import verdicts
from onnxfuse.provider.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.provider.verdicts import Environment

log: Final = logging.getLogger("onnxfuse")
MOST_SHAPES: Final = 16  # of one node that are measured in a process: a growing cache has a new one at every step
MOST_SECONDS: Final = 60.0  # in a process; once a node's candidates took so long to compile and time, no more are


class Trial(Protocol):
    """Runs plans of one node on scratch memory.  Its methods raise whatever the GPU's libraries raise."""

    def refuse(self) -> str | None:
        """Why nothing can be measured here; None where it can."""

    def outputs(self, plan: Plan) -> Any:
        """What a plan computes from random inputs, the same for all plans."""

    def differ(self, expected: Any, outputs: Any) -> str | None:
        """How outputs differ beyond rounding; None where they do not."""

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Of one run of each, timed in turns."""

    def close(self) -> None:
        """Give its memory back."""


@dataclass
class _Spent:
    """What the measurement of a node has taken so far in this process."""

    shapes: int = 0
    seconds: float = 0.0
    told: bool = False  # that there is no more of it


_spent: Final[defaultdict[str, _Spent]] = defaultdict(_Spent)
MakeTrial = Callable[[Sequence[TensorSpec], Sequence[Plan], Device], Trial]


def candidates(module: ModuleType, node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """The plans that a kernel's host offers, the one to take where nothing was measured first."""
    offer = getattr(module, "candidates", None)
    return list(offer(node, inputs, device)) if offer else [module.plan(node, inputs, device)]


def choose(
    plans: Sequence[Plan],
    inputs: Sequence[TensorSpec],
    device: Device,
    make: MakeTrial | None,
    environment: Environment,
    node: str,
    signature: str,
) -> Plan:
    """The fastest plan, as an earlier measurement says, else one made now; the first plan where none can be made.

    `node` stands for the node, `signature` for the node and its shapes.
    """
    if len(plans) == 1 or make is None:
        return plans[0]
    named = {name_of(plan): plan for plan in plans}
    subject, case = {"candidates of": signature}, sorted(named)
    known = verdicts.recall_case(environment, subject, case)
    if known and known.chosen in named:
        return named[known.chosen]
    seconds = _within_limits(_spent[node], partial(_measured, list(named.values()), inputs, device, make))
    if not seconds:
        return plans[0]
    chosen = min(seconds, key=lambda name: seconds[name])
    verdicts.keep(environment, subject, case, chosen, seconds)
    place, times = list(named).index(chosen), ", ".join(f"{1e6 * value:.2f}" for value in seconds.values())
    log.info("candidate %d of %d is the fastest (us: %s) for %s", place, len(named), times, signature)
    return named[chosen]


def _within_limits(spent: _Spent, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What `measure` finds; nothing where the node has had its share of this process."""
    if spent.shapes < MOST_SHAPES and spent.seconds < MOST_SECONDS:
        began = time.monotonic()
        seconds = measure()
        spent.shapes, spent.seconds = spent.shapes + 1, spent.seconds + time.monotonic() - began
        return seconds
    if not spent.told:  # once, as a new shape may come at every step
        spent.told, said = True, "a node was measured at %d shapes in %.0f s; at others its first candidate is taken"
        log.info(said, spent.shapes, spent.seconds)
    return {}


def name_of(plan: Plan) -> str:
    """A short text that is equal for equal plans."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]


def _measured(plans: Sequence[Plan], inputs: Sequence[TensorSpec], device: Device, make: MakeTrial) -> dict[str, float]:
    """Seconds by name of the plans that run and agree with the first one that runs; none where nothing is measured."""
    trial: Trial | None = None
    log.info("%d candidates are compiled and timed, once on GPUs of this kind", len(plans))
    try:
        trial = make(inputs, plans, device)
        if why := trial.refuse():
            log.info("candidates are not timed, the first is taken: %s", why)
            return {}
        good = _agreeing(plans, trial)
        return dict(zip(map(name_of, good), trial.seconds(good), strict=True))
    except Exception as error:  # of CuPy or the driver, which have no common class; the first plan may still run
        log.warning("candidates cannot be timed, the first is taken: %s: %s", type(error).__name__, error)
        return {}
    finally:
        if trial:
            trial.close()


def _agreeing(plans: Sequence[Plan], trial: Trial) -> list[Plan]:
    """The plans that run and compute what most of them do, in doubt what the first does.  Raises what all raise."""
    groups: list[tuple[Any, list[int]]] = []  # outputs, and the places of the plans that compute them
    failed: dict[int, Exception] = {}
    for place, plan in enumerate(plans):
        try:
            found = trial.outputs(plan)
        except Exception as error:  # a candidate that does not run is no candidate
            failed[place] = error
            continue
        same = next((places for expected, places in groups if trial.differ(expected, found) is None), None)
        if same is None:
            groups.append((found, [place]))
        else:
            same.append(place)
    if not groups:
        raise failed[0]
    right, good = max(groups, key=lambda group: len(group[1]))
    told = {place: f"it does not run: {type(error).__name__}: {error}" for place, error in failed.items()}
    others = [(found, places) for found, places in groups if places is not good]
    told |= {place: trial.differ(right, found) or "" for found, places in others for place in places}
    for place, why in sorted(told.items()):
        log.warning("candidate %d of %d is left out: %s", place, len(plans), why)
    return [plans[place] for place in good]
