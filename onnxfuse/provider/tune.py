"""Kernel or body, measured: each distinct fused node alone, then the whole model; verdicts for later sessions."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import onnx

from onnxfuse.bench.op_times import OpTime, op_times
from onnxfuse.bench.timing import (
    PROVIDERS,
    WARM_UP,
    Bound,
    Provider,
    bind,
    check_available,
    interleaved,
    runs_within,
    start,
)
from onnxfuse.errors import OnnxfuseError, UsageError
from onnxfuse.provider import planner, verdicts
from onnxfuse.provider.external_data import stated_folder
from onnxfuse.provider.model import Call, read_calls, read_model
from onnxfuse.provider.preferences import (
    BODIES,
    GRAPH,
    KERNELS,
    PLAIN,
    all_kernels,
    body_digests,
    by_node,
    is_mixed,
    mix_name,
    model_subject,
    node_subject,
)
from onnxfuse.provider.session import explain_session
from onnxfuse.provider.target import allows_tf32
from onnxfuse.verify.given_shapes import described, feeds_of_known_sizes
from onnxfuse.verify.inputs import Array
from onnxfuse.verify.session import first_line

log: Final = logging.getLogger("onnxfuse")
# As CUDA, onnxruntime's allocator and its gpu_mem_limit say it.
NO_MEMORY: Final = re.compile("out of memory|failed to allocate|smaller than requested", re.IGNORECASE)
SECONDS: Final = 2.0  # of runs of each variant of the whole model
NOT_FOR_TIMING: Final = ("enable_cuda_graph", "user_compute_stream", "has_user_compute_stream")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Whole:
    """The whole model in one mode: seconds of a run by variant, and which variant sessions will be, if it is known."""

    mode: str
    seconds: Mapping[str, float]
    chosen: str
    reason: str = ""  # why nothing is chosen


@dataclass(frozen=True)
class Tuning:
    """What was measured, and whether the verdicts are on disk."""

    ops: tuple[OpTime, ...]
    whole: tuple[Whole, ...]
    inputs: Mapping[str, str]
    kept: bool
    ops_error: str = ""  # why no node was timed alone


@dataclass(frozen=True)
class _Tuned:
    """A model, where it runs, and on what."""

    model: onnx.ModelProto
    folder: Path | None
    feeds: Mapping[str, Array]
    provider: Provider
    options: Mapping[str, Any]
    progress: Progress
    calls: Sequence[Call]
    environment: verdicts.Environment

    @property
    def ordinal(self) -> int:
        return int(self.options.get("device_id", 0))

    @property
    def modes(self) -> tuple[str, ...]:
        return (PLAIN, GRAPH) if self.provider == "cuda" else (PLAIN,)


def tune(
    model: onnx.ModelProto,
    folder: Path | None,
    feeds: Mapping[str, Array],
    provider: Provider,
    options: Mapping[str, Any] | None = None,
    *,
    original: onnx.ModelProto | None = None,
    progress: Progress = lambda stage, done, of: None,
) -> Tuning:
    """Measure a fused model on these inputs and keep the verdicts; later sessions of this GPU use them.

    folder    where the model's external data is
    options   of the provider: device_id, use_tf32, …; CUDA graphs are timed as well, whatever they say
    original  the model before it was fused, timed beside it; sessions never run it

    Raises UsageError where nothing can be tuned, OnnxfuseError where the model does not load with these options.  What
    does not run is left out: the result says why.  A model whose kernels do not run is not kept: that may have passed.
    """
    work = _work(model, folder, feeds, provider, options or {}, progress)
    rows, error = _timed_nodes(work, _all_as_kernels(work))
    bodies = body_digests(model)
    kept = [_keep_node(work, row, bodies) for row in rows if row.faster]
    whole = [_timed_whole(work, mode, original) for mode in work.modes]
    kept += [_keep_whole(work, each) for each in whole if each.chosen]
    return Tuning(tuple(rows), tuple(whole), described(feeds), bool(kept) and all(kept), error)


def tune_session(
    source: str | os.PathLike[str] | bytes | onnx.ModelProto,
    session_options: Any,
    provider_name: str,
    options: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """For tune="now": measure a session's model, unless that was done; what fails is logged.  Raises UsageError."""
    provider: Provider = "cuda" if provider_name == PROVIDERS["cuda"] else "cpu"
    if PROVIDERS[provider] != provider_name:
        return
    path = None if isinstance(source, bytes | onnx.ModelProto) else Path(source)
    model = read_model(source if isinstance(source, bytes | onnx.ModelProto) else Path(source))
    texts = [f"{key}:{'x'.join(map(str, dims))}" for key, dims in shapes.items()]
    feeds = feeds_of_known_sizes(model, texts, {}, "shapes={'input': (8, 512)}")
    place = stated_folder(session_options) if session_options is not None else None
    try:
        work = _work(model, place or (path.parent if path else None), feeds, provider, options, _silent)
        if not _is_known(work):
            for each in tune(model, work.folder, feeds, work.provider, work.options).whole:
                if each.reason:
                    log.info("nothing is chosen for the whole model (%s): %s", each.mode, each.reason)
    except Exception as error:  # onnxruntime's errors have no common class; the session itself may be possible
        log.warning("the model was not tuned: %s", first_line(error))


