"""Sessions of onnxruntime in which fused nodes run as kernels, or as their bodies where no kernel fits or is faster."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, get_args

import onnx

from onnxfuse.errors import NO_ONNXRUNTIME, MissingPackageError, ModelError, UsageError

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingPackageError(f"{NO_ONNXRUNTIME} ({error})") from error

from onnxfuse.runtime import planner
from onnxfuse.runtime.custom_ops import register_operators
from onnxfuse.runtime.environment import ALL_OPTIMIZATIONS
from onnxfuse.runtime.external_data import configured_folder, external_data_folder, external_files, file_outside
from onnxfuse.runtime.fused_calls import Call, read_calls, read_model, split_functions
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.preparation import preparation
from onnxfuse.runtime.target import NoTarget, PlanChoice, ProviderOptions, Providers, Target, find_target
from onnxfuse.tuning.autotune import MeasuredVerdicts
from onnxfuse.tuning.dispatch import (
    CUDA_GRAPH,
    PLAIN,
    NodeDispatch,
    Prefer,
    Preference,
    TunePolicy,
    cached_preferences,
    explain_session,
    record_dispatches,
)
from onnxfuse.tuning.tune import tune_session

__all__ = ["InferenceSession", "NodeDispatch", "explain_session", "open_session", "register"]

log: Final = logging.getLogger("onnxfuse")
planner.choose_plans_with(MeasuredVerdicts())  # the planner knows nothing of measurements


def InferenceSession(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[ProviderOptions] | None = None,
    *,
    tune: TunePolicy = "cached",
    shapes: Mapping[str, Sequence[int]] | None = None,
    **arguments: object,
) -> ort.InferenceSession:
    """Open an ordinary onnxruntime session in which fused nodes run as kernels, where this GPU has kernels for them.

    tune    "cached": earlier measurements decide between kernel and body, and between the plans of a kernel; nodes
            without one run as kernels, by the plans that are expected to be the fastest.
            "now": nodes without one are measured first, at the sizes of the model's inputs.
            "never": all nodes run as kernels, by the plans that are expected to be the fastest.
    shapes  for "now": the sizes of inputs with dynamic dims, as {"input_ids": (8, 512)}

    Other arguments are those of onnxruntime.InferenceSession. Threads may share `sess_options` here, but not with
    onnxruntime.InferenceSession at the same time. If nodes run as kernels, `enable_fallback` is 0 unless it is given,
    and `set_providers` with other providers fails, because these have no kernels.

    Raises ModelError for a model with operators or attributes of onnxfuse that this version does not know, UsageError
    for "now" without a size of every dynamic dim.
    """
    _check_tune(tune)
    if tune == "now":
        _tune_now(path_or_bytes, sess_options, providers, provider_options, shapes or {})
    prefer, plans = _choices(tune)
    return open_session(
        path_or_bytes, sess_options, providers, provider_options, prefer=prefer, plans=plans, **arguments
    )


def open_session(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[ProviderOptions] | None = None,
    *,
    prefer: Prefer | None,
    plans: PlanChoice,
    **arguments: object,
) -> ort.InferenceSession:
    """Open a session like `InferenceSession`.

    prefer  which nodes run as kernels and which as bodies; None runs every node with a kernel as one
    plans   which candidate plans of a kernel run
    """
    options = sess_options if sess_options is not None else ort.SessionOptions()
    path = None if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
    stamp = _stamp(path)
    source = path_or_bytes if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
    model = read_model(source)
    calls = read_calls(model)
    target = find_target(options, providers, provider_options)
    files = external_files(model) if path else set()
    outside = file_outside(path.parent, files) if path and not configured_folder(options) else None
    why_alike = f"; nodes cannot differ, as '{outside}' leads out of the model's folder" if outside else None
    reasons, preferred = _kernel_or_body(model, calls, target, prefer, why_alike)
    mixed = [call for call, why in zip(calls, reasons, strict=True) if why and _has_kernel(call.op, calls, reasons)]
    folder = path.parent if path and mixed and files else None
    if mixed:
        source = split_functions(model, mixed).SerializeToString()
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    bodies = {call.op for call in calls} - {call.op for call in kernels}
    register_operators(options, target, kernels, bodies, plans)
    if kernels:
        arguments.setdefault("enable_fallback", 0)
    with preparation(kernels, target, plans), external_data_folder(folder, options, shared=sess_options is not None):
        session = ort.InferenceSession(source, options, providers, provider_options, **arguments)
    if _stamp(path) != stamp:
        raise ModelError(f"'{path}' was written to while it was loaded; make the session again")
    record_dispatches(session, _dispatches(calls, reasons, preferred, target))
    return session


def _stamp(path: Path | None) -> tuple[int, ...]:
    """Return what changes when the model's file is written: the file is read twice."""
    try:
        found = path.stat() if path else None
    except OSError:  # reading the file raises an error that says more
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if found else ()


