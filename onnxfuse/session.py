"""onnxruntime sessions in which fused nodes run as kernels, or as bodies where no kernel is ready or bodies are faster.

The body of a fused node is the model-local ONNX function that it calls.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

import onnx

from onnxfuse.errors import NO_ONNXRUNTIME, KernelError, MissingPackageError, ModelError, UsageError
from onnxfuse.runtime.backends import BACKENDS
from onnxfuse.runtime.planner import planner

try:
    import onnxruntime as ort
except ImportError as error:
    raise MissingPackageError(f"{NO_ONNXRUNTIME} ({error})") from error

from onnxfuse.inference_session import InferenceSession
from onnxfuse.ir.plain_files import stamp_of
from onnxfuse.ir.protos import external_locations
from onnxfuse.ir.read import read
from onnxfuse.runtime.body_runs import keep_bodies
from onnxfuse.runtime.custom_ops import register_operators, registered_operators
from onnxfuse.runtime.environment import ALL_OPTIMIZATIONS, kernels_digest
from onnxfuse.runtime.external_data import configured_folder, external_data_folder, file_outside
from onnxfuse.runtime.fused_calls import Call, read_calls, read_model, split_functions
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.kernel_failures import Place, place_of, why_body
from onnxfuse.runtime.loaded_plans import use_plans
from onnxfuse.runtime.loaded_templates import GivenTemplate
from onnxfuse.runtime.plain_session import plain_session
from onnxfuse.runtime.plan import Aim
from onnxfuse.runtime.plan_file import PLANS_SUFFIX
from onnxfuse.runtime.prepare_session import given_for, preparation
from onnxfuse.runtime.start_provider import ProviderOptions, Providers, default_providers
from onnxfuse.runtime.support import make_alike, require_bodies, why_no_kernel, why_not_as_kernel
from onnxfuse.runtime.target import (
    NoTarget,
    PlanChoice,
    Target,
    find_target,
)
from onnxfuse.tuning import cache
from onnxfuse.tuning.autotune import MeasuredVerdicts
from onnxfuse.tuning.background import background
from onnxfuse.tuning.counted_session import count_runs
from onnxfuse.tuning.dispatch import (
    CUDA_GRAPH,
    PLAIN,
    FoundPlans,
    Mode,
    NodeDispatch,
    Prefer,
    Preference,
    SessionSettings,
    TunePolicy,
    cached_preferences,
    explain_session,
    model_subject,
    record_dispatches,
)

__all__ = ["InferenceSession", "NodeDispatch", "explain_session", "open_session", "register"]

log: Final = logging.getLogger("onnxfuse")
NO_KERNELS: Final = "no node of the model runs as a kernel"
WAIT: Final = "ONNXFUSE_WAIT"  # the environment variable that makes all sessions wait for the compiler if it is 1
planner.verdicts = MeasuredVerdicts()  # lets the planner, which reads no measurements itself, choose plans by them


def opened(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None,
    providers: Providers | None,
    provider_options: Sequence[ProviderOptions] | None,
    tune: TunePolicy,
    shapes: Mapping[str, Sequence[int]] | None,
    plans: str | os.PathLike[str] | None,
    aim: Aim,
    wait: bool,
    **arguments: object,
) -> ort.InferenceSession:
    """Open the session that `InferenceSession` returns, with its arguments."""
    settings = _settings(path_or_bytes, tune, plans, aim, wait)
    providers = providers or default_providers(sess_options)
    if tune == "now":
        _tune_now(path_or_bytes, sess_options, providers, provider_options, shapes or {})
    return open_session(path_or_bytes, sess_options, providers, provider_options, settings=settings, **arguments)


def open_session(
    path_or_bytes: str | os.PathLike[str] | bytes,
    sess_options: ort.SessionOptions | None = None,
    providers: Providers | None = None,
    provider_options: Sequence[ProviderOptions] | None = None,
    *,
    settings: SessionSettings,
    **arguments: object,
) -> ort.InferenceSession:
    """Open a session in which fused nodes run as `settings` says; the other arguments are those of `InferenceSession`.

    Raises ModelError if the model file changes while it is loaded.
    """
    options = sess_options if sess_options is not None else ort.SessionOptions()
    source = path_or_bytes if isinstance(path_or_bytes, bytes) else Path(path_or_bytes)
    path = source if isinstance(source, Path) else None
    stamp = stamp_of(path) if path else ()
    with ThreadPoolExecutor(1) as pool:  # start the CUDA provider while the model is read
        found = pool.submit(find_target, options, providers, provider_options, settings.aim)
        model = read_model(source)
        calls = read_calls(model)
        if not found.done():
            _read_kernels(calls, settings)
    nodes = _with_plans(model, calls, found.result(), settings)
    files = external_locations(model) if path else set()
    outside = file_outside(path.parent, files) if path and not configured_folder(options) else None
    nodes.choose(
        settings.prefer, f"; nodes cannot differ, as '{outside}' leads out of the model's folder" if outside else None
    )
    # These nodes must run as ONNX functions (for example, a node whose kernel failed), but the options register kernels
    # for the names of their functions.  So they will call copies of the functions with other names.
    mixed = nodes.mixed(registered_operators(options) if outside is None else frozenset())
    folder = path.parent if path and mixed and files else None
    whole = split_functions(model, mixed, read(source)).SerializeToString() if mixed else source
    kernels = nodes.kernels
    wait = nodes.waits(settings)
    nodes.register(options, settings.choice, wait, mixed)
    nodes.keep_bodies()
    if kernels:
        arguments.setdefault("enable_fallback", 0)
    is_observed = settings.choice == "observed" and isinstance(nodes.target, Target) and bool(kernels)
    with (
        preparation(kernels, nodes.target, settings.choice, wait) as prepared,
        external_data_folder(folder, options, shared=sess_options is not None),
    ):
        session = plain_session(whole, options, providers, provider_options, **arguments)
    if path and stamp_of(path) != stamp:
        prepared.close_bodies()
        raise ModelError(f"'{path}' was written to while it was loaded; make the session again")
    if outside is None and nodes.any_fails():
        del session  # the next session will run the ONNX functions of the failed nodes
        prepared.close_bodies()
        return open_session(path_or_bytes, sess_options, providers, provider_options, settings=settings, **arguments)
    prepared.compile_others(session)
    record_dispatches(session, nodes.dispatches(), nodes.places())
    if isinstance(nodes.target, Target) and is_observed:
        count_runs(session, background.runs)
        background.add(session, nodes.target.provider)
    elif settings.choice == "observed":
        why = nodes.target.why if isinstance(nodes.target, NoTarget) else NO_KERNELS
        log.warning("tune='background' measures nothing: %s", why)
    return session


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
    wait: bool = False,
) -> tuple[NodeDispatch, ...]:
    """Register kernels with session options, for sessions that onnxruntime opens with this model and these providers.

    `tune`, `shapes`, `plans`, `aim` and `wait` are as in `InferenceSession`. But `tune` must not be "background", which
    measures while no run is in flight, because runs of onnxruntime's own sessions are not counted. The model is not
    changed, so either all nodes that call one function run as kernels, or none of them. Give
    onnxruntime.InferenceSession enable_fallback=0, so that it shows why CUDA failed.

    Returns how each fused node will run.

    Raises the errors of `InferenceSession`, and UsageError for "background".
    """
    settings = _settings(model, tune, plans, aim, wait)
    if tune == "background":
        raise UsageError("tune='background' needs a session that counts its runs; make it by onnxfuse.InferenceSession")
    if tune == "now":
        _tune_now(model, session_options, providers, provider_options, shapes or {})
    proto = read_model(model if isinstance(model, bytes | onnx.ModelProto) else Path(model))
    calls = read_calls(proto)
    target = find_target(session_options, providers, provider_options, aim)
    nodes = _with_plans(proto, calls, target, settings)
    nodes.choose(settings.prefer, "")
    nodes.keep_bodies()
    waits = nodes.waits(settings)
    with preparation(nodes.kernels, nodes.target, settings.choice, waits) as prepared:
        pass
    prepared.compile_others()
    if nodes.any_fails():
        nodes.choose(settings.prefer, "")
    nodes.register(session_options, settings.choice, waits)
    dispatches = nodes.dispatches()
    record_dispatches(session_options, dispatches, nodes.places())
    return dispatches


def _read_kernels(calls: Sequence[Call], settings: SessionSettings) -> None:
    """Load what the session needs for kernels: their digest for a plan file, else their hosts and the compiler."""
    with suppress(KernelError):  # whoever needs a family that does not load raises the error again
        if settings.plan_file:
            kernels_digest()
            return
        for backend in BACKENDS.values() if calls else ():
            backend.unavailable()
        for fusion in {call.node.fusion for call in calls}:
            find_host(fusion)


# --- plan files -------------------------------------------------------------------------------------------------------


def _plan_file(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto, plans: str | os.PathLike[str] | None
) -> FoundPlans | None:
    """Return the plan file `plans`, or the one next to the model, if any.  Raises UsageError if `plans` is missing."""
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


def _with_plans(
    model: onnx.ModelProto, calls: Sequence[Call], target: Target | NoTarget, settings: SessionSettings
) -> _Nodes:
    """Return the fused nodes of a model, with their templates (plans for all sizes) from plan files.

    If this machine cannot compile kernels, only kernels from plan files are used.
    """
    plans, choice = settings.plan_file, settings.choice
    if isinstance(target, NoTarget) or not calls:
        if plans and plans.is_named:
            reason = target.why if isinstance(target, NoTarget) else "the model has no fused nodes"
            log.warning("plans are not used: %s: %s", plans.path, reason)
        return _Nodes(model, calls, target, [None] * len(calls))
    file = use_plans(plans.path, target.provider, target.device) if plans and choice != "measured" else None
    given = [given_for(call, target, choice) for call in calls]
    if plans and file and not all(given):
        made_for = file.versions.get("model")
        if made_for not in (None, model_subject(model)["model"]):
            what = "made for another model, or the model has changed"
            absent = f"{given.count(None)} of {len(given)} fused nodes have no plans in it"
            log.warning("%s: %s: %s; make it again", plans.path, what, absent)
    why = None if all(given) else BACKENDS[target.provider].unavailable()
    return _Nodes(model, calls, NoTarget(why) if why and not any(given) else target, given)


# --- which nodes run as kernels --------------------------------------------------------------------------------------


@dataclass
class _Nodes:
    """The fused nodes of a model, the target on which kernels run, and which nodes run as kernels."""

    model: onnx.ModelProto
    calls: Sequence[Call]
    target: Target | NoTarget
    given: Sequence[GivenTemplate | None]  # per node: its template (plans for all sizes) from a plan file, if any
    reasons: Sequence[str | None] = ()  # per node: why it runs as its ONNX function; None if a kernel runs it
    preferred: Sequence[Preference | None] = ()  # per node: the way that measurements prefer; None if not measured

    @property
    def kernels(self) -> list[Call]:
        """The nodes that run as kernels."""
        return [call for call, why in zip(self.calls, self.reasons, strict=True) if why is None]

    def choose(self, prefer: Prefer | None, why_alike: str | None) -> None:
        """Choose between kernel and body for each node.

        prefer     chooses by measurements; None if they are not used
        why_alike  the end of a sentence: why nodes that call the same function must all run as kernels or all as
                   bodies; None if they need not
        """
        reasons = require_bodies(self.calls, self._without_kernel())
        self.preferred = [None] * len(self.calls)
        if isinstance(self.target, Target) and prefer and None in reasons:
            mode: Mode = CUDA_GRAPH if self.target.cuda_graph else PLAIN
            self.preferred = prefer(self.model, self.calls, self.target.environment, mode, why_alike is None)
            for i, (call, each) in enumerate(zip(self.calls, self.preferred, strict=True)):
                if each and not each.kernel and reasons[i] is None and call.has_body:
                    reasons[i] = each.why
        if why_alike is not None:
            make_alike(self.calls, reasons, why_alike)
        self.reasons = reasons

    def _without_kernel(self) -> list[str | None]:
        """Return for each node why no kernel can run it; None if one can."""
        if isinstance(self.target, NoTarget):
            return [self.target.why] * len(self.calls)
        device = self.target.device
        missing = None if all(self.given) else BACKENDS[self.target.provider].unavailable()
        if missing:
            count = self.given.count(None)
            log.warning("%d fused nodes are not in plan files, and run as their bodies: %s", count, missing)
        return [
            why_not_as_kernel(each) if given else missing or why_no_kernel(each, device) or why_body(each.node, device)
            for each, given in zip(self.calls, self.given, strict=True)
        ]

    def mixed(self, registered: Collection[str]) -> list[Call]:
        """Return the nodes that must run as ONNX functions although a kernel is registered for their function's name.

        registered  operators that earlier sessions registered with the options; their kernels can have failed since
        """
        operators = {call.op for call in self.kernels}
        return [
            call
            for call, why in zip(self.calls, self.reasons, strict=True)
            if why and (call.op in operators or (call.op in registered and self._fails(call)))
        ]

    def waits(self, settings: SessionSettings) -> bool:
        """Return whether the session and its runs wait for the compiler."""
        keeps_first = isinstance(self.target, Target) and self.target.cuda_graph
        no_body = any(not call.has_body for call in self.kernels)
        return settings.wait or keeps_first or no_body or settings.choice == "measured"

    def register(self, options: ort.SessionOptions, choice: PlanChoice, wait: bool, mixed: Sequence[Call] = ()) -> None:
        """Register the operators of the nodes that run as kernels with session options."""
        bodies = {call.op for call in self.calls} - {call.op for call in (*self.kernels, *mixed)}
        flags = self.target.settings(choice, wait) if isinstance(self.target, Target) else 0
        register_operators(options, self.target, self.kernels, bodies, flags)

    def keep_bodies(self) -> None:
        """Keep the ONNX functions of nodes that run as kernels, as a fallback for runs in which a kernel fails."""
        if isinstance(self.target, Target):
            keep_bodies(self.model, [(call.node, call.proto) for call in self.kernels], self.target.device)

    def _fails(self, call: Call) -> bool:
        """Return whether all kernels of a node have failed."""
        return isinstance(self.target, Target) and why_body(call.node, self.target.device) is not None

    def any_fails(self) -> bool:
        """Return whether a node is set to run as a kernel although all its kernels failed to compile.

        Nodes from plan files are not checked, because their kernels are compiled already.
        """
        rows = zip(self.calls, self.reasons, self.given, strict=True)
        return any(why is None and given is None and self._fails(call) for call, why, given in rows)

    def places(self) -> list[Place | None]:
        """Return for each node the key under which failures of its kernels are recorded; None if its body runs."""
        device = self.target.device if isinstance(self.target, Target) else None
        rows = zip(self.calls, self.reasons, strict=True)
        return [place_of(call.node, device) if device and why is None else None for call, why in rows]

    def dispatches(self) -> tuple[NodeDispatch, ...]:
        """Return how each node runs and why, for `explain_session`; also log this by fusion."""
        target = self.target
        where = f"{target.provider}, device {target.ordinal}" if isinstance(target, Target) else ""
        rows = zip(self.calls, self.reasons, self.preferred, self.given, strict=True)
        dispatches = []
        for call, why, preference, given in rows:
            file, measured = (
                f"; plans of {given.path.name}" if given else "",
                f"; {preference.why}" if preference else "",
            )
            how: Literal["kernel", "body"] = "body" if why else "kernel"
            dispatches.append(NodeDispatch(call.node.name, call.node.fusion, how, why or f"{where}{file}{measured}"))
        level = logging.WARNING if isinstance(target, NoTarget) and target.asked else logging.INFO
        for (fusion, how, why), count in Counter((each.fusion, each.how, each.why) for each in dispatches).items():
            what = "kernels" if how == "kernel" else "bodies"
            log.log(level, "%s: %s run %d node%s (%s)", fusion, what, count, "s" * (count > 1), why)
        return tuple(dispatches)


def _settings(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    tune: TunePolicy,
    plans: str | os.PathLike[str] | None,
    aim: Aim,
    wait: bool,
) -> SessionSettings:
    """Return the settings for the arguments of a session.

    Raises UsageError for unknown or contradictory values, and for plans that do not exist.
    """
    for name, word, known in (("tune", tune, get_args(TunePolicy)), ("aim", aim, get_args(Aim))):
        if word not in known:
            raise UsageError(f"{name}={word!r} is none of {', '.join(map(repr, known))}")
    if aim == "throughput" and tune in ("now", "background"):
        raise UsageError(f"tune={tune!r} measures kernels alone, which says little of aim='throughput'; leave one out")
    file, wait = _plan_file(model, plans), wait or os.environ.get(WAIT) == "1"
    if tune == "never":
        return SessionSettings(None, "first", file, aim, wait)
    prefer = cached_preferences if tune == "now" or not cache.is_empty() else None
    return SessionSettings(prefer, "observed" if tune == "background" else "known", file, aim, wait)


def _tune_now(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    options: ort.SessionOptions | None,
    providers: Providers | None,
    provider_options: Sequence[ProviderOptions] | None,
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Measure a model at these input shapes, unless measurements at these shapes exist."""
    target = find_target(options if options is not None else ort.SessionOptions(), providers, provider_options)
    if isinstance(target, Target) and target.optimization != ALL_OPTIMIZATIONS:
        log.warning("the model is not tuned: these session options have %s", target.optimization)
    elif isinstance(target, Target):
        from onnxfuse.tuning.tune import tune_session  # imported here, because only measuring needs it

        tune_session(model, options, target.provider, target.options, shapes, open_session)
