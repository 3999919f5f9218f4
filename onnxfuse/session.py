"""Sessions of onnxruntime in which fused nodes run as kernels, or as their bodies where no kernel fits or is faster."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, get_args

import onnx

from onnxfuse.errors import NO_ONNXRUNTIME, MissingPackageError, ModelError, UsageError
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.planner import planner

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingPackageError(f"{NO_ONNXRUNTIME} ({error})") from error

from onnxfuse.ir.load import read
from onnxfuse.runtime.body_runs import keep_bodies
from onnxfuse.runtime.custom_ops import register_operators, registered_operators
from onnxfuse.runtime.environment import ALL_OPTIMIZATIONS
from onnxfuse.runtime.external_data import configured_folder, external_data_folder, external_files, file_outside
from onnxfuse.runtime.fused_calls import Call, read_calls, read_model, split_functions
from onnxfuse.runtime.kernel_failures import Place, place_of, why_body
from onnxfuse.runtime.loaded_plans import use_plans
from onnxfuse.runtime.loaded_templates import GivenTemplate
from onnxfuse.runtime.plan import Aim
from onnxfuse.runtime.plan_file import PLANS_SUFFIX
from onnxfuse.runtime.prepare_session import given_for, preparation
from onnxfuse.runtime.support import make_alike, require_bodies, why_no_kernel, why_not_as_kernel
from onnxfuse.runtime.target import NoTarget, PlanChoice, ProviderOptions, Providers, Target, find_target
from onnxfuse.tuning import cache
from onnxfuse.tuning.autotune import MeasuredVerdicts
from onnxfuse.tuning.background import background
from onnxfuse.tuning.counted_session import CountedSession
from onnxfuse.tuning.dispatch import (
    CUDA_GRAPH,
    PLAIN,
    NodeDispatch,
    Prefer,
    Preference,
    TunePolicy,
    cached_preferences,
    explain_session,
    model_subject,
    record_dispatches,
)

__all__ = ["InferenceSession", "NodeDispatch", "explain_session", "open_session", "register"]

log: Final = logging.getLogger("onnxfuse")
NO_KERNELS: Final = "no node of the model runs as a kernel"
planner.verdicts = MeasuredVerdicts()  # the planner knows nothing of measurements


@dataclass(frozen=True)
class FoundPlans:
    """The plan file of a session."""

    path: Path
    is_named: bool  # by the argument `plans`; it is beside the model otherwise


def InferenceSession(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[ProviderOptions] | None = None,
    *,
    tune: TunePolicy = "cached",
    shapes: Mapping[str, Sequence[int]] | None = None,
    plans: str | os.PathLike[str] | None = None,
    aim: Aim = "latency",
    **arguments: object,
) -> ort.InferenceSession:
    """Open an ordinary onnxruntime session in which fused nodes run as kernels, where this GPU has kernels for them.

    tune    "cached": earlier measurements decide between kernel and body, and between the plans of a kernel; nodes
            without one run as kernels, by the plans that are expected to be the fastest.
            "now": nodes without one are measured first, at the sizes of the model's inputs.
            "background": as "cached"; while no run of such a session is in flight, a thread measures the plans of the
            kernels that run most, one node and shape after another, and later runs take the fastest. Their results
            may then differ by rounding. The thread ends with the last of these sessions. Nodes that run by a plan file
            keep its plans; nodes of a session with CUDA graphs do, too, and what was found counts in later sessions.
            "never": all nodes run as kernels, by the plans that are expected to be the fastest.
    shapes  for "now": the sizes of inputs with dynamic dims, as {"input_ids": (8, 512)}
    plans   a file that `onnxfuse compile` wrote, from which kernels are loaded instead of planned and compiled; by
            default model.onnx.plans beside model.onnx, if there is one. A file that does not fit (another GPU, another
            version, another aim) is not used, and a warning says why; if the model has changed, the nodes that the
            file lacks are planned. Later sessions of the process use it for equal nodes, too. It holds machine code:
            use only files that you trust.
    aim     "throughput": kernels are planned for several runs at once, as threads of a server make them. Products of
            matrices then leave more of the GPU to other runs (on Hopper GPUs), and a single run takes longer.
            Measurements do not count, because they are of kernels alone. A plan file is for sessions of one aim.

    A node whose kernel does not compile, now or at sizes that it meets later, runs its body there; a warning says so.

    Other arguments are those of onnxruntime.InferenceSession. Threads may share `sess_options` here, but not with
    onnxruntime.InferenceSession at the same time. If nodes run as kernels, `enable_fallback` is 0 unless it is given,
    and `set_providers` with other providers fails, because these have no kernels.

    Raises ModelError for a model with operators or attributes of onnxfuse that this version does not know, UsageError
    for "now" without a size of every dynamic dim, for plans that do not exist, and for "now" and "background" with
    "throughput".
    """
    _check_words(tune, aim)
    plan_file = _plan_file(path_or_bytes, plans)
    if tune == "now":
        _tune_now(path_or_bytes, sess_options, providers, provider_options, shapes or {})
    prefer, choice = _choices(tune)
    return open_session(
        path_or_bytes,
        sess_options,
        providers,
        provider_options,
        prefer=prefer,
        choice=choice,
        plan_file=plan_file,
        aim=aim,
        **arguments,
    )


def open_session(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[ProviderOptions] | None = None,
    *,
    prefer: Prefer | None,
    choice: PlanChoice,
    plan_file: FoundPlans | None = None,
    aim: Aim = "latency",
    **arguments: object,
) -> ort.InferenceSession:
    """Open a session like `InferenceSession`.

    prefer     which nodes run as kernels and which as bodies; None runs every node with a kernel as one
    choice     which candidate plans of a kernel run
    plan_file  a file with plans, which is used if it fits
    aim        that of `InferenceSession`
    """
    options = sess_options if sess_options is not None else ort.SessionOptions()
    path = None if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
    stamp = _stamp(path)
    source = path_or_bytes if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
    with ThreadPoolExecutor(1) as pool:  # the provider starts while the model is read
        found = pool.submit(find_target, options, providers, provider_options, aim)
        model = read_model(source)
        calls = read_calls(model)
    target, given = _find_plans(model, calls, found.result(), choice, plan_file)
    files = external_files(model) if path else set()
    outside = file_outside(path.parent, files) if path and not configured_folder(options) else None
    why_alike = f"; nodes cannot differ, as '{outside}' leads out of the model's folder" if outside else None
    reasons, preferred = _kernel_or_body(model, calls, given, target, prefer, why_alike)
    # What these options have registered before its kernel failed is called by another name.
    failed = registered_operators(options) if outside is None else frozenset()
    mixed = [
        call
        for call, why in zip(calls, reasons, strict=True)
        if why and (_has_kernel(call.op, calls, reasons) or (call.op in failed and _fails(target, call)))
    ]
    folder = path.parent if path and mixed and files else None
    if mixed:
        source = split_functions(model, mixed, read(source)).SerializeToString()
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    bodies = {call.op for call in calls} - {call.op for call in (*kernels, *mixed)}
    register_operators(options, target, kernels, bodies, choice)
    if kernels:
        arguments.setdefault("enable_fallback", 0)
    is_observed = choice == "observed" and isinstance(target, Target) and bool(kernels)
    make = partial(CountedSession, background.runs) if is_observed else ort.InferenceSession
    _keep_bodies(model, kernels, target)
    with preparation(kernels, target, choice), external_data_folder(folder, options, shared=sess_options is not None):
        session = make(source, options, providers, provider_options, **arguments)
    if _stamp(path) != stamp:
        raise ModelError(f"'{path}' was written to while it was loaded; make the session again")
    if outside is None and _any_fails(calls, reasons, given, target):
        del session  # in the next one, onnxruntime has the bodies of these nodes
        return open_session(
            path_or_bytes,
            sess_options,
            providers,
            provider_options,
            prefer=prefer,
            choice=choice,
            plan_file=plan_file,
            aim=aim,
            **arguments,
        )
    record_dispatches(session, _dispatches(calls, reasons, preferred, given, target), _places(calls, reasons, target))
    if isinstance(target, Target) and is_observed:
        background.add(session, target.provider)
    elif choice == "observed":
        log.warning(
            "tune='background' measures nothing: %s", target.why if isinstance(target, NoTarget) else NO_KERNELS
        )
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
    plans: str | os.PathLike[str] | None = None,
    aim: Aim = "latency",
) -> tuple[NodeDispatch, ...]:
    """Let a session that onnxruntime makes with these options, this model and these providers run kernels.

    `tune`, `shapes`, `plans` and `aim` are those of `InferenceSession`, but `tune` may not be "background", because
    nobody counts the runs of a session that onnxruntime makes. Because the model stays as it is, either all nodes
    that call one function run as kernels or none does. Give onnxruntime.InferenceSession enable_fallback=0, so that it
    shows why CUDA failed.

    Returns how each fused node will run.

    Raises what `InferenceSession` raises, and UsageError for "background".
    """
    _check_words(tune, aim)
    if tune == "background":
        raise UsageError("tune='background' needs a session that counts its runs; make it by onnxfuse.InferenceSession")
    plan_file = _plan_file(model, plans)
    if tune == "now":
        _tune_now(model, session_options, providers, provider_options, shapes or {})
    source = model if isinstance(model, bytes | onnx.ModelProto) else Path(model)
    proto = read_model(source)
    calls = read_calls(proto)
    prefer, choice = _choices(tune)
    target = find_target(session_options, providers, provider_options, aim)
    target, given = _find_plans(proto, calls, target, choice, plan_file)
    reasons, preferred = _kernel_or_body(proto, calls, given, target, prefer, "")
    kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    _keep_bodies(proto, kernels, target)
    with preparation(kernels, target, choice):
        pass
    if _any_fails(calls, reasons, given, target):
        reasons, preferred = _kernel_or_body(proto, calls, given, target, prefer, "")
        kernels = [call for call, why in zip(calls, reasons, strict=True) if why is None]
    bodies = {call.op for call in calls} - {call.op for call in kernels}
    register_operators(session_options, target, kernels, bodies, choice)
    dispatches = _dispatches(calls, reasons, preferred, given, target)
    record_dispatches(session_options, dispatches, _places(calls, reasons, target))
    return dispatches


# --- plan files -------------------------------------------------------------------------------------------------------


def _plan_file(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, plans: str | os.PathLike[str] | None
) -> FoundPlans | None:
    """Return the plan file of a session; None if there is none.  Raises UsageError if the one asked for is missing."""
    if plans is not None:
        if Path(plans).is_dir():
            raise UsageError(f"plans='{plans}' is a directory; name the file in it that `onnxfuse compile` wrote")
        if not Path(plans).is_file():
            raise UsageError(f"plans='{plans}': there is no such file; `onnxfuse compile` writes it")
        return FoundPlans(Path(plans), is_named=True)
    if isinstance(model, bytes | onnx.ModelProto):
        return None
    beside = Path(f"{os.fspath(model)}{PLANS_SUFFIX}")
    return FoundPlans(beside, is_named=False) if beside.is_file() else None


def _find_plans(
    model: onnx.ModelProto,
    calls: Sequence[Call],
    target: Target | NoTarget,
    choice: PlanChoice,
    plans: FoundPlans | None,
) -> tuple[Target | NoTarget, list[GivenTemplate | None]]:
    """Return for each node the template that a plan file has for it, and where the session runs kernels.

    Where nothing can be compiled, it runs those of plan files only, and none if these have none.
    """
    if isinstance(target, NoTarget) or not calls:
        if plans and plans.is_named:
            reason = target.why if isinstance(target, NoTarget) else "the model has no fused nodes"
            log.warning("plans are not used: %s: %s", plans.path, reason)
        return target, [None] * len(calls)
    file = use_plans(plans.path, target.provider, target.device) if plans and choice != "measured" else None
    given = [given_for(call, target, choice) for call in calls]
    if plans and file and not all(given):
        made_for = file.versions.get("model")
        if made_for not in (None, model_subject(model)["model"]):
            what = "made for another model, or the model has changed"
            absent = f"{given.count(None)} of {len(given)} fused nodes have no plans in it"
            log.warning("%s: %s: %s; make it again", plans.path, what, absent)
    why = None if all(given) else BACKENDS[target.provider].unavailable()
    return NoTarget(why) if why and not any(given) else target, given


# --- which nodes run as kernels --------------------------------------------------------------------------------------


def _kernel_or_body(
    model: onnx.ModelProto,
    calls: Sequence[Call],
    given: Sequence[GivenTemplate | None],
    target: Target | NoTarget,
    prefer: Prefer | None,
    why_alike: str | None,
) -> tuple[list[str | None], list[Preference | None]]:
    """Return for each node why it runs as its body, None if it runs as a kernel; and what `prefer` says of it.

    given      the templates that plan files have for the nodes
    why_alike  why nodes that call one function must run alike, as the end of a sentence; None if they need not
    """
    reasons = require_bodies(calls, _reasons(calls, given, target))
    preferred = _preferred(model, calls, reasons, target, prefer, why_alike is None)
    if why_alike is not None:
        make_alike(calls, reasons, why_alike)
    return reasons, preferred


def _reasons(
    calls: Sequence[Call], given: Sequence[GivenTemplate | None], target: Target | NoTarget
) -> list[str | None]:
    """Return for each node why no kernel can run it; None if one can."""
    if isinstance(target, NoTarget):
        return [target.why] * len(calls)
    device = target.device
    missing = None if all(given) else BACKENDS[target.provider].unavailable()
    if missing:
        log.warning("%d fused nodes are not in plan files, and run as their bodies: %s", given.count(None), missing)
    return [
        why_not_as_kernel(call) if template else missing or why_no_kernel(call, device) or why_body(call.node, device)
        for call, template in zip(calls, given, strict=True)
    ]


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


def _keep_bodies(model: onnx.ModelProto, kernels: Sequence[Call], target: Target | NoTarget) -> None:
    """Keep the bodies of nodes that run as kernels, for runs in which one fails."""
    if isinstance(target, Target):
        keep_bodies(model, [(call.node, call.proto) for call in kernels], target.device)


def _fails(target: Target | NoTarget, call: Call) -> bool:
    """Return whether all kernels of a node have failed."""
    return isinstance(target, Target) and why_body(call.node, target.device) is not None


def _any_fails(
    calls: Sequence[Call],
    reasons: Sequence[str | None],
    given: Sequence[GivenTemplate | None],
    target: Target | NoTarget,
) -> bool:
    """Return whether all kernels of a node that runs as one have failed; those of plan files are compiled."""
    rows = zip(calls, reasons, given, strict=True)
    return any(why is None and template is None and _fails(target, call) for call, why, template in rows)


def _places(calls: Sequence[Call], reasons: Sequence[str | None], target: Target | NoTarget) -> list[Place | None]:
    """Return by node where a failure of its kernels is noted; None if its body runs."""
    device = target.device if isinstance(target, Target) else None
    return [
        place_of(call.node, device) if device and why is None else None
        for call, why in zip(calls, reasons, strict=True)
    ]


def _choices(tune: TunePolicy) -> tuple[Prefer | None, PlanChoice]:
    """Return what decides between kernels and bodies, and between the plans of a kernel."""
    if tune == "never":
        return None, "first"
    prefer = None if cache.is_empty() else cached_preferences
    return prefer, "observed" if tune == "background" else "known"


def _check_words(tune: str, aim: str) -> None:
    """Raise UsageError unless `tune` and `aim` are words that sessions know, and go together."""
    for name, word, known in (("tune", tune, get_args(TunePolicy)), ("aim", aim, get_args(Aim))):
        if word not in known:
            raise UsageError(f"{name}={word!r} is none of {', '.join(map(repr, known))}")
    if aim == "throughput" and tune in ("now", "background"):
        raise UsageError(f"tune={tune!r} measures kernels alone, which says little of aim='throughput'; leave one out")


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
        from onnxfuse.tuning.tune import tune_session  # other sessions start without what only measuring needs

        tune_session(model, options, target.provider, target.options, shapes, open_session)


def _has_kernel(op: str, calls: Sequence[Call], reasons: Sequence[str | None]) -> bool:
    return any(call.op == op and why is None for call, why in zip(calls, reasons, strict=True))


def _dispatches(
    calls: Sequence[Call],
    reasons: Sequence[str | None],
    preferred: Sequence[Preference | None],
    given: Sequence[GivenTemplate | None],
    target: Target | NoTarget,
) -> tuple[NodeDispatch, ...]:
    """Return what `explain_session` says, and log it by fusion."""
    where = f"{target.provider}, device {target.ordinal}" if isinstance(target, Target) else ""
    files = [f"; plans of {each.path.name}" if each else "" for each in given]
    kernels = [
        f"{where}{file}; {each.why}" if each else where + file for each, file in zip(preferred, files, strict=True)
    ]
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
