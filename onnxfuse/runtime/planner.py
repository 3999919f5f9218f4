"""Make the plan that the native library asks for when a node meets new input shapes."""

from __future__ import annotations

import dataclasses
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from onnxfuse.errors import KernelError, ModelError
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.runtime import cupy_backend, run_plan
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.cupy_backend import LoadedKernel
from onnxfuse.runtime.hosts import find_host
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec
from onnxfuse.runtime.plan_bytes import plan_bytes
from onnxfuse.runtime.run_plan import ReadyPlan

CUDA: Final = "CUDAExecutionProvider"
RESERVED_ATTRIBUTES: Final = ("fusion", "operands", "output_types", "attributes")  # a host finds them in FusedNode
MAX_PLANS_PER_NODE: Final = 2 * native.MAX_RECENT_PLANS  # as many as the native library may hold


@dataclass(frozen=True)
class Backend:
    """How kernels are compiled and loaded for one of onnxruntime's execution providers."""

    unavailable: Callable[[], str | None]  # why kernels cannot run here; None if they can
    device: Callable[[int], Device]
    load: Callable[[Kernel, int], LoadedKernel]
    machine_code: Callable[[Kernel, Device], bytes]


@dataclass(frozen=True)
class PlannedNode:
    """A node with the plan for its inputs, and the kernels that the plan launches, in order."""

    node: FusedNode
    inputs: tuple[TensorSpec, ...]
    device: Device
    plan: Plan
    kernels: tuple[LoadedKernel, ...]


class ChoosePlan(Protocol):
    """Choose which of the plans that a host offers runs a node."""

    def __call__(
        self, plans: Sequence[Plan], node: FusedNode, inputs: Sequence[TensorSpec], device: Device, provider: str, /
    ) -> Plan:
        """Return one of the plans."""


# Find the plan that a plan file has for a node; None if it has none.
FindPlan = Callable[[FusedNode, tuple[TensorSpec, ...], Device], PlannedNode | None]

backends: Final[dict[str, Backend]] = {
    CUDA: Backend(cupy_backend.unavailable, cupy_backend.gpu, cupy_backend.load_kernel, cupy_backend.machine_code)
}
plan_files: Final[dict[str, FindPlan]] = {}  # by path; the file that was loaded last is asked first


@dataclass(frozen=True)
class NodePlans:
    """The plans of one node of a session."""

    plans: dict[tuple[TensorSpec, ...], PlannedNode] = field(default_factory=dict)  # the last MAX_PLANS_PER_NODE
    kernels: set[LoadedKernel] = field(default_factory=set)  # of all its plans: CUDA graphs may hold those of old ones


_plans_of_nodes: Final[dict[int, NodePlans]] = {}  # by the number that the native library gives a node of a session
# By signature, provider, device and whether measuring is allowed.
_shared_plans: weakref.WeakValueDictionary[tuple[str, str, int, bool], PlannedNode] = weakref.WeakValueDictionary()
# Held while a plan is made, so that equal nodes make it once. `forget_node` never takes it, because the garbage
# collector may call that function at any time.
_lock: Final = threading.RLock()


def first_plan(
    plans: Sequence[Plan], node: FusedNode, inputs: Sequence[TensorSpec], device: Device, provider: str
) -> Plan:
    """Choose the plan that the host expects to be fastest."""
    return plans[0]


_choose_plan: ChoosePlan = first_plan


def choose_plans_with(choose: ChoosePlan) -> None:
    """Let `choose` decide between plans from now on, in sessions that allow measurements."""
    global _choose_plan
    _choose_plan = choose


def fused_node(name: str, attributes: Mapping[str, Any]) -> FusedNode:
    """Return a node as its host sees it.  Raises ModelError if an attribute is missing or of the wrong type."""
    required = (("fusion", str, "a string"), ("operands", str, "a string"), ("output_types", list, "ints"))
    for attribute, kind, what in required:
        if not isinstance(attributes.get(attribute), kind):
            found = repr(attributes[attribute]) if attribute in attributes else "nothing"
            raise ModelError(f"fused node '{name}': attribute {attribute} must be {what}, found {found}")
    named = str(attributes.get("attributes", "")).split()  # files of older versions do not have this attribute
    if missing := [attribute for attribute in named if attribute not in attributes]:
        raise ModelError(
            f"fused node '{name}': attribute {missing[0]} is missing; register the model that runs with its session "
            "options, or optimize it again if the file was changed"
        )
    return FusedNode(
        attributes["fusion"],
        name,
        tuple(attributes["operands"].split()),
        {key: value for key, value in sorted(attributes.items()) if key not in RESERVED_ATTRIBUTES},
        tuple(dtype_name(number) for number in attributes["output_types"]),
    )


