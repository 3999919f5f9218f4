"""Where the kernels of a session run: the provider, the GPU and its settings, or why there is none."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnxruntime as ort
from onnx import TensorProto, helper

from onnxfuse.provider import native, planner, verdicts
from onnxfuse.provider.plan import Device
from onnxfuse.provider.planner import CUDA

Providers = Sequence[str | tuple[str, Mapping[str, Any]]]
_working: Final[set[tuple[str, int]]] = set()


@dataclass(frozen=True)
class Target:
    """The provider whose nodes can be kernels."""

    provider: str
    ordinal: int
    tf32: bool = True
    cuda_graph: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)  # of the provider
    optimization: str = verdicts.ALL_OPTIMIZATIONS  # of graphs by onnxruntime

    @property
    def device(self) -> Device:
        """The GPU as kernels see it."""
        return planner.device_of(self.provider, self.ordinal, self.tf32)

    @property
    def environment(self) -> verdicts.Environment:
        """What verdicts about this session's nodes hold for."""
        return verdicts.session_environment(self.provider, self.device, self.options, self.optimization)

    def settings(self, measure: bool) -> int:
        """What the native library repeats when it asks for plans; `measure`: candidates may be timed."""
        return native.TF32 * self.tf32 | native.MEASURE * measure


@dataclass(frozen=True)
class NoTarget:
    """No kernels, and why."""

    why: str
    asked: bool = True  # whether the session was meant to use the GPU


def find_target(
    options: ort.SessionOptions, providers: Providers | None, provider_options: Sequence[Mapping[str, Any]] | None
) -> Target | NoTarget:
    """What these options and providers of a session make of it."""
    if not providers and options.has_providers():
        return NoTarget("the providers were added to the session options; name them in `providers`")
    available = ort.get_available_providers()
    chosen = providers or available  # an empty list means all, too
    extra = provider_options or [{}] * len(chosen)
    for item, more in zip(chosen, extra, strict=False):
        name, given = (item, more) if isinstance(item, str) else item
        if name in planner.backends:
            if name not in available:
                return NoTarget(f"this onnxruntime has no {name}; install onnxruntime-gpu")
            flags = allows_tf32(given), _flag(given.get("enable_cuda_graph", False))
            level = options.graph_optimization_level.name
            target = Target(name, int(given.get("device_id", 0)), *flags, {**given, **more}, level)
            why = _unusable(target)
            return NoTarget(why) if why else target
    return NoTarget(f"the session does not use {CUDA}", asked=False)


def allows_tf32(options: Mapping[str, Any]) -> bool:
    """Whether a provider with these options rounds the operands of float32 matrix products to TF32."""
    return _flag(options.get("use_tf32", True))


def _flag(value: Any) -> bool:
    """A provider option that is yes or no, as onnxruntime reads its text."""
    return str(value) not in ("0", "false", "False")


def _unusable(target: Target) -> str | None:
    if why := planner.backends[target.provider].unavailable():
        return why
    try:
        native_library()
    except native.NativeError as error:
        return str(error)
    if not _works(target):
        return f"{target.provider} does not start; try onnxruntime.preload_dlls() first, and see its log"
    return None


def _works(target: Target) -> bool:
    """Whether the provider really starts: onnxruntime goes on without one whose libraries are missing."""
    if target.provider != CUDA or (target.provider, target.ordinal) in _working:
        return True
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", value[:1], value[1:])
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        providers = [(target.provider, {"device_id": target.ordinal} if target.ordinal else {})]
        session = ort.InferenceSession(probe.SerializeToString(), options, providers, enable_fallback=0)
    except Exception:  # onnxruntime's errors have no common class
        return False
    if target.provider in session.get_providers():
        _working.add((target.provider, target.ordinal))
    return (target.provider, target.ordinal) in _working


@functools.cache
def native_library() -> Any:
    """The native library, which asks the planner for plans.  Raises NativeError."""
    library = native.load()
    native.connect(library, planner.answer, planner.drop)
    return native.driver()
