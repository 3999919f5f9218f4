"""Find the provider, the GPU and the settings for the kernels of a session, or the reason why there are none."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import onnxruntime as ort
from onnx import TensorProto, helper

from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS, CPU, CUDA, device_of
from onnxfuse.runtime.environment import (
    ALL_OPTIMIZATIONS,
    Environment,
    allows_tf32,
    is_on,
    session_environment,
)
from onnxfuse.runtime.plain_session import plain_session
from onnxfuse.runtime.plan import Aim, Device
from onnxfuse.runtime.planner import planner

ProviderOptions = Mapping[str, object]
# Which of a kernel's candidate plans runs: the first, the fastest one by earlier measurements ("known"), or the fastest
# one by measurements that are made now if there are no earlier ones ("measured").  "observed" is like "known", but runs
# are counted, so that plans can be measured between them.
PlanChoice = Literal["first", "known", "measured", "observed"]
Providers = Sequence[str | tuple[str, ProviderOptions]]
_working_providers: Final[set[tuple[str, int]]] = set()


@dataclass(frozen=True)
class Target:
    """The provider and the GPU that run a session's kernels, and the session's settings."""

    provider: str
    ordinal: int
    tf32: bool = True
    cuda_graph: bool = False
    options: ProviderOptions = field(default_factory=dict, compare=False)  # options of the provider
    optimization: str = ALL_OPTIMIZATIONS  # onnxruntime's level of graph optimization
    shared: bool = False  # other runs use the GPU at the same time: the session's aim is throughput

    @property
    def device(self) -> Device:
        """Return the GPU with the session's settings."""
        return device_of(self.provider, self.ordinal, self.tf32, self.shared)

    @property
    def environment(self) -> Environment:
        """Return the environment that measurements of this session's nodes depend on."""
        return session_environment(self.provider, self.device, self.options, self.optimization)

    def settings(self, choice: PlanChoice, wait: bool) -> int:
        """Return the session's flags, which the native library passes back to Python in each request for a template."""
        measure, observe = choice == "measured", choice == "observed"
        return (
            native.TF32 * self.tf32
            | native.SHARED * self.shared
            | native.VERDICTS * (choice != "first")
            | native.MEASURE * measure
            | native.COUNT_RUNS * observe
            | native.CUDA_GRAPH * (observe and self.cuda_graph)
            | native.WAIT * wait
        )


@dataclass(frozen=True)
class NoTarget:
    """The reason `why` a session runs no kernels."""

    why: str
    asked: bool = True  # whether the session asked for a provider with kernels


def default_providers(options: ort.SessionOptions | None) -> Providers | None:
    """Return the providers of a session for which none are named; None to leave them to the options or onnxruntime."""
    given = options is not None and options.has_providers()
    return [CUDA, CPU] if CUDA in ort.get_available_providers() and not given else None


def find_target(
    options: ort.SessionOptions,
    providers: Providers | None,
    provider_options: Sequence[ProviderOptions] | None,
    aim: Aim = "latency",
) -> Target | NoTarget:
    """Return where a session with these options and providers runs kernels, or why it runs none.

    The function does not check whether kernels can be compiled there, because kernels of plan files need no compiler.
    """
    if not providers and options.has_providers():
        return NoTarget("the providers were added to the session options; name them in `providers`")
    available = ort.get_available_providers()
    if not providers and CUDA in available:
        return NoTarget(f"onnxruntime uses the CPU alone where no providers are named; name {CUDA} in `providers`")
    chosen = providers or (CPU,)
    extra = provider_options or [{}] * len(chosen)
    for item, more in zip(chosen, extra, strict=False):
        name, given = (item, more) if isinstance(item, str) else item
        if name in BACKENDS:
            if name not in available:
                return NoTarget(f"this onnxruntime has no {name}; install onnxruntime-gpu")
            flags = allows_tf32(given), is_on(given.get("enable_cuda_graph", False))
            level = options.graph_optimization_level.name
            target = Target(
                name, int(str(given.get("device_id", 0))), *flags, {**given, **more}, level, aim == "throughput"
            )
            why = _unusable(target)
            return NoTarget(why) if why else target
    return NoTarget(f"the session does not use {CUDA}", asked=False)


def _unusable(target: Target) -> str | None:
    if why := BACKENDS[target.provider].no_gpu():
        return why
    try:
        native_library()
    except native.NativeError as error:
        return str(error)
    if not _works(target):
        return f"{target.provider} does not start; try onnxruntime.preload_dlls() first, and see its log"
    return None


def _works(target: Target) -> bool:
    """Return whether the provider starts; onnxruntime makes a session without it if its libraries are missing."""
    if target.provider != CUDA or (target.provider, target.ordinal) in _working_providers:
        return True
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", value[:1], value[1:])
    probe = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # starting a thread for each processor takes longer than all else in this session
    try:
        providers = [(target.provider, {"device_id": target.ordinal} if target.ordinal else {})]
        session = plain_session(probe.SerializeToString(), options, providers, enable_fallback=0)
    except Exception:  # onnxruntime's errors have no common class
        return False
    if target.provider in session.get_providers():
        _working_providers.add((target.provider, target.ordinal))
    return (target.provider, target.ordinal) in _working_providers


@functools.cache
def native_library() -> ctypes.CDLL:
    """Return the native library, connected to the planner.  Raises NativeError."""
    library = native.load()
    native.connect(library, planner.answer_request, planner.run_body, planner.forget_node)
    return native.driver()
