"""Measure kernel against body, for each distinct fused node and for the whole model, for later sessions to use."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import onnx
import onnxruntime as ort

from onnxfuse.errors import OnnxfuseError, UsageError, first_line
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.load import read
from onnxfuse.runtime.backends import BACKENDS, device_of
from onnxfuse.runtime.environment import Environment, allows_tf32, session_environment
from onnxfuse.runtime.external_data import configured_folder
from onnxfuse.runtime.fused_calls import Call, read_calls
from onnxfuse.runtime.target import ProviderOptions
from onnxfuse.tuning import cache
from onnxfuse.tuning.bound_session import (
    PROVIDERS,
    WARM_UP_RUNS,
    BoundSession,
    OpenFused,
    Provider,
    bind,
    check_available,
    ordinal_of,
    start_session,
)
from onnxfuse.tuning.cache import Data
from onnxfuse.tuning.dispatch import (
    ALL_BODIES,
    ALL_KERNELS,
    CUDA_GRAPH,
    PLAIN,
    Mode,
    NodeDispatch,
    Prefer,
    all_kernels,
    body_digests,
    explain_session,
    is_mixed,
    mix_name,
    model_subject,
    node_subject,
    preferences_by_node,
)
from onnxfuse.tuning.op_times import OpTime, Progress, op_times
from onnxfuse.tuning.timing import interleaved, runs_within
from onnxfuse.verify.requested_shapes import describe_feeds, feeds_of_known_sizes

log: Final = logging.getLogger("onnxfuse")
# The words of CUDA, of onnxruntime's allocator and of its gpu_mem_limit.
OUT_OF_MEMORY: Final = re.compile("out of memory|failed to allocate|smaller than requested", re.IGNORECASE)
SECONDS_PER_VARIANT: Final = 2.0  # of runs of the whole model
NOT_FOR_TIMING: Final = ("enable_cuda_graph", "user_compute_stream", "has_user_compute_stream")  # provider options
ORIGINAL: Final = "original"  # a variant that is timed, but never chosen
Source = str | os.PathLike[str] | bytes | onnx.ModelProto


@dataclass(frozen=True)
class ModelTimes:
    """The seconds of a run of the whole model in one mode, by variant, and the variant that sessions will be."""

    mode: Mode
    seconds: Mapping[str, float]
    chosen: str  # empty where none is
    reason: str = ""  # why none is chosen


@dataclass(frozen=True)
class Tuning:
    """What `tune` measured."""

    ops: tuple[OpTime, ...]
    models: tuple[ModelTimes, ...]  # one for each mode
    inputs: Mapping[str, str]
    kept: bool  # whether all measurements are on disk
    ops_error: str = ""  # why no node was timed alone


@dataclass(frozen=True)
class _Task:
    """A model to tune, and where and on what it runs."""

    model: onnx.ModelProto
    folder: Path | None
    feeds: Mapping[str, Array]
    provider: Provider
    options: ProviderOptions
    open_fused: OpenFused
    progress: Progress
    calls: Sequence[Call]
    environment: Environment

    @property
    def ordinal(self) -> int:
        return ordinal_of(self.options)

    @property
    def modes(self) -> tuple[Mode, ...]:
        return (PLAIN, CUDA_GRAPH) if self.provider == "cuda" else (PLAIN,)


def tune(
    model: onnx.ModelProto,
    folder: Path | None,
    feeds: Mapping[str, Array],
    provider: Provider,
    open_fused: OpenFused,
    options: ProviderOptions | None = None,
    *,
    original: onnx.ModelProto | None = None,
    others: Sequence[Callable[[], Mapping[str, Array]]] = (),
    progress: Progress = lambda stage, done, of: None,
) -> Tuning:
    """Measure a fused model on these inputs and keep the measurements, which later sessions on this GPU use.

    folder      where the model's external data is
    open_fused  opens sessions that run kernels: onnxfuse.session.open_session
    options     of the provider: device_id, use_tf32, …; CUDA graphs are timed as well, whatever the options say
    original    the model before it was fused, which is timed beside it and never chosen
    others      make inputs of other sizes, at which the plans of the kernels are measured, too

    Raises UsageError where nothing can be tuned, OnnxfuseError where the model does not load with these options. The
    result says why a variant that does not run was left out. If the kernels of a model do not run, nothing is kept of
    the model, because the reason may pass.
    """
    task = _task(model, folder, feeds, provider, open_fused, options or {}, progress)
    dispatches = _dispatch_to_kernels(task)
    _measure_plans(task, others)
    rows, error = _time_nodes(task, dispatches)
    bodies = body_digests(model)
    kept = [_keep_node(task, row, bodies) for row in rows if row.faster]
    models = [_time_model(task, mode, original) for mode in task.modes]
    kept += [_keep_model(task, each) for each in models if each.chosen]
    return Tuning(tuple(rows), tuple(models), describe_feeds(feeds), bool(kept) and all(kept), error)


def tune_session(
    source: Source,
    session_options: ort.SessionOptions | None,
    provider_name: str,
    options: ProviderOptions,
    shapes: Mapping[str, Sequence[int]],
    open_fused: OpenFused,
) -> None:
    """Tune the model of a session for tune="now", unless it was measured at these shapes before.

    Failures are logged, because the session itself may be possible. Raises UsageError for missing or wrong shapes.
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
        task = _task(model, folder, feeds, provider, open_fused, options, _no_progress)
        if not _is_known(task):
            for each in tune(model, task.folder, feeds, provider, open_fused, task.options).models:
                if each.reason:
                    log.info("nothing is chosen for the whole model (%s): %s", each.mode, each.reason)
    except Exception as error:  # onnxruntime's errors have no common class
        log.warning("the model was not tuned: %s", first_line(error))


