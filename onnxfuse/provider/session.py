"""Sessions in which fused nodes run as kernels, where there are kernels, and as their bodies elsewhere."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import onnx
import onnxruntime as ort

from onnxfuse.errors import ModelError, OnnxfuseError, UsageError
from onnxfuse.provider import native, verdicts
from onnxfuse.provider.external_data import found_in, has_external_data
from onnxfuse.provider.model import Call, attribute_kinds, read_calls, read_model, split
from onnxfuse.provider.preferences import GRAPH, PLAIN, Preference, Tune, preferences
from onnxfuse.provider.source import kernel_module
from onnxfuse.provider.target import NoTarget, Providers, Target, find_target, native_library

log: Final = logging.getLogger("onnxfuse")
Prefer = Callable[[onnx.ModelProto, Sequence[Call], verdicts.Environment, str], Sequence[Preference | None]]


@dataclass(frozen=True)
class Run:
    """How a fused node runs in a session, and why."""

    node: str
    fusion: str
    how: Literal["kernel", "body"]
    why: str


_runs: weakref.WeakKeyDictionary[Any, tuple[Run, ...]] = weakref.WeakKeyDictionary()
_registered: weakref.WeakKeyDictionary[Any, tuple[frozenset[str], int]] = weakref.WeakKeyDictionary()
_lock: Final = threading.Lock()


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
    source = path_or_bytes if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
    model = read_model(source)
    calls = read_calls(model)
    target = find_target(options, providers, provider_options)
    reasons = _reasons(calls, target)
    preferred = _preferred(model, calls, reasons, target, prefer)
    mixed = [call for call, why in zip(calls, reasons, strict=True) if why and _has_kernel(call.op, calls, reasons)]
    folder = source.parent if mixed and isinstance(source, Path) and has_external_data(model) else None
    if mixed:
        source = split(model, mixed).SerializeToString()
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    _register(options, target, kernels, {call.op for call in calls} - {call.op for call in kernels}, measure)
    with found_in(folder, options, shared=sess_options is not None):
        session = ort.InferenceSession(source, options, providers, provider_options, **arguments)
    _runs[session] = _report(calls, reasons, preferred, target)
    return session


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
    kernels or none does.
    """
    _check_word(tune)
    if tune == "now":
        _tune_now(model, session_options, providers, provider_options, shapes or {})
    source = model if isinstance(model, bytes | onnx.ModelProto) else Path(model)
    proto = read_model(source)
    calls = read_calls(proto)
    target = find_target(session_options, providers, provider_options)
    reasons = _reasons(calls, target)
    preferred = _preferred(proto, calls, reasons, target, None if tune == "never" else preferences)
    for i, call in enumerate(calls):
        other = next((c for c, why in zip(calls, reasons, strict=True) if c.op == call.op and why), None)
        if reasons[i] is None and other is not None:
            reasons[i] = f"node '{other.node.name}', which calls the same function, runs as its body"
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    bodies = {call.op for call in calls} - {call.op for call in kernels}
    _register(session_options, target, kernels, bodies, tune != "never")
    _runs[session_options] = runs = _report(calls, reasons, preferred, target)
    return runs


def explain_session(session: ort.InferenceSession) -> tuple[Run, ...]:
    """How each fused node of a session runs; for sessions made by `InferenceSession`, or after `register`."""
    for key in (session, session.get_session_options(), getattr(session, "_sess_options_initial", None)):
        if key is not None and key in _runs:
            return _runs[key]
    raise UsageError("this session was made without onnxfuse; use onnxfuse.InferenceSession or onnxfuse.register")


# --- which nodes are kernels -----------------------------------------------------------------------------------------


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
) -> list[Preference | None]:
    """What `prefer` says of each node, and in `reasons` that its body runs where that is preferred."""
    if isinstance(target, NoTarget) or prefer is None or not any(why is None for why in reasons):
        return [None] * len(calls)
    mode = GRAPH if target.cuda_graph else PLAIN
    found = list(prefer(model, calls, target.environment, mode))
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


def _register(
    options: ort.SessionOptions, target: Target | NoTarget, calls: Sequence[Call], bodies: set[str], measure: bool
) -> None:
    """Register the functions that these nodes call as operators of the target's provider."""
    ops = {call.op: [c for c in calls if c.op == call.op] for call in calls}
    done = _registered.get(options)
    if done is not None:
        _refuse_clash(done, target, ops, bodies, measure)
    if isinstance(target, NoTarget) or not ops:
        return
    lines = [f"{op} {attribute_kinds(same)}" for op, same in sorted(ops.items())]
    settings = target.settings(measure)
    library = native_library()
    with _lock:
        library.onnxfuse_prepare(target.provider.encode(), "\n".join(lines).encode(), settings)
        if done is not None:
            return
        try:
            options.register_custom_ops_library(str(Path(library._name).resolve()))
        except Exception as error:  # onnxruntime's errors have no common class
            raise OnnxfuseError(f"onnxruntime does not accept the operators of onnxfuse: {error}") from error
    _registered[options] = frozenset(ops), settings


def _refuse_clash(
    done: tuple[frozenset[str], int], target: Target | NoTarget, ops: Collection[str], bodies: set[str], measure: bool
) -> None:
    """Raise UsageError where session options that have operators already cannot serve this model too."""
    here, settings = done
    if clash := sorted(here & bodies) or sorted(set(ops) - here):
        what = "as a kernel, but here its body" if clash[0] in here else "not as a kernel, but here its kernel"
        raise UsageError(
            f"another model was registered with these session options; they run {clash[0]} {what} must run; "
            "make new SessionOptions for each model"
        )
    if isinstance(target, NoTarget) or not ops:
        return
    now = target.settings(measure)
    for flag, name in (native.TF32, "use_tf32"), (native.MEASURE, "tune other than 'never'"):
        if (settings ^ now) & flag:
            raise UsageError(
                f"another model was registered with these session options and {name} = {int(bool(settings & flag))}, "
                f"here it is {int(bool(now & flag))}; make new SessionOptions for each setting"
            )


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