def answer_request(request: native.Request) -> bytes:
    """Return the bytes of the plan that the native library asks for.

    What this raises becomes an onnxruntime error of the node.
    """
    with _lock:
        of_node = _plans_of_nodes.setdefault(request.kernel, NodePlans())
        planned = of_node.plans.get(request.inputs)
        if planned is None:
            node = fused_node(request.node, request.attributes)
            device = device_of(request.provider, request.device, request.tf32)
            planned = _plan_of_files(node, request, device) or _shared_plan(node, request, device)
            if len(of_node.plans) >= MAX_PLANS_PER_NODE:
                del of_node.plans[next(iter(of_node.plans))]
            of_node.plans[request.inputs] = planned
            of_node.kernels.update(planned.kernels)
        run_plan.open_libraries(planned.plan)
        return plan_bytes(planned.plan, [kernel.handle for kernel in planned.kernels])


def add_plan_file(path: str, find: FindPlan) -> None:
    """Ask a plan file before all others from now on; what the same path held earlier is forgotten."""
    with _lock:
        plan_files.pop(path, None)
        plan_files[path] = find


def forget_node(kernel: int) -> None:
    """Forget the plans of a node whose session is gone."""
    _plans_of_nodes.pop(kernel, None)


def plans_in_use() -> list[PlannedNode]:
    """Return the plans that sessions hold, of each node the last MAX_PLANS_PER_NODE."""
    return [planned for of_node in list(_plans_of_nodes.values()) for planned in list(of_node.plans.values())]


def device_of(provider: str, ordinal: int, tf32: bool) -> Device:
    """Return a GPU with a session's setting of TF32."""
    return dataclasses.replace(backends[provider].device(ordinal), tf32=tf32, ordinal=ordinal)


def ready_plan(plan: Plan, inputs: Sequence[TensorSpec], ordinal: int = 0, provider: str = CUDA) -> ReadyPlan:
    """Load a plan's kernels, so that it can run without onnxruntime.  Raises KernelError, NativeError."""
    return ReadyPlan(plan, _load_kernels(plan, provider, ordinal), inputs, ordinal)


def _plan_of_files(node: FusedNode, request: native.Request, device: Device) -> PlannedNode | None:
    for find in reversed(plan_files.values()):
        if planned := find(node, request.inputs, device):
            return planned
    return None


def _shared_plan(node: FusedNode, request: native.Request, device: Device) -> PlannedNode:
    """Return the plan of an equal node that a session holds, such as the same layer of a model, or else a new plan.

    A growing cache brings new shapes at every step, and planning takes 1.2 ms for each layer without sharing.
    """
    key = (signature(node, request.inputs, device), request.provider, request.device, request.measure)
    planned = _shared_plans.get(key)
    if planned is None:
        planned = _shared_plans[key] = _new_plan(node, request, device)
    return planned


def _new_plan(node: FusedNode, request: native.Request, device: Device) -> PlannedNode:
    host = find_host(node.fusion)
    if host is None:
        raise KernelError(f"fusion {node.fusion} has no kernel")
    if why := host.supports(node, tuple(spec.dtype for spec in request.inputs), device):
        raise KernelError(f"{why}; register the model that runs with its session options")
    plans = host.candidates(node, request.inputs, device)
    plan = plans[0]
    if all(0 in output.shape for output in plan.outputs):
        plan = dataclasses.replace(plan, steps=())
    elif request.measure and len(plans) > 1:
        plan = _choose_plan(plans, node, request.inputs, device, request.provider)
    return PlannedNode(node, request.inputs, device, plan, _load_kernels(plan, request.provider, request.device))


def _load_kernels(plan: Plan, provider: str, ordinal: int) -> tuple[LoadedKernel, ...]:
    load, launches = backends[provider].load, (step for step in plan.steps if isinstance(step, Launch))
    return tuple(allow_launch(load(step.kernel, ordinal), step, ordinal) for step in launches)


def allow_launch(kernel: LoadedKernel, step: Launch, ordinal: int) -> LoadedKernel:
    """Allow a kernel the shared memory and the cluster size of a launch, and return it.  Raises NativeError."""
    shared, cluster = max(step.shared, kernel.max_shared), max(step.cluster, kernel.max_cluster)
    if (shared, cluster) != (kernel.max_shared, kernel.max_cluster):
        native.check(native.driver().onnxfuse_configure(ordinal, kernel.handle, shared, int(cluster > 8)))
        kernel.max_shared, kernel.max_cluster = shared, cluster
    return kernel


def signature(node: FusedNode, inputs: tuple[TensorSpec, ...], device: Device) -> str:
    """Return a text that is equal for nodes, inputs and settings that can share a plan on GPUs of one kind."""
    tensors = [(spec.dtype, spec.shape, spec.aligned, spec.constant) for spec in inputs]
    return json.dumps(
        [node.fusion, node.operands, dict(node.attributes), node.output_dtypes, tensors, device.tf32], sort_keys=True
    )
