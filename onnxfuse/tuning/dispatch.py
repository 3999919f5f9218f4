"""Choose between kernel and body for the fused nodes of a session, by earlier measurements.

A node's body is the ONNX function that it calls, which onnxruntime runs with its own operators.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import onnx

from onnxfuse.errors import UsageError
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.runtime.environment import Environment
from onnxfuse.runtime.fused_calls import Call
from onnxfuse.runtime.kernel_failures import Place, failure_of
from onnxfuse.runtime.plan import Aim
from onnxfuse.runtime.planner import planner
from onnxfuse.tuning import cache
from onnxfuse.tuning.cache import Data, Measurement

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxfuse.runtime.target import PlanChoice

log: Final = logging.getLogger("onnxfuse")
# "never" ignores measurements, "cached" uses them, "now" makes missing ones before the session runs, and "background"
# makes them between its runs.
TunePolicy = Literal["never", "cached", "now", "background"]
Mode = Literal["plain", "cuda graph"]  # how a session runs: normally, or by a captured CUDA graph
PLAIN: Final = "plain"
CUDA_GRAPH: Final = "cuda graph"
# Two variants of a whole model: all fused nodes run as kernels, or all as bodies (ONNX functions).  A third variant
# (see `mix_name`) runs each node in the way that is faster for this node alone.
ALL_KERNELS: Final = "kernels"
ALL_BODIES: Final = "bodies"


@dataclass(frozen=True)
class NodeDispatch:
    """How one fused node of a session runs, and why."""

    node: str
    fusion: str
    how: Literal["kernel", "body"]
    why: str


_Recorded = tuple[tuple[NodeDispatch, Place | None], ...]
_dispatches: Final[weakref.WeakKeyDictionary[object, _Recorded]] = weakref.WeakKeyDictionary()


def record_dispatches(
    session: ort.InferenceSession | ort.SessionOptions,
    dispatches: Sequence[NodeDispatch],
    places: Sequence[Place | None],
) -> None:
    """Record what `explain_session` returns for a session, or for the sessions that are made with these options.

    places  for each node, the key under which `kernel_failures` records later failures; None if no kernel runs
    """
    _dispatches[session] = tuple(zip(dispatches, places, strict=True))


def explain_session(session: ort.InferenceSession) -> tuple[NodeDispatch, ...]:
    """Return how each fused node of a session runs, and why.

    Raises UsageError for a session that was made neither by `InferenceSession` nor by onnxruntime with options from
    `register`.
    """
    for key in (session, session.get_session_options(), getattr(session, "_sess_options_initial", None)):
        if key is not None and key in _dispatches:
            return tuple(_at_present(each, place) for each, place in _dispatches[key])
    raise UsageError("this session was made without onnxfuse; use onnxfuse.InferenceSession or onnxfuse.register")


def _at_present(dispatch: NodeDispatch, place: Place | None) -> NodeDispatch:
    """Return how a node runs, with the failure of its kernels, or that some of them are not compiled yet.

    `place` is the key under which failures are recorded; None if no kernel runs.
    """
    if place is None:
        return dispatch
    more = failure_of(place) or (planner.compiles(place) and "some of its kernels are still being compiled")
    return replace(dispatch, why=f"{dispatch.why}; {more}") if more else dispatch


# --- preferences -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preference:
    """Whether a node runs faster as a kernel, and the measurement that shows it, as text."""

    kernel: bool
    why: str


Prefer = Callable[[onnx.ModelProto, Sequence[Call], Environment, Mode, bool], Sequence[Preference | None]]


@dataclass(frozen=True)
class FoundPlans:
    """The plan file of a session."""

    path: Path
    is_named: bool  # whether the argument `plans` names the file; otherwise it was found next to the model


@dataclass(frozen=True)
class SessionSettings:
    """How the fused nodes of a session run."""

    prefer: Prefer | None  # chooses kernel or body for each node; if None, every node with a kernel runs as a kernel
    choice: PlanChoice  # which of a kernel's candidate plans runs
    plan_file: FoundPlans | None = None  # used if it was made for this GPU, version and aim
    aim: Aim = "latency"  # the arguments `aim` and `wait` of InferenceSession
    wait: bool = True


def cached_preferences(
    model: onnx.ModelProto, calls: Sequence[Call], environment: Environment, mode: Mode, per_node: bool = True
) -> list[Preference | None]:
    """Return for each fused node whether measurements prefer its kernel to its body; None if it was not measured.

    If the whole model was timed, in this mode or else in the other one, its fastest variant decides: all kernels,
    all bodies, or the mix, in which each node runs in the way that is faster when the node is timed alone. Times at
    several shapes are summed.
    Without `per_node`, nodes that call one function must all run as kernels or all as bodies. A mix that was timed with
    other choices is then ignored.
    """
    alone = preferences_by_node(model, calls, environment, per_node)
    timed = measurements_of_model(environment, model, mode)
    if not timed:
        _warn_of_other_settings(environment, model)
        return alone
    sums = _sums(timed, {ALL_KERNELS, ALL_BODIES, mix_name(alone)})
    if not sums:
        return alone
    best = min(sums, key=lambda name: sums[name])
    if best not in (ALL_KERNELS, ALL_BODIES):
        return alone
    why = f"the whole model with {_listed(sums, 1e3, 'ms')}{_where_and_when(timed)}"
    return [Preference(best == ALL_KERNELS, why) for _ in calls]


def _warn_of_other_settings(environment: Environment, model: onnx.ModelProto) -> None:
    if other := cache.other_session_settings(environment, model_subject(model)):
        here = {name: environment[name] for name in other}
        log.warning("the model was tuned for %s, which says nothing of this session's %s; tune it again", other, here)


def all_kernels(
    model: onnx.ModelProto, calls: Sequence[Call], environment: Environment, mode: Mode, per_node: bool = True
) -> list[Preference | None]:
    """Return no preference for any node, so that every node with a kernel runs as a kernel."""
    return [None] * len(calls)


def preferences_by_node(
    model: onnx.ModelProto, calls: Sequence[Call], environment: Environment, per_node: bool = True
) -> list[Preference | None]:
    """Return for each fused node whether measurements of single nodes prefer its kernel; None if it was not measured.

    Without `per_node`, the times of all nodes that call one function are summed.
    """
    bodies = body_digests(model)
    subjects = [node_subject(call, bodies) for call in calls]
    keys = [repr(subject) for subject in subjects]
    timed = {key: cache.lookup(environment, subject) for key, subject in zip(keys, subjects, strict=True)}
    if per_node:
        known = {key: _preference(each) for key, each in timed.items()}
        return [known[key] for key in keys]
    of_ops = defaultdict[str, list[Measurement]](list)
    for call, key in zip(calls, keys, strict=True):
        of_ops[call.op] += timed[key]
    ops = {op: _preference(each) for op, each in of_ops.items()}
    return [ops[call.op] for call in calls]


def _preference(timed: Sequence[Measurement]) -> Preference | None:
    sums = _sums(timed, {"kernel", "body"})
    if set(sums) != {"kernel", "body"}:
        return None
    first = "kernel" if sums["kernel"] <= sums["body"] else "body"
    ordered = {name: sums[name] for name in sorted(sums, key=lambda name: name != first)}
    return Preference(first == "kernel", f"{_listed(ordered, 1e6, 'us')}{_where_and_when(timed)}")


def _sums(timed: Sequence[Measurement], names: set[str]) -> dict[str, float]:
    """Sum the seconds over all measurements, for each variant that was timed in all of them."""
    return {
        name: sum(each.seconds[name] for each in timed)
        for name in sorted(names)
        if timed and all(name in each.seconds for each in timed)
    }


def _listed(seconds: Mapping[str, float], scale: float, unit: str) -> str:
    return ", ".join(f"{name.partition(' ')[0]}: {scale * value:.3g} {unit}" for name, value in seconds.items())


def _where_and_when(timed: Sequence[Measurement]) -> str:
    shapes = [case_text(each.case) for each in timed]
    where = shapes[0] if len(shapes) == 1 else f"{len(shapes)} combinations of shapes, summed"
    return f" at {where}, measured {max(each.measured for each in timed)[:10]}"


def case_text(case: Data) -> str:
    """Return the shapes that the case of a measurement records, as text."""
    shapes = case.get("shapes", ()) if isinstance(case, dict) else ()
    return shapes_text(list(map(str, shapes)) if isinstance(shapes, Sequence) else [])


def shapes_text(shapes: Sequence[str]) -> str:
    """Join shapes such as "4096x768 float16"; if all have one dtype, it is named once."""
    pairs = [each.rpartition(" ") for each in shapes]
    dtypes = {dtype for *_, dtype in pairs}
    if len(dtypes) == 1 and all(dims for dims, *_ in pairs):
        return f"{', '.join(dims for dims, *_ in pairs)} {dtypes.pop()}"
    return ", ".join(shapes) or "no inputs"


# --- subjects of measurements ----------------------------------------------------------------------------------------


def node_subject(call: Call, bodies: Mapping[str, str]) -> Data:
    """Describe a fused node and its body without name and shapes: nodes that compute the same have equal subjects.

    `bodies` is the result of `body_digests`.
    """
    node = call.node
    return {
        "fusion": node.fusion,
        "operands": list(node.operands),
        "attributes": dict(node.attributes),
        "dtypes": list(call.dtypes),
        "outputs": list(node.output_dtypes),
        "body": bodies.get(call.op, ""),
    }


def body_digests(model: onnx.ModelProto) -> dict[str, str]:
    """Map the name of each function to a digest of its body; the digest does not depend on the name."""
    result = {}
    for function in model.functions:
        if function.domain == DOMAIN:
            copy = onnx.FunctionProto()
            copy.CopyFrom(function)
            copy.name = ""
            result[function.name] = _digest(copy.SerializeToString(deterministic=True))
    return result


def model_subject(model: onnx.ModelProto) -> Data:
    """Describe a model without the values of its weights."""
    parts = [part.SerializeToString(deterministic=True) for part in (*model.graph.node, *model.functions)]
    parts += [each.SerializeToString(deterministic=True) for each in (*model.graph.input, *model.graph.output)]
    parts += [repr((t.name, list(t.dims), t.data_type)).encode() for t in model.graph.initializer]
    return {"model": _digest(b"\0".join(parts))}


def measurements_of_model(environment: Environment, model: onnx.ModelProto, mode: Mode) -> list[Measurement]:
    """Return the measurements of a whole model in this mode, or those in the other mode if there are none.

    A measurement counts only if the model was timed both with all nodes as kernels and with all as ONNX functions.
    """
    found = cache.lookup(environment, model_subject(model))
    timed = [(each, each.case) for each in found if {ALL_KERNELS, ALL_BODIES} <= each.seconds.keys()]
    modes = [(each, case.get("mode")) for each, case in timed if isinstance(case, dict)]
    return [each for each, its_mode in modes if its_mode == mode] or [each for each, _ in modes]


def mix_name(alone: Sequence[Preference | None]) -> str:
    """Return a name for the mix in which each node runs in its preferred way; different mixes have different names."""
    kernels = [each is None or each.kernel for each in alone]
    return f"mix {_digest(repr(kernels).encode())[:12]}"


def is_mixed(alone: Sequence[Preference | None]) -> bool:
    """Return whether some nodes are faster as kernels and others as bodies, the ONNX functions that they call."""
    return len(Counter(each is None or each.kernel for each in alone)) > 1


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