def _silent(stage: str, done: int, of: int) -> None:
    pass


def _work(
    model: onnx.ModelProto,
    folder: Path | None,
    feeds: Mapping[str, Array],
    provider: Provider,
    options: Mapping[str, Any],
    progress: Progress,
) -> _Tuned:
    name, ordinal = PROVIDERS[provider], int(options.get("device_id", 0))
    options = {key: value for key, value in options.items() if key not in NOT_FOR_TIMING}
    check_available(provider)
    if name not in planner.backends:
        raise UsageError(f"kernels run on {', '.join(planner.backends)}, not on {name}; there is nothing to tune")
    if why := planner.backends[name].unavailable():
        raise UsageError(f"kernels cannot run here, so there is nothing to tune: {why}")
    calls = read_calls(model)
    if not calls:
        raise UsageError("the model has no fused nodes; there is nothing to tune")
    try:
        device = planner.device_of(name, ordinal, allows_tf32(options))
    except Exception as error:  # CuPy's own errors have no common class
        raise UsageError(f"there is no GPU {ordinal}: {first_line(error)}; give another --device-id") from error
    environment = verdicts.session_environment(name, device, options)
    return _Tuned(model, folder, feeds, provider, options, progress, calls, environment)


# --- nodes -----------------------------------------------------------------------------------------------------------


def _all_as_kernels(work: _Tuned) -> Sequence[Any]:
    """How each node runs where all do as kernels that can."""
    try:
        return explain_session(start(work.model, work.folder, work.provider, options=work.options, prefer=all_kernels))
    except OnnxfuseError:
        raise
    except Exception as error:  # onnxruntime's errors have no common class
        given = ", ".join(f"{name} = {value}" for name, value in work.options.items()) or "no options"
        raise OnnxfuseError(f"the model does not load on {work.provider} with {given}: {first_line(error)}") from error


def _timed_nodes(work: _Tuned, runs: Sequence[Any]) -> tuple[list[OpTime], str]:
    """Each distinct node that has a kernel, or why none was timed."""
    graphs = GRAPH in work.modes
    try:
        rows = op_times(
            work.model, work.folder, work.feeds, work.provider, runs, graphs, work.progress,
            options=work.options, only_kernels=True,
        )  # fmt: skip
        return rows, ""
    except Exception as error:  # such as too little memory for all values at once; the whole model is timed
        return [], first_line(error)


def _keep_node(work: _Tuned, row: OpTime, bodies: Mapping[str, str]) -> bool:
    call = next(call for call in work.calls if call.node.name == row.nodes[0])
    seconds = {name: max(value or 0.0, 1e-9) for name, value in (("kernel", row.kernel), ("body", row.body))}
    case = {"shapes": list(row.shapes)}
    return verdicts.keep(work.environment, node_subject(call, bodies), case, row.faster or "", seconds)


# --- the whole model -------------------------------------------------------------------------------------------------


