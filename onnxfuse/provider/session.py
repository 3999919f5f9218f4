"""Sessions in which fused nodes run as kernels, where there are kernels, and as their bodies elsewhere."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import onnx
import onnxruntime as ort

from onnxfuse.errors import ModelError, UsageError
from onnxfuse.provider import verdicts
from onnxfuse.provider.external_data import beyond, found_in, locations, stated_folder
from onnxfuse.provider.model import Call, read_calls, read_model, split
from onnxfuse.provider.operators import register_operators
from onnxfuse.provider.preferences import GRAPH, PLAIN, Preference, Tune, preferences
from onnxfuse.provider.source import kernel_module
from onnxfuse.provider.target import NoTarget, Providers, Target, find_target

log: Final = logging.getLogger("onnxfuse")
Prefer = Callable[[onnx.ModelProto, Sequence[Call], verdicts.Environment, str, bool], Sequence[Preference | None]]


@dataclass(frozen=True)
class Run:
    """How a fused node runs in a session, and why."""

    node: str
    fusion: str
    how: Literal["kernel", "body"]
    why: str


_runs: weakref.WeakKeyDictionary[Any, tuple[Run, ...]] = weakref.WeakKeyDictionary()


def InferenceSession(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[Mapping[str, Any]] | None = None,
    *,
    tune: Tune = "cached",
    shapes: Mapping[str, Sequence[int]] | None = None,
    **arguments: Any,
) -> ort.InferenceSession:
    """An ordinary onnxruntime session, in which the fused nodes run as kernels where this GPU has them.

    tune    "cached": what was measured before decides between kernel and body; what was not runs as a kernel.
            "now": what was not is measured first, at the sizes of the model's inputs. "never": kernels, unmeasured.
    shapes  for "now": sizes of inputs with dynamic dims, as {"input_ids": (8, 512)}

    Threads may share `sess_options` here, but not with onnxruntime.InferenceSession at the same time. Where nodes run
    as kernels, `enable_fallback` is 0 unless it is given, and `set_providers` with others fails: they have no kernels.

    Raises ModelError for a model that names operators or attributes of onnxfuse that this version does not know,
    UsageError for "now" without a size of every dynamic dim.
    """
    _check_word(tune)
    where = (sess_options, providers, provider_options)
    if tune == "now":
        _tune_now(path_or_bytes, *where, shapes or {})
    prefer = None if tune == "never" else preferences
    return open_session(path_or_bytes, *where, prefer=prefer, measure=tune != "never", **arguments)


def open_session(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[Mapping[str, Any]] | None = None,
    *,
    prefer: Prefer | None,
    measure: bool,
    **arguments: Any,
) -> ort.InferenceSession:
    """`InferenceSession`, with kernel or body as `prefer` says, and `measure`: candidates of a kernel may be timed."""
    options = sess_options if sess_options is not None else ort.SessionOptions()
    path = None if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
    stamp = _stamp(path)
    source: Any = path or path_or_bytes
    model = read_model(source)
    calls = read_calls(model)
    target = find_target(options, providers, provider_options)
    files = locations(model) if path else set()
    far = beyond(path.parent, files) if path and not stated_folder(options) else None
    alike = f"; nodes cannot differ, as '{far}' leads out of the model's folder" if far else None
    reasons, preferred = _choice(model, calls, target, prefer, alike)
    mixed = [call for call, why in zip(calls, reasons, strict=True) if why and _has_kernel(call.op, calls, reasons)]
    folder = path.parent if path and mixed and files else None
    if mixed:
        source = split(model, mixed).SerializeToString()
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    bodies = {call.op for call in calls} - {call.op for call in kernels}
    register_operators(options, target, kernels, bodies, measure)
    if kernels:
        arguments.setdefault("enable_fallback", 0)
    with found_in(folder, options, shared=sess_options is not None):
        session = ort.InferenceSession(source, options, providers, provider_options, **arguments)
    if _stamp(path) != stamp:
        raise ModelError(f"'{path}' was written to while it was loaded; make the session again")
    _runs[session] = _report(calls, reasons, preferred, target)
    return session


def _stamp(path: Path | None) -> tuple[int, ...]:
    """Of the model's file, which is read twice: another one where it has changed."""
    try:
        found = path.stat() if path else None
    except OSError:  # reading it says more
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if found else ()


def register(
    session_options: ort.SessionOptions,
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    providers: Providers | None = None,
    provider_options: Sequence[Mapping[str, Any]] | None = None,
    *,
    tune: Tune = "cached",
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Run, ...]:
    """Let a session that is made with these options, this model and these providers run kernels.

    The same as `InferenceSession`, except that the model stays as it is: of nodes that call one function, all run as
    kernels or none does. Give onnxruntime.InferenceSession enable_fallback=0, so that it shows why CUDA failed.
    """
    _check_word(tune)
    if tune == "now":
        _tune_now(model, session_options, providers, provider_options, shapes or {})
    source = model if isinstance(model, bytes | onnx.ModelProto) else Path(model)
    proto = read_model(source)
    calls = read_calls(proto)
    target = find_target(session_options, providers, provider_options)
    reasons, preferred = _choice(proto, calls, target, None if tune == "never" else preferences, "")
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    bodies = {call.op for call in calls} - {call.op for call in kernels}
    register_operators(session_options, target, kernels, bodies, tune != "never")
    _runs[session_options] = runs = _report(calls, reasons, preferred, target)
    return runs


