"""Choose the plan that a node runs: among candidates with equal results, the fastest on this GPU.

A plan says which kernels compute a node at given shapes, and how they are launched.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar, cast

from onnxfuse.runtime.environment import Environment, kernel_environment
from onnxfuse.runtime.hosts import lengths_of
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.provider_names import CUDA
from onnxfuse.runtime.template_key import Situation, signature
from onnxfuse.tuning import cache
from onnxfuse.tuning.cache import Data
from onnxfuse.tuning.runs_in_flight import Alone, at_once
from onnxfuse.tuning.trial import GpuTrial

log: Final = logging.getLogger("onnxfuse")
Outputs = TypeVar("Outputs")


class Trial(Protocol[Outputs]):
    """Runs plans of one node on its own memory.  Its methods pass on all exceptions of the GPU's libraries."""

    def refusal(self) -> str | None:
        """Return why nothing can be measured here; None if it can."""

    def outputs(self, plan: Plan) -> Outputs:
        """Return the outputs of a plan for random inputs, which are the same for all plans."""

    def difference(self, expected: Outputs, outputs: Outputs) -> str | None:
        """Return how outputs differ by more than rounding; None if they do not."""

    def seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the seconds of one run of each plan; the plans are timed in turns."""

    def close(self) -> None:
        """Give the scratch memory back to the GPU."""


# Makes a trial from inputs, plans and a GPU.  The last argument is a function through which the trial calls each piece
# of its work on the GPU.
MakeTrial = Callable[[Sequence[TensorSpec], Sequence[Plan], Device, Alone], Trial[Any]]


def gpu_trial(inputs: Sequence[TensorSpec], plans: Sequence[Plan], device: Device, alone: Alone = at_once) -> GpuTrial:
    """Return a trial of these plans on a GPU of the CUDA provider."""
    return GpuTrial(inputs, plans, device, lambda plan: ready_plan(plan, inputs, device.ordinal), alone)


trials: Final[dict[str, MakeTrial]] = {CUDA: gpu_trial}  # by provider; plans of other providers are not timed


class MeasuredVerdicts:
    """Chooses the fastest plan of a node for the planner, by measurements on this machine."""

    def __init__(self, alone: Alone = at_once) -> None:
        """Store `alone`, through which measurements will call each piece of their work on the GPU."""
        self._alone = alone

    def inputs_measured(self, situation: Situation, inputs: Sequence[TensorSpec]) -> list[tuple[TensorSpec, ...]]:
        """Return the inputs (dtypes and shapes) of all earlier measurements of equal nodes."""
        if cache.is_empty():
            return []
        found = cache.lookup(kernel_environment(situation.provider, situation.device), _subject(situation))
        return [inputs_of_case(each.case) for each in found]

    def choose(
        self, plans: Sequence[Plan], situation: Situation, inputs: Sequence[TensorSpec], measure: bool
    ) -> int | None:
        """Return the index of the fastest of a node's plans by earlier measurements, or by measuring now if `measure`.

        Raises MeasuringStopped if `alone`, the function given to __init__, does.
        """
        device, of_trial = situation.device, inputs_of_trial(situation.node, inputs, plans[0].outputs)
        make = trials.get(situation.provider) if measure else None
        trial = (lambda plans: make(of_trial, plans, device, self._alone)) if make else None
        environment = kernel_environment(situation.provider, device)
        return fastest_plan(plans, inputs, trial, environment, _subject(situation))


def _subject(situation: Situation) -> Data:
    return {"candidates of": signature(situation.node, (), situation.device)}


def _case(inputs: Sequence[TensorSpec], digests: Sequence[str]) -> Data:
    return {
        "inputs": [[spec.dtype, list(spec.shape), spec.aligned, spec.constant] for spec in inputs],
        "candidates": sorted(digests),
    }


def inputs_of_case(case: Data) -> tuple[TensorSpec, ...]:
    """Return the inputs (dtypes and shapes) that a measurement's case describes."""
    rows = cast(list[tuple[str, list[int], bool, bool]], case["inputs"])
    return tuple(TensorSpec(tuple(shape), dtype, aligned, constant) for dtype, shape, aligned, constant in rows)


def inputs_of_trial(node: FusedNode, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Return the inputs with past key-value caches marked as constants, and with lengths that fill these caches.

    In a trial, each run reads constants that are not in the L2 cache.  In a model, the key-value cache of a layer is
    not in the L2 cache either.  With lengths of 0, plans would be timed without a past, or without steps.
    """
    lengths = lengths_of(node, outputs)
    return [
        replace(spec, constant=spec.constant or name.startswith("past_"), drawn=lengths.get(name, 0))
        for name, spec in zip(node.operands, inputs, strict=True)
    ]


def fastest_plan(
    plans: Sequence[Plan],
    inputs: Sequence[TensorSpec],
    make_trial: Callable[[Sequence[Plan]], Trial[Any]] | None,
    environment: Environment,
    subject: Data,
) -> int | None:
    """Return the index of the fastest plan, by an earlier measurement, or else by measuring now.

    Returns None if there is no earlier measurement and nothing can be measured, for example because
    `make_trial` is None.  `subject` describes the node; equal nodes have equal subjects.
    """
    indices = {plan_digest(plan): i for i, plan in reversed(list(enumerate(plans)))}
    named = {digest: plans[i] for digest, i in sorted(indices.items(), key=lambda item: item[1])}
    case = _case(inputs, list(named))
    known = cache.lookup_case(environment, subject, case)
    if known and known.chosen in named:
        return indices[known.chosen]
    if make_trial is None or len(named) < 2:
        return None
    seconds = _measure(list(named.values()), make_trial)
    if not seconds:
        return None
    chosen = min(seconds, key=lambda name: seconds[name])
    cache.store(environment, subject, case, chosen, seconds)
    times = ", ".join(f"{1e6 * value:.2f}" for value in seconds.values())
    where = ", ".join("x".join(map(str, spec.shape)) for spec in inputs)
    log.info("candidate %d of %d is the fastest (us: %s) at %s", list(named).index(chosen), len(named), times, where)
    return indices[chosen]


def plan_digest(plan: Plan) -> str:
    """Return a short text that is equal for equal plans."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()[:16]


def _measure(plans: Sequence[Plan], make_trial: Callable[[Sequence[Plan]], Trial[Any]]) -> dict[str, float]:
    """Return the seconds, by digest, of the plans that run and have equal outputs; empty if no plan can be timed."""
    trial: Trial[Any] | None = None
    log.info("%d candidates are compiled and timed, once on GPUs of this kind", len(plans))
    try:
        trial = make_trial(plans)
        if why := trial.refusal():
            log.info("candidates are not timed, the first is taken: %s", why)
            return {}
        right = _plans_of_the_majority(plans, trial)
        return dict(zip(map(plan_digest, right), trial.seconds(right), strict=True))
    except Exception as error:  # any error of CuPy or the driver: nothing is timed, and the first plan is used
        log.warning("candidates cannot be timed, the first is taken: %s: %s", type(error).__name__, error)
        return {}
    finally:
        if trial:
            trial.close()


def _plans_of_the_majority(plans: Sequence[Plan], trial: Trial[Outputs]) -> list[Plan]:
    """Return the largest group of plans that run and have equal outputs; at a tie, the group that comes first.

    Raises the first plan's error if none runs.
    """
    groups: list[tuple[Outputs, list[int]]] = []  # outputs, and the indices of the plans that compute them
    failed: dict[int, Exception] = {}
    for i, plan in enumerate(plans):
        try:
            found = trial.outputs(plan)
        except Exception as error:  # a plan that does not run is left out
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