def _timed_whole(work: _Tuned, mode: str, original: onnx.ModelProto | None) -> Whole:
    """All variants in turns, in one mode; one after the other where memory does not hold them all."""
    work.progress(f"time the model ({mode})", 0, 0)
    try:
        variants = _variants(work, mode, original)
        seconds = _in_turns(variants, mode)
        if seconds is None:
            log.info("memory does not hold all variants of the model (%s); they are timed one after the other", mode)
            each = [_in_turns({name: make}, mode) or {} for name, make in variants.items()]
            seconds = {name: value for one in each for name, value in one.items()}
    except Exception as error:  # a model with nodes on the CPU cannot be captured
        return Whole(mode, {}, "", first_line(error))
    if KERNELS not in seconds:
        return Whole(mode, seconds, "", "not all kernels run; the log says why")
    chosen = min((name for name in seconds if name != "original"), key=lambda name: seconds[name])
    return Whole(mode, seconds, chosen)


def _variants(work: _Tuned, mode: str, original: onnx.ModelProto | None) -> dict[str, Callable[[], Bound]]:
    """What loads all bodies, all kernels, and the mix of what is best node by node where that is neither.

    Raises what onnxruntime raises where the bodies do not run.
    """
    alone = by_node(work.model, work.calls, work.environment)
    prefer: dict[str, Any] = {BODIES: None, KERNELS: all_kernels}
    if is_mixed(alone):
        prefer[mix_name(alone)] = lambda *_: alone
    shapes = _output_shapes(work)
    result: dict[str, Callable[[], Bound]] = {
        name: partial(_warm, work, work.model, mode, each, shapes) for name, each in prefer.items()
    }
    return result | ({"original": partial(_warm, work, original, mode, None, shapes)} if original else {})


def _in_turns(variants: Mapping[str, Callable[[], Bound]], mode: str) -> dict[str, float] | None:
    """Seconds of a run of those that run; None where several do not fit into memory beside each other.

    Raises what onnxruntime raises where the bodies do not run.
    """
    bound: dict[str, Bound] = {}
    for name, make in variants.items():
        try:
            bound[name] = make()
        except Exception as error:
            if bound and NO_MEMORY.search(str(error)):
                return None
            if name == BODIES:
                raise
            log.warning("%s (%s) cannot be chosen, it does not run: %s", name, mode, first_line(error))
    if not bound:
        return {}
    count = min(runs_within(SECONDS, each.run) for each in bound.values())
    spreads = interleaved([each.run for each in bound.values()], count)
    return {name: each.median for name, each in zip(bound, spreads, strict=True)}


def _warm(
    work: _Tuned, model: onnx.ModelProto, mode: str, prefer: Any, shapes: Mapping[str, Sequence[int]] | None
) -> Bound:
    options = {**work.options, **({"enable_cuda_graph": 1} if mode == GRAPH else {})}
    session = start(model, work.folder, work.provider, options=options, prefer=prefer)
    bound = bind(session, work.feeds, work.provider, shapes, work.ordinal)
    for _ in range(WARM_UP):
        bound.run()
    return bound


def _output_shapes(work: _Tuned) -> dict[str, tuple[int, ...]]:
    """With CUDA graphs outputs must have their place before the first run."""
    session = start(work.model, work.folder, work.provider, options=work.options)
    bound = bind(session, work.feeds, work.provider, None, work.ordinal)
    bound.run()
    return bound.shapes()


def _whole_case(work: _Tuned, mode: str) -> dict[str, Any]:
    return {"mode": mode, "shapes": [f"{name} {text}" for name, text in described(work.feeds).items()]}


def _keep_whole(work: _Tuned, whole: Whole) -> bool:
    seconds = {name: value for name, value in whole.seconds.items() if name != "original"}
    subject, case = model_subject(work.model), _whole_case(work, whole.mode)
    return verdicts.keep(work.environment, subject, case, whole.chosen, seconds)


def _is_known(work: _Tuned) -> bool:
    """Whether the whole model was timed at these shapes; plainly, since not every model can be captured."""
    return verdicts.recall_case(work.environment, model_subject(work.model), _whole_case(work, PLAIN)) is not None