def explain_session(session: ort.InferenceSession) -> tuple[Run, ...]:
    """How each fused node of a session runs; for sessions made by `InferenceSession`, or after `register`."""
    for key in (session, session.get_session_options(), getattr(session, "_sess_options_initial", None)):
        if key is not None and key in _runs:
            return _runs[key]
    raise UsageError("this session was made without onnxfuse; use onnxfuse.InferenceSession or onnxfuse.register")


# --- which nodes are kernels -----------------------------------------------------------------------------------------


def _choice(
    model: onnx.ModelProto,
    calls: Sequence[Call],
    target: Target | NoTarget,
    prefer: Prefer | None,
    alike: str | None,
) -> tuple[list[str | None], list[Preference | None]]:
    """Per node None where a kernel runs it, else why not, and what `prefer` says.

    alike  None where nodes that call one function may differ; else a remark on why they may not
    """
    reasons = _reasons(calls, target)
    preferred = _preferred(model, calls, reasons, target, prefer, alike is None)
    bodies = {call.op: call.node.name for call, why in zip(calls, reasons, strict=True) if why}
    if alike is not None:
        for place, call in enumerate(calls):
            if reasons[place] is None and call.op in bodies:
                name = bodies[call.op]
                reasons[place] = f"node '{name}', which calls the same function, runs as its body{alike}"
    return reasons, preferred


def _reasons(calls: Sequence[Call], target: Target | NoTarget) -> list[str | None]:
    """Per node None where a kernel runs it, else why not.  Raises ModelError where its body cannot run either."""
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
    node = call.node
    module = kernel_module(node.fusion)
    if module is None:
        return f"fusion {node.fusion} has no kernel in this version of onnxfuse"
    if call.in_function:
        return "it stands inside a function"
    if "" in call.proto.output:
        return f"its output {list(call.proto.output).index('')} is left out"
    dtypes = tuple(dtype for dtype in call.dtypes if dtype is not None)
    if len(dtypes) < len(call.dtypes):
        place = call.dtypes.index(None)
        return f"the dtype of its operand {node.operands[place]} ('{call.proto.input[place]}') is not known"
    if not call.has_ranks:
        return f"it has no attribute output_ranks, and its outputs are not known to have {node.operands[0]}'s rank"
    try:
        why: str | None = module.supports(node, dtypes, target.device)
    except (KeyError, TypeError, ValueError) as error:
        return f"its attributes are not what kernel {node.fusion} expects: {type(error).__name__}: {error}"
    return why


def _preferred(
    model: onnx.ModelProto,
    calls: Sequence[Call],
    reasons: list[str | None],
    target: Target | NoTarget,
    prefer: Prefer | None,
    may_split: bool,
) -> list[Preference | None]:
    """What `prefer` says of each node, and in `reasons` that its body runs where that is preferred."""
    if isinstance(target, NoTarget) or prefer is None or not any(why is None for why in reasons):
        return [None] * len(calls)
    mode = GRAPH if target.cuda_graph else PLAIN
    found = list(prefer(model, calls, target.environment, mode, may_split))
    for place, (call, each) in enumerate(zip(calls, found, strict=True)):
        if each and not each.kernel and reasons[place] is None and call.has_body:
            reasons[place] = each.why
    return found


def _check_word(tune: str) -> None:
    if tune not in get_args(Tune):
        raise UsageError(f"tune={tune!r} is none of {', '.join(map(repr, get_args(Tune)))}")


def _tune_now(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    options: ort.SessionOptions | None,
    providers: Providers | None,
    provider_options: Sequence[Mapping[str, Any]] | None,
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Measure what was not measured yet."""
    from onnxfuse.provider.tune import tune_session  # which makes sessions itself

    target = find_target(options if options is not None else ort.SessionOptions(), providers, provider_options)
    if isinstance(target, Target) and target.optimization != verdicts.ALL_OPTIMIZATIONS:
        log.warning("the model is not tuned: these session options have %s", target.optimization)
    elif isinstance(target, Target):
        tune_session(model, options, target.provider, target.options, shapes)


def _has_kernel(op: str, calls: Sequence[Call], reasons: Sequence[str | None]) -> bool:
    return any(call.op == op and why is None for call, why in zip(calls, reasons, strict=True))


def _report(
    calls: Sequence[Call],
    reasons: Sequence[str | None],
    preferred: Sequence[Preference | None],
    target: Target | NoTarget,
) -> tuple[Run, ...]:
    """What `explain_session` says; logged per fusion."""
    where = f"{target.provider}, device {target.ordinal}" if isinstance(target, Target) else ""
    kernels = [f"{where}; {each.why}" if each else where for each in preferred]
    level = logging.WARNING if isinstance(target, NoTarget) and target.asked else logging.INFO
    runs = tuple(
        Run(call.node.name, call.node.fusion, "body" if why else "kernel", why or kernel)
        for call, why, kernel in zip(calls, reasons, kernels, strict=True)
    )
    for fusion, how, why in dict.fromkeys((run.fusion, run.how, run.why) for run in runs):
        count = sum((run.fusion, run.how, run.why) == (fusion, how, why) for run in runs)
        what = "kernels" if how == "kernel" else "their body"
        log.log(level, "%s: %d nodes run as %s (%s)", fusion, count, what, why)
    return runs
