"""Plans on demand: what the native library asks when a node meets new shapes."""

from __future__ import annotations

import dataclasses
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from onnxfuse.errors import ModelError
from onnxfuse.provider import choose, direct, native, verdicts
from onnxfuse.provider import compile as gpu_compile
from onnxfuse.provider.compile import Function
from onnxfuse.provider.direct import ReadyPlan
from onnxfuse.provider.dtypes import dtype_name
from onnxfuse.provider.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec
from onnxfuse.provider.source import KernelError, kernel_module
from onnxfuse.provider.trial import GpuTrial
from onnxfuse.provider.wire import plan_bytes

CUDA: Final = "CUDAExecutionProvider"
RESERVED: Final = ("fusion", "operands", "output_types", "attributes")


@dataclass(frozen=True)
class Backend:
    """How kernels come to run under one of onnxruntime's providers."""

    unavailable: Callable[[], str | None]
    device: Callable[[int], Device]
    compile: Callable[[Kernel, int], Function]
    cubin: Callable[[Kernel, Device], bytes]
    trial: choose.MakeTrial | None = None  # how candidates are timed; they are not without it


@dataclass(frozen=True)
class Planned:
    """A plan, with the functions that its launches call, in order."""

    node: FusedNode
    inputs: tuple[TensorSpec, ...]
    device: Device
    plan: Plan
    functions: tuple[Function, ...]


Stored = Callable[[FusedNode, tuple[TensorSpec, ...], Device], Planned | None]

backends: Final[dict[str, Backend]] = {
    CUDA: Backend(
        gpu_compile.unavailable,
        gpu_compile.gpu,
        gpu_compile.compile_kernel,
        gpu_compile.cubin,
        lambda *arguments: _gpu_trial(*arguments),
    )
}
stored: Final[dict[str, Stored]] = {}  # plans of files, by path; the file that was loaded last is asked first
MOST_PLANS: Final = 2 * native.MANY_PLANS  # of a node: what the native library may hold


@dataclass(frozen=True)
class Living:
    """What a node of a session has been planned for."""

    plans: dict[tuple[TensorSpec, ...], Planned] = field(default_factory=dict)  # the last MOST_PLANS, in order
    functions: set[Function] = field(default_factory=set)  # of all its plans: CUDA graphs may hold older ones


_live: Final[dict[int, Living]] = {}
_equal: Final[weakref.WeakValueDictionary[tuple[Any, ...], Planned]] = weakref.WeakValueDictionary()
_lock: Final = threading.RLock()  # one plan at a time; never taken by `drop`, which the garbage collector may call


def fused_node(name: str, attributes: Mapping[str, Any]) -> FusedNode:
    """A node as its kernel sees it.  Raises ModelError where an attribute is missing or of the wrong kind."""
    required = (("fusion", str, "a string"), ("operands", str, "a string"), ("output_types", list, "ints"))
    for attribute, kind, what in required:
        if not isinstance(attributes.get(attribute), kind):
            found = repr(attributes[attribute]) if attribute in attributes else "nothing"
            raise ModelError(f"fused node '{name}': attribute {attribute} must be {what}, found {found}")
    named = str(attributes.get("attributes", "")).split()  # older files do not say
    if missing := [attribute for attribute in named if attribute not in attributes]:
        raise ModelError(
            f"fused node '{name}': attribute {missing[0]} is missing; register the model that runs with its session "
            "options, or optimize it again if the file was changed"
        )
    return FusedNode(
        attributes["fusion"],
        name,
        tuple(attributes["operands"].split()),
        {key: value for key, value in sorted(attributes.items()) if key not in RESERVED},
        tuple(dtype_name(number) for number in attributes["output_types"]),
    )


def answer(request: native.Request) -> bytes:
    """The plan for a request, as the native library reads it.  What it raises becomes an onnxruntime error."""
    with _lock:
        own = _live.setdefault(request.kernel, Living())
        planned = own.plans.get(request.inputs)
        if planned is None:
            node = fused_node(request.node, request.attributes)
            device = device_of(request.provider, request.device, request.tf32)
            planned = _stored(node, request, device) or _shared(node, request, device)
            if len(own.plans) >= MOST_PLANS:
                del own.plans[next(iter(own.plans))]
            own.plans[request.inputs] = planned
            own.functions.update(planned.functions)
        direct.open_libraries(planned.plan)
        return plan_bytes(planned.plan, [function.handle for function in planned.functions])