def register(
    session_options: ort.SessionOptions,
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    providers: Providers | None = None,
    provider_options: Sequence[ProviderOptions] | None = None,
    *,
    tune: TunePolicy = "cached",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> tuple[NodeDispatch, ...]:
    """Let a session that onnxruntime makes with these options, this model and these providers run kernels.

    `tune` and `shapes` are those of `InferenceSession`. Because the model stays as it is, either all nodes that call
    one function run as kernels or none does. Give onnxruntime.InferenceSession enable_fallback=0, so that it shows why
    CUDA failed.

    Returns how each fused node will run.
    """
    _check_tune(tune)
    if tune == "now":
        _tune_now(model, session_options, providers, provider_options, shapes or {})
    source = model if isinstance(model, bytes | onnx.ModelProto) else Path(model)
    proto = read_model(source)
    calls = read_calls(proto)
    target = find_target(session_options, providers, provider_options)
    prefer, plans = _choices(tune)
    reasons, preferred = _kernel_or_body(proto, calls, target, prefer, "")
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    bodies = {call.op for call in calls} - {call.op for call in kernels}
    register_operators(session_options, target, kernels, bodies, plans)
    with preparation(kernels, target, plans):
        pass
    dispatches = _dispatches(calls, reasons, preferred, target)
    record_dispatches(session_options, dispatches)
    return dispatches


# --- which nodes run as kernels --------------------------------------------------------------------------------------


def _kernel_or_body(
    model: onnx.ModelProto,
    calls: Sequence[Call],
    target: Target | NoTarget,
    prefer: Prefer | None,
    why_alike: str | None,
) -> tuple[list[str | None], list[Preference | None]]:
    """Return for each node why it runs as its body, None if it runs as a kernel; and what `prefer` says of it.

    why_alike  why nodes that call one function must run alike, as the end of a sentence; None if they need not
    """
    reasons = _reasons(calls, target)
    preferred = _preferred(model, calls, reasons, target, prefer, why_alike is None)
    bodies = {call.op: call.node.name for call, why in zip(calls, reasons, strict=True) if why}
    if why_alike is not None:
        for i, call in enumerate(calls):
            if reasons[i] is None and call.op in bodies:
                name = bodies[call.op]
                reasons[i] = f"node '{name}', which calls the same function, runs as its body{why_alike}"
    return reasons, preferred


def _reasons(calls: Sequence[Call], target: Target | NoTarget) -> list[str | None]:
    """Return for each node why no kernel can run it; None if one can.

    Raises ModelError for a node that neither a kernel nor a body can run.
    """
    reasons = [target.why if isinstance(target, NoTarget) else _reason(call, target) for call in calls]
    for call, why in zip(calls, reasons, strict=True):
        if why and not call.has_body:
            raise ModelError(
                f"node '{call.node.name}' calls {call.proto.domain}::{call.op}, which the model has no function for, "
                f"and no kernel runs it: {why}"
            )
    in_functions = {call.op for call in calls if call.in_function}
    return [
        why or (f"{call.op} is also called inside a function" if call.op in in_functions else None)
        for call, why in zip(calls, reasons, strict=True)
    ]


def _reason(call: Call, target: Target) -> str | None:
    """Return why no kernel can run a node; None if one can."""
    node = call.node
    host = find_host(node.fusion)
    if host is None:
        return f"fusion {node.fusion} has no kernel in onnxfuse, an installed package or an added folder"
    if call.in_function:
        return "it stands inside a function"
    if "" in call.proto.output:
        return f"its output {list(call.proto.output).index('')} is left out"
    dtypes = tuple(dtype for dtype in call.dtypes if dtype is not None)
    if len(dtypes) < len(call.dtypes):
        i = call.dtypes.index(None)
        return f"the dtype of its operand {node.operands[i]} ('{call.proto.input[i]}') is not known"
    if not call.has_ranks:
        return f"it has no attribute output_ranks, and its outputs are not known to have {node.operands[0]}'s rank"
    try:
        return host.supports(node, dtypes, target.device)
    except (KeyError, TypeError, ValueError) as error:
        return f"its attributes are not what kernel {node.fusion} expects: {type(error).__name__}: {error}"


def _preferred(
    model: onnx.ModelProto,
    calls: Sequence[Call],
    reasons: list[str | None],
    target: Target | NoTarget,
    prefer: Prefer | None,
    per_node: bool,
) -> list[Preference | None]:
    """Return what `prefer` says of each node, and note in `reasons` the nodes whose bodies run because of it."""
    if isinstance(target, NoTarget) or prefer is None or not any(why is None for why in reasons):
        return [None] * len(calls)
    found = list(prefer(model, calls, target.environment, CUDA_GRAPH if target.cuda_graph else PLAIN, per_node))
    for i, (call, each) in enumerate(zip(calls, found, strict=True)):
        if each and not each.kernel and reasons[i] is None and call.has_body:
            reasons[i] = each.why
    return found


def _choices(tune: TunePolicy) -> tuple[Prefer | None, PlanChoice]:
    """Return what decides between kernels and bodies, and between the plans of a kernel."""
    return (None, "first") if tune == "never" else (cached_preferences, "known")


def _check_tune(tune: str) -> None:
    """Raise UsageError unless `tune` is a word that sessions know."""
    if tune not in get_args(TunePolicy):
        raise UsageError(f"tune={tune!r} is none of {', '.join(map(repr, get_args(TunePolicy)))}")


def _tune_now(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    options: ort.SessionOptions | None,
    providers: Providers | None,
    provider_options: Sequence[ProviderOptions] | None,
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Measure a model that was not measured yet at these shapes."""
    target = find_target(options if options is not None else ort.SessionOptions(), providers, provider_options)
    if isinstance(target, Target) and target.optimization != ALL_OPTIMIZATIONS:
        log.warning("the model is not tuned: these session options have %s", target.optimization)
    elif isinstance(target, Target):
        tune_session(model, options, target.provider, target.options, shapes, open_session)


def _has_kernel(op: str, calls: Sequence[Call], reasons: Sequence[str | None]) -> bool:
    return any(call.op == op and why is None for call, why in zip(calls, reasons, strict=True))


def _dispatches(
    calls: Sequence[Call],
    reasons: Sequence[str | None],
    preferred: Sequence[Preference | None],
    target: Target | NoTarget,
) -> tuple[NodeDispatch, ...]:
    """Return what `explain_session` says, and log it by fusion."""
    where = f"{target.provider}, device {target.ordinal}" if isinstance(target, Target) else ""
    kernels = [f"{where}; {each.why}" if each else where for each in preferred]
    level = logging.WARNING if isinstance(target, NoTarget) and target.asked else logging.INFO
    dispatches = tuple(
        NodeDispatch(call.node.name, call.node.fusion, "body" if why else "kernel", why or kernel)
        for call, why, kernel in zip(calls, reasons, kernels, strict=True)
    )
    counts = Counter((each.fusion, each.how, each.why) for each in dispatches)
    for (fusion, how, why), count in counts.items():
        what = "kernels" if how == "kernel" else "their body"
        log.log(level, "%s: %d nodes run as %s (%s)", fusion, count, what, why)
    return dispatches
