"""Find the provider, the GPU and the settings for the kernels of a session, or the reason why there are none."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import onnxruntime as ort

from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.backends import BACKENDS, device_of
from onnxfuse.runtime.environment import (
    ALL_OPTIMIZATIONS,
    Environment,
    allows_tf32,
    is_on,
    session_environment,
)
from onnxfuse.runtime.plan import Aim, Device
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.provider_names import CPU, CUDA
from onnxfuse.runtime.start_provider import ProviderOptions, Providers, starts, with_options

# Which of a kernel's candidate plans runs: the first, the fastest one by earlier measurements ("known"), or the fastest
# one by measurements that are made now if there are no earlier ones ("measured").  "observed" is like "known", but runs
# are counted, so that plans can be measured between them.
PlanChoice = Literal["first", "known", "measured", "observed"]


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
    for name, given in with_options(providers or (CPU,), provider_options):
        if name in BACKENDS:
            if name not in available:
                return NoTarget(f"this onnxruntime has no {name}; install onnxruntime-gpu")
            flags = allows_tf32(given), is_on(given.get("enable_cuda_graph", False))
            level = options.graph_optimization_level.name
            ordinal = int(str(given.get("device_id", 0)))
            target = Target(name, ordinal, *flags, given, level, aim == "throughput")
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
    if target.provider == CUDA and not starts(target.ordinal):
        return f"{target.provider} does not start; try onnxruntime.preload_dlls() first, and see its log"
    return None


@functools.cache
def native_library() -> ctypes.CDLL:
    """Return the native library, connected to the planner.  Raises NativeError."""
    library = native.load()
    native.connect(library, planner.answer_request, planner.open_body, planner.forget_node)
    return native.driver()
