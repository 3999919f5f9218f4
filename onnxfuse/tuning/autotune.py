"""Choose which of a node's candidate plans runs: the fastest on this GPU of those that compute the same."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from onnxfuse.runtime.environment import Environment, kernel_environment
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.planner import CUDA, ready_plan, signature
from onnxfuse.tuning import cache
from onnxfuse.tuning.trial import GpuTrial

log: Final = logging.getLogger("onnxfuse")
MAX_SHAPES_MEASURED: Final = 16  # of one node in a process: a growing cache has a new shape at every step
MAX_SECONDS_MEASURING: Final = 60.0  # of one node in a process, to compile and time its candidates
Outputs = TypeVar("Outputs")


class Trial(Protocol[Outputs]):
    """Runs plans of one node on scratch memory.  Its methods raise whatever the GPU's libraries raise."""

    def refusal(self) -> str | None:
        """Return why nothing can be measured here; None if it can."""

    def outputs(self, plan: Plan) -> Outputs:
        """Return what a plan computes from random inputs, which are the same for all plans."""

    def difference(self, expected: Outputs, outputs: Outputs) -> str | None:
        """Return how outputs differ by more than rounding; None if they do not."""

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the seconds of one run of each plan; the plans are timed in turns."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass
class _Spent:
    """What the measurements of a node have taken so far in this process."""

    shapes: int = 0
    seconds: float = 0.0
    logged: bool = False  # that no more shapes are measured


_spent: Final[defaultdict[str, _Spent]] = defaultdict(_Spent)
MakeTrial = Callable[[Sequence[TensorSpec], Sequence[Plan], Device], Trial[Any]]


def gpu_trial(inputs: Sequence[TensorSpec], plans: Sequence[Plan], device: Device) -> GpuTrial:
    """Return a trial of these plans on a GPU of the CUDA provider."""
    return GpuTrial(inputs, plans, device, lambda plan: ready_plan(plan, inputs, device.ordinal))


trials: Final[dict[str, MakeTrial]] = {CUDA: gpu_trial}  # by provider; candidates for others are not timed


def choose_plan(
    plans: Sequence[Plan], node: FusedNode, inputs: Sequence[TensorSpec], device: Device, provider: str
) -> Plan:
    """Return the fastest of a node's plans, measured now unless it was before: the planner's `ChoosePlan`."""
    texts = signature(node, (), device), signature(node, tuple(inputs), device)
    environment = kernel_environment(provider, device)
    return fastest_plan(plans, inputs_of_trial(node, inputs), device, trials.get(provider), environment, *texts)


def inputs_of_trial(node: FusedNode, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the inputs with past caches marked as constants.

    A trial gives constants memory that is not in the L2 cache; a layer finds its own cache in memory likewise.
    """
    pairs = zip(node.operands, inputs, strict=True)
    return [replace(spec, constant=spec.constant or name.startswith("past_")) for name, spec in pairs]


def fastest_plan(
    plans: Sequence[Plan],
    inputs: Sequence[TensorSpec],
    device: Device,
    make_trial: MakeTrial | None,
    environment: Environment,
    node: str,
    node_and_shapes: str,
) -> Plan:
    """Return the plan that an earlier measurement found to be fastest, else measure now.

    The first plan is returned if nothing can be measured. `node` and `node_and_shapes` are texts that are equal for
    equal nodes.
    """
    if len(plans) == 1 or make_trial is None:
        return plans[0]
    named = {plan_digest(plan): plan for plan in plans}
    subject, case = {"candidates of": node_and_shapes}, {"candidates": sorted(named)}
    known = cache.lookup_case(environment, subject, case)
    if known and known.chosen in named:
        return named[known.chosen]
    measure = partial(_measure, list(named.values()), inputs, device, make_trial)
    seconds = _within_limits(_spent[node], measure)
    if not seconds:
        return plans[0]
    chosen = min(seconds, key=lambda name: seconds[name])
    cache.store(environment, subject, case, chosen, seconds)
    index, times = list(named).index(chosen), ", ".join(f"{1e6 * value:.2f}" for value in seconds.values())
    log.info("candidate %d of %d is the fastest (us: %s) for %s", index, len(named), times, node_and_shapes)
    return named[chosen]


def _within_limits(spent: _Spent, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return what `measure` returns; an empty dict if the node has had its share of this process."""
    if spent.shapes < MAX_SHAPES_MEASURED and spent.seconds < MAX_SECONDS_MEASURING:
        began = time.monotonic()
        seconds = measure()
        spent.shapes, spent.seconds = spent.shapes + 1, spent.seconds + time.monotonic() - began
        return seconds
    if not spent.logged:  # a new shape may come at every step
        spent.logged, said = True, "a node was measured at %d shapes in %.0f s; at others its first candidate is taken"
        log.info(said, spent.shapes, spent.seconds)
    return {}


def plan_digest(plan: Plan) -> str:
    """Return a short text that is equal for equal plans."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]


def _measure(
    plans: Sequence[Plan], inputs: Sequence[TensorSpec], device: Device, make_trial: MakeTrial
) -> dict[str, float]:
    """Return the seconds, by digest, of the plans that run and compute the same; empty if nothing can be measured."""
    trial: Trial[Any] | None = None
    log.info("%d candidates are compiled and timed, once on GPUs of this kind", len(plans))
    try:
        trial = make_trial(inputs, plans, device)
        if why := trial.refusal():
            log.info("candidates are not timed, the first is taken: %s", why)
            return {}
        right = _plans_of_the_majority(plans, trial)
        return dict(zip(map(plan_digest, right), trial.seconds(right), strict=True))
    except Exception as error:  # of CuPy or the driver, which have no common class; the first plan may still run
        log.warning("candidates cannot be timed, the first is taken: %s: %s", type(error).__name__, error)
        return {}
    finally:
        if trial:
            trial.close()


def _plans_of_the_majority(plans: Sequence[Plan], trial: Trial[Outputs]) -> list[Plan]:
    """Return the plans that run and compute what most of them do; at a tie, what the first does.

    Raises what the first plan raises if none runs.
    """
    groups: list[tuple[Outputs, list[int]]] = []  # outputs, and the indices of the plans that compute them
    failed: dict[int, Exception] = {}
    for i, plan in enumerate(plans):
        try:
            found = trial.outputs(plan)
        except Exception as error:  # a candidate that does not run is left out
            failed[i] = error
            continue
        same = next((indices for expected, indices in groups if trial.difference(expected, found) is None), None)
        if same is None:
            groups.append((found, [i]))
        else:
            same.append(i)
    if not groups:
        raise failed[0]
    expected, majority = max(groups, key=lambda group: len(group[1]))
    reasons = {i: f"it does not run: {type(error).__name__}: {error}" for i, error in failed.items()}
    others = [(found, indices) for found, indices in groups if indices is not majority]
    reasons |= {i: trial.difference(expected, found) or "" for found, indices in others for i in indices}
    for i, why in sorted(reasons.items()):
        log.warning("candidate %d of %d is left out: %s", i, len(plans), why)
    return [plans[i] for i in majority]