def _no_progress(stage: str, done: int, of: int) -> None:
    pass


def check_kernels_run(provider: Provider) -> None:
    """Raise UsageError where no kernels run, so that nothing can be tuned."""
    check_available(provider)
    name = PROVIDERS[provider]
    if name not in BACKENDS:
        raise UsageError(f"kernels run on {', '.join(BACKENDS)}, not on {name}; there is nothing to tune")
    backend = BACKENDS[name]
    if why := backend.no_gpu() or backend.unavailable() or backend.cannot_time():
        raise UsageError(f"kernels cannot run here, so there is nothing to tune: {why}")


def _task(
    model: onnx.ModelProto,
    folder: Path | None,
    feeds: Mapping[str, Array],
    provider: Provider,
    open_fused: OpenFused,
    options: ProviderOptions,
    progress: Progress,
) -> _Task:
    """Collect what is measured.  Raises UsageError where nothing can be tuned."""
    name, ordinal = PROVIDERS[provider], ordinal_of(options)
    options = {key: value for key, value in options.items() if key not in NOT_FOR_TIMING}
    check_kernels_run(provider)
    calls = read_calls(model)
    if not calls:
        raise UsageError("the model has no fused nodes; there is nothing to tune")
    try:
        device = device_of(name, ordinal, allows_tf32(options))
    except Exception as error:  # CuPy's own errors have no common class
        raise UsageError(f"there is no GPU {ordinal}: {first_line(error)}; give another --device-id") from error
    environment = session_environment(name, device, options)
    return _Task(model, folder, feeds, provider, options, open_fused, progress, calls, environment)


# --- nodes -----------------------------------------------------------------------------------------------------------


def _dispatch_to_kernels(task: _Task) -> Sequence[NodeDispatch]:
    """Return how each node runs in a session where all nodes with a kernel run as kernels."""
    open_session = partial(task.open_fused, prefer=all_kernels, choice="measured")
    try:
        session = start_session(task.model, task.folder, task.provider, open_session, options=task.options)
        return explain_session(session)
    except OnnxfuseError:
        raise
    except Exception as error:  # onnxruntime's errors have no common class
        given = ", ".join(f"{name} = {value}" for name, value in task.options.items()) or "no options"
        raise OnnxfuseError(f"the model does not load on {task.provider} with {given}: {first_line(error)}") from error


def _measure_plans(task: _Task, others: Sequence[Callable[[], Mapping[str, Array]]]) -> None:
    """Measure the plans of all kernels at several sizes: a session that measures does so when a node meets new ones.

    Sizes at which the model does not run are left out, with a line in the log.
    """
    if not others:
        return
    open_session = partial(task.open_fused, prefer=all_kernels, choice="measured")
    session = start_session(task.model, task.folder, task.provider, open_session, options=task.options)
    for done, make in enumerate(others):
        task.progress("measure plans", done, len(others))
        feeds = make()
        try:
            bind(session, feeds, task.provider, None, task.ordinal).run()
        except Exception as error:  # onnxruntime's errors have no common class
            log.warning("plans are not measured at %s: %s", describe_feeds(feeds), first_line(error))


