"""Time each distinct fused node and the whole model, as kernels and as bodies, for later sessions to use.

A node's body is the ONNX function that it calls, which onnxruntime runs with its own operators.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import onnx
import onnxruntime as ort

from onnxfuse.errors import OnnxfuseError, UsageError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.read import read
from onnxfuse.runtime.backends import BACKENDS, device_of
from onnxfuse.runtime.environment import Environment, allows_tf32, session_environment
from onnxfuse.runtime.external_data import configured_folder
from onnxfuse.runtime.fused_calls import Call, read_calls
from onnxfuse.runtime.start_provider import ProviderOptions
from onnxfuse.tuning import cache
from onnxfuse.tuning.bound_session import (
    PROVIDERS,
    BoundSession,
    OpenFused,
    Provider,
    TimedModel,
    check_available,
)
from onnxfuse.tuning.cache import Data
from onnxfuse.tuning.dispatch import (
    ALL_BODIES,
    ALL_KERNELS,
    CUDA_GRAPH,
    PLAIN,
    Mode,
    NodeDispatch,
    SessionSettings,
    all_kernels,
    body_digests,
    explain_session,
    is_mixed,
    mix_name,
    model_subject,
    node_subject,
    preferences_by_node,
)
from onnxfuse.tuning.op_times import OpTime, op_times
from onnxfuse.tuning.timing import interleaved, runs_within
from onnxfuse.verify.requested_shapes import describe_feeds, feeds_of_known_sizes

log: Final = logging.getLogger("onnxfuse")
# Messages of CUDA, of onnxruntime's allocator, and about its gpu_mem_limit.
OUT_OF_MEMORY: Final = re.compile("out of memory|failed to allocate|smaller than requested", re.IGNORECASE)
SECONDS_PER_VARIANT: Final = 2.0  # time spent on the runs of a variant of the whole model
# Provider options that are left out when models are timed.
NOT_FOR_TIMING: Final = ("enable_cuda_graph", "user_compute_stream", "has_user_compute_stream")
ORIGINAL: Final = "original"  # a variant that is timed, but never chosen
MEASURED: Final = SessionSettings(all_kernels, "measured")
Source = str | os.PathLike[str] | bytes | onnx.ModelProto


@dataclass(frozen=True)
class ModelTimes:
    """The times of the whole model in one mode: seconds of a run by variant, and the variant that sessions will use."""

    mode: Mode
    seconds: Mapping[str, float]
    chosen: str  # the fastest variant; "" if none is chosen
    reason: str = ""  # why none is chosen


@dataclass(frozen=True)
class Tuning:
    """The results of `tune`."""

    ops: tuple[OpTime, ...]
    models: tuple[ModelTimes, ...]  # one for each mode
    inputs: Mapping[str, str]
    kept: bool  # whether all measurements are on disk
    ops_error: str = ""  # why no node was timed alone


@dataclass(frozen=True)
class _Task:
    """A model to tune, its fused nodes, and the environment that their measurements depend on."""

    timed: TimedModel
    calls: Sequence[Call]
    environment: Environment

    @property
    def modes(self) -> tuple[Mode, ...]:
        return (PLAIN, CUDA_GRAPH) if self.timed.provider == "cuda" else (PLAIN,)


def tune(
    fused: TimedModel,
    *,
    original: onnx.ModelProto | None = None,
    others: Sequence[Callable[[], Mapping[str, Array]]] = (),
) -> Tuning:
    """Measure a fused model on its inputs and keep the measurements, which later sessions on this GPU use.

    fused     the model, which is also timed in CUDA graphs, whatever its provider options are
    original  the model before it was fused, which is timed too, but never chosen
    others    functions that make inputs of other sizes, at which the plans of the kernels are measured, too

    Raises UsageError if nothing can be tuned, OnnxfuseError if the model does not load with these options. If the model
    does not run with all nodes as kernels, nothing is kept for the whole model, because the reason can be temporary.
    The log says why a variant of the model does not run.
    """
    task = _task(fused)
    dispatches = _dispatch_to_kernels(task)
    _measure_plans(task, others)
    rows, error = _time_nodes(task, dispatches)
    bodies = body_digests(fused.model)
    kept = [_keep_node(task, row, bodies) for row in rows if row.faster]
    models = [_time_model(task, mode, original) for mode in task.modes]
    kept += [_keep_model(task, each) for each in models if each.chosen]
    return Tuning(tuple(rows), tuple(models), describe_feeds(fused.feeds), bool(kept) and all(kept), error)


def tune_session(
    source: Source,
    session_options: ort.SessionOptions | None,
    provider_name: str,
    options: ProviderOptions,
    shapes: Mapping[str, Sequence[int]],
    open_fused: OpenFused,
) -> None:
    """Tune the model of a session for tune="now", unless it was measured at these shapes before.

    Failures are only logged, because the session itself can work. Raises UsageError for missing or wrong shapes.
    """
    provider: Provider = "cuda" if provider_name == PROVIDERS["cuda"] else "cpu"
    if PROVIDERS[provider] != provider_name:
        return
    path = None if isinstance(source, bytes | onnx.ModelProto) else Path(source)
    model = source if isinstance(source, onnx.ModelProto) else read(source)
    texts = [f"{key}:{'x'.join(map(str, dims))}" for key, dims in shapes.items()]
    feeds = feeds_of_known_sizes(model, texts, {}, "shapes={'input': (8, 512)}")
    stated = configured_folder(session_options) if session_options is not None else None
    folder = stated or (path.parent if path else None)
    try:
        task = _task(TimedModel(model, folder, feeds, provider, open_fused, options))
        if not _is_known(task):
            for each in tune(task.timed).models:
                if each.reason:
                    log.info("nothing is chosen for the whole model (%s): %s", each.mode, each.reason)
    except Exception as error:  # onnxruntime's errors have no common class
        log.warning("the model was not tuned: %s", first_line(error))


def check_kernels_run(provider: Provider) -> None:
    """Raise UsageError if kernels cannot run on this provider and machine, so that nothing can be tuned."""
    check_available(provider)
    name = PROVIDERS[provider]
    if name not in BACKENDS:
        raise UsageError(f"kernels run on {', '.join(BACKENDS)}, not on {name}; there is nothing to tune")
    backend = BACKENDS[name]
    if why := backend.no_gpu() or backend.unavailable() or backend.cannot_time():
        raise UsageError(f"kernels cannot run here, so there is nothing to tune: {why}")


def _task(timed: TimedModel) -> _Task:
    """Collect the nodes to measure and their environment.  Raises UsageError if nothing can be tuned."""
    name = PROVIDERS[timed.provider]
    options = {key: value for key, value in timed.options.items() if key not in NOT_FOR_TIMING}
    check_kernels_run(timed.provider)
    calls = read_calls(timed.model)
    if not calls:
        raise UsageError("the model has no fused nodes; there is nothing to tune")
    try:
        device = device_of(name, timed.ordinal, allows_tf32(options))
    except Exception as error:  # CuPy's errors have no common class
        raise UsageError(f"there is no GPU {timed.ordinal}: {first_line(error)}; give another --device-id") from error
    return _Task(replace(timed, options=options), calls, session_environment(name, device, options))


# --- nodes -----------------------------------------------------------------------------------------------------------


def _dispatch_to_kernels(task: _Task) -> Sequence[NodeDispatch]:
    """Open a session in which all nodes with a kernel run as kernels, and return how each node runs."""
    try:
        return explain_session(task.timed.start(MEASURED))
    except OnnxfuseError:
        raise
    except Exception as error:  # onnxruntime's errors have no common class
        given = ", ".join(f"{name} = {value}" for name, value in task.timed.options.items()) or "no options"
        where = f"on {task.timed.provider} with {given}"
        raise OnnxfuseError(f"the model does not load {where}: {first_line(error)}") from error


def _measure_plans(task: _Task, others: Sequence[Callable[[], Mapping[str, Array]]]) -> None:
    """Measure the plans of all kernels on `others`, by running a session that measures plans at each new size.

    Sizes at which the model does not run are left out, after a warning.
    """
    if not others:
        return
    session = task.timed.start(MEASURED)
    for done, make in enumerate(others):
        task.timed.progress("measure plans", done, len(others))
        feeds = make()
        try:
            replace(task.timed, feeds=feeds).bind(session).run()
        except Exception as error:  # onnxruntime's errors have no common class
            log.warning("plans are not measured at %s: %s", describe_feeds(feeds), first_line(error))


def _time_nodes(task: _Task, dispatches: Sequence[NodeDispatch]) -> tuple[list[OpTime], str]:
    """Time each distinct node that has a kernel; the second result is "", or why no node was timed."""
    try:
        return op_times(task.timed, dispatches, CUDA_GRAPH in task.modes, only_kernels=True), ""
    except Exception as error:  # such as too little memory for all values at once; the whole model is still timed
        return [], first_line(error)


def _keep_node(task: _Task, row: OpTime, bodies: Mapping[str, str]) -> bool:
    call = next(call for call in task.calls if call.node.name == row.nodes[0])
    seconds = {name: max(value or 0.0, 1e-9) for name, value in (("kernel", row.kernel), ("body", row.body))}
    case = {"shapes": list(row.shapes)}
    return cache.store(task.environment, node_subject(call, bodies), case, row.faster or "", seconds)


# --- the whole model -------------------------------------------------------------------------------------------------


def _time_model(task: _Task, mode: Mode, original: onnx.ModelProto | None) -> ModelTimes:
    """Time the variants of a model (see `_variants`) in turns, or each alone if memory is too small for all."""
    task.timed.progress(f"time the model ({mode})", 0, 0)
    try:
        variants = _variants(task, mode, original)
        seconds = _seconds_in_turns(variants, mode)
        if seconds is None:
            log.info("memory does not hold all variants of the model (%s); they are timed one after the other", mode)
            each = [_seconds_in_turns({name: make}, mode) or {} for name, make in variants.items()]
            seconds = {name: value for one in each for name, value in one.items()}
    except Exception as error:  # a model with nodes on the CPU cannot be captured
        return ModelTimes(mode, {}, "", first_line(error))
    if ALL_KERNELS not in seconds:
        return ModelTimes(mode, seconds, "", "not all kernels run; the log says why")
    chosen = min((name for name in seconds if name != ORIGINAL), key=lambda name: seconds[name])
    return ModelTimes(mode, seconds, chosen)


def _variants(task: _Task, mode: Mode, original: onnx.ModelProto | None) -> dict[str, Callable[[], BoundSession]]:
    """Return functions that open the model's variants: all nodes as bodies, all as kernels, a mix, and the original.

    A node's body is the ONNX function that the node calls.  In the mix, each node runs in the way that is faster when
    the node is timed alone.  The mix is left out if it equals one of the first two variants.

    Raises onnxruntime's error if the model does not run with all nodes as bodies.
    """
    fused, alone = task.timed, preferences_by_node(task.timed.model, task.calls, task.environment)
    settings: dict[str, SessionSettings | None] = {ALL_BODIES: None, ALL_KERNELS: MEASURED}
    if is_mixed(alone):
        settings[mix_name(alone)] = SessionSettings(lambda *_: alone, "measured")
    bound = fused.bind(fused.start())
    bound.run()
    shapes = bound.shapes()  # with CUDA graphs, outputs must be allocated before the first run

    def warm(timed: TimedModel, of_variant: SessionSettings | None) -> BoundSession:
        return timed.bind(timed.start(of_variant, cuda_graph=mode == CUDA_GRAPH), shapes).warm_up()

    made: dict[str, Callable[[], BoundSession]] = {n: partial(warm, fused, each) for n, each in settings.items()}
    return made | ({ORIGINAL: partial(warm, replace(fused, model=original), None)} if original else {})


def _seconds_in_turns(variants: Mapping[str, Callable[[], BoundSession]], mode: Mode) -> dict[str, float] | None:
    """Return the median seconds of the variants that run; None if memory does not hold all variants at once.

    A variant is a session of the model.  Raises onnxruntime's error if the variant ALL_BODIES does not run, in which
    every fused node runs as its ONNX function.
    """
    bound: dict[str, BoundSession] = {}
    for name, make in variants.items():
        try:
            bound[name] = make()
        except Exception as error:
            if bound and OUT_OF_MEMORY.search(str(error)):
                return None
            if name == ALL_BODIES:
                raise
            log.warning("%s (%s) cannot be chosen, it does not run: %s", name, mode, first_line(error))
    if not bound:
        return {}
    count = min(runs_within(SECONDS_PER_VARIANT, each.run) for each in bound.values())
    times = interleaved([each.run for each in bound.values()], count)
    return {name: each.median for name, each in zip(bound, times, strict=True)}


def _model_case(task: _Task, mode: Mode) -> Data:
    return {"mode": mode, "shapes": [f"{name} {text}" for name, text in describe_feeds(task.timed.feeds).items()]}


def _keep_model(task: _Task, times: ModelTimes) -> bool:
    seconds = {name: value for name, value in times.seconds.items() if name != ORIGINAL}
    case = _model_case(task, times.mode)
    return cache.store(task.environment, model_subject(task.timed.model), case, times.chosen, seconds)


def _is_known(task: _Task) -> bool:
    """Return whether the whole model was timed at these shapes in plain mode, which every model can run in."""
    return cache.lookup_case(task.environment, model_subject(task.timed.model), _model_case(task, PLAIN)) is not None