def store(path: str, find: Stored) -> None:
    """Ask a file's plans before those of all other files, and in place of what the same file held earlier."""
    with _lock:
        stored.pop(path, None)
        stored[path] = find


def drop(kernel: int) -> None:
    """Forget the plans of a node whose session is gone."""
    _live.pop(kernel, None)


def living() -> list[Planned]:
    """Every plan that a session holds; of a node the last MOST_PLANS."""
    return [planned for each in list(_live.values()) for planned in list(each.plans.values())]


def device_of(provider: str, ordinal: int, tf32: bool) -> Device:
    """A GPU as kernels see it in a session that allows TF32 or does not."""
    return dataclasses.replace(backends[provider].device(ordinal), tf32=tf32, ordinal=ordinal)


def ready(plan: Plan, inputs: Sequence[TensorSpec], ordinal: int = 0, provider: str = CUDA) -> ReadyPlan:
    """A plan that can run without onnxruntime, compiled.  Raises KernelError, NativeError."""
    return ReadyPlan(plan, _functions(plan, provider, ordinal), inputs, ordinal)


def _stored(node: FusedNode, request: native.Request, device: Device) -> Planned | None:
    return next((found for ask in reversed(stored.values()) if (found := ask(node, request.inputs, device))), None)


def _shared(node: FusedNode, request: native.Request, device: Device) -> Planned:
    """The plan of an equal node that a session holds, as of the layers of a model, else a new one.

    A growing cache brings new shapes at every step: 1.2 ms of planning for each layer, were it not for this.
    """
    key = (signature(node, request.inputs, device), request.provider, request.device, request.measure)
    planned = _equal.get(key)
    if planned is None:
        planned = _equal[key] = _planned(node, request, device)
    return planned


def _planned(node: FusedNode, request: native.Request, device: Device) -> Planned:
    module = kernel_module(node.fusion)
    if module is None:
        raise KernelError(f"fusion {node.fusion} has no kernel")
    if why := module.supports(node, tuple(spec.dtype for spec in request.inputs), device):
        raise KernelError(f"{why}; register the model that runs with its session options")
    plans = choose.candidates(module, node, request.inputs, device)
    plan = plans[0]
    if all(0 in output.shape for output in plan.outputs):
        plan = dataclasses.replace(plan, steps=())
    elif request.measure and len(plans) > 1:
        plan = _fastest(plans, node, request, device)
    return Planned(node, request.inputs, device, plan, _functions(plan, request.provider, request.device))


def _fastest(plans: Sequence[Plan], node: FusedNode, request: native.Request, device: Device) -> Plan:
    texts = signature(node, (), device), signature(node, request.inputs, device)
    environment = verdicts.environment(request.provider, device)
    inputs = as_placed(node, request.inputs)
    return choose.choose(plans, inputs, device, backends[request.provider].trial, environment, *texts)


def as_placed(node: FusedNode, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The inputs as a trial places them: of a cache each layer has its own, too, which it finds in memory."""
    pairs = zip(node.operands, inputs, strict=True)
    return [dataclasses.replace(spec, constant=spec.constant or name.startswith("past_")) for name, spec in pairs]


def _gpu_trial(inputs: Sequence[TensorSpec], plans: Sequence[Plan], device: Device) -> choose.Trial:
    return GpuTrial(inputs, plans, device, lambda plan: ready(plan, inputs, device.ordinal))


def _functions(plan: Plan, provider: str, ordinal: int) -> tuple[Function, ...]:
    compiled, launches = backends[provider].compile, (step for step in plan.steps if isinstance(step, Launch))
    return tuple(configured(compiled(step.kernel, ordinal), step, ordinal) for step in launches)


def configured(function: Function, step: Launch, ordinal: int) -> Function:
    """The function, allowed to use the shared memory and the cluster size of the step."""
    wanted = (max(step.shared, function.configured[0]), max(step.cluster, function.configured[1]))
    if wanted != function.configured:
        library = native.driver()
        native.check(library.onnxfuse_configure(ordinal, function.handle, wanted[0], int(wanted[1] > 8)))
        function.configured = wanted
    return function


def signature(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> str:
    """A text that is equal for nodes, shapes and settings that share a plan, on GPUs of one kind."""
    tensors = [(spec.dtype, spec.shape, spec.aligned, spec.constant) for spec in inputs]
    what = [node.fusion, node.operands, dict(node.attributes), node.output_dtypes, tensors, device.tf32]
    return json.dumps(what, sort_keys=True)