def _time_nodes(task: _Task, dispatches: Sequence[NodeDispatch]) -> tuple[list[OpTime], str]:
    """Time each distinct node that has a kernel; the second result says why none was timed."""
    graphs = CUDA_GRAPH in task.modes
    try:
        rows = op_times(
            task.model, task.folder, task.feeds, task.provider, dispatches, graphs, task.progress, task.open_fused,
            options=task.options, only_kernels=True,
        )  # fmt: skip
        return rows, ""
    except Exception as error:  # such as too little memory for all values at once; the whole model is still timed
        return [], first_line(error)


def _keep_node(task: _Task, row: OpTime, bodies: Mapping[str, str]) -> bool:
    call = next(call for call in task.calls if call.node.name == row.nodes[0])
    seconds = {name: max(value or 0.0, 1e-9) for name, value in (("kernel", row.kernel), ("body", row.body))}
    case = {"shapes": list(row.shapes)}
    return cache.store(task.environment, node_subject(call, bodies), case, row.faster or "", seconds)


# --- the whole model -------------------------------------------------------------------------------------------------


def _time_model(task: _Task, mode: Mode, original: onnx.ModelProto | None) -> ModelTimes:
    """Time all variants in turns; one after the other if memory does not hold all of them."""
    task.progress(f"time the model ({mode})", 0, 0)
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
    """Return what loads all bodies, all kernels, and the mix of what is faster node by node if that is neither.

    Raises what onnxruntime raises where the bodies do not run.
    """
    alone = preferences_by_node(task.model, task.calls, task.environment)
    prefer: dict[str, Prefer | None] = {ALL_BODIES: None, ALL_KERNELS: all_kernels}
    if is_mixed(alone):
        prefer[mix_name(alone)] = lambda *_: alone
    shapes = _output_shapes(task)
    result: dict[str, Callable[[], BoundSession]] = {
        name: partial(_warm_session, task, task.model, mode, each, shapes) for name, each in prefer.items()
    }
    return result | ({ORIGINAL: partial(_warm_session, task, original, mode, None, shapes)} if original else {})


def _seconds_in_turns(variants: Mapping[str, Callable[[], BoundSession]], mode: Mode) -> dict[str, float] | None:
    """Return the median seconds of the variants that run; None where several do not fit into memory together.

    Raises what onnxruntime raises where the bodies do not run.
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


def _warm_session(
    task: _Task,
    model: onnx.ModelProto,
    mode: Mode,
    prefer: Prefer | None,
    shapes: Mapping[str, Sequence[int]] | None,
) -> BoundSession:
    """Start a session and warm it up; without `prefer`, all nodes run as their bodies in plain onnxruntime."""
    options = {**task.options, **({"enable_cuda_graph": 1} if mode == CUDA_GRAPH else {})}
    open_session = partial(task.open_fused, prefer=prefer, choice="measured") if prefer else None
    session = start_session(model, task.folder, task.provider, open_session, options=options)
    bound = bind(session, task.feeds, task.provider, shapes, task.ordinal)
    for _ in range(WARM_UP_RUNS):
        bound.run()
    return bound


def _output_shapes(task: _Task) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the outputs: with CUDA graphs, outputs must be allocated before the first run."""
    session = start_session(task.model, task.folder, task.provider, options=task.options)
    bound = bind(session, task.feeds, task.provider, None, task.ordinal)
    bound.run()
    return bound.shapes()


def _model_case(task: _Task, mode: Mode) -> Data:
    return {"mode": mode, "shapes": [f"{name} {text}" for name, text in describe_feeds(task.feeds).items()]}


def _keep_model(task: _Task, times: ModelTimes) -> bool:
    seconds = {name: value for name, value in times.seconds.items() if name != ORIGINAL}
    case = _model_case(task, times.mode)
    return cache.store(task.environment, model_subject(task.model), case, times.chosen, seconds)


def _is_known(task: _Task) -> bool:
    """Return whether the whole model was timed at these shapes in plain mode; not every model can be captured."""
    return cache.lookup_case(task.environment, model_subject(task.model), _model_case(task, PLAIN)) is not None
