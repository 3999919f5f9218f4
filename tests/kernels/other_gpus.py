"""GPUs that are not at hand: what hosts know of them when they plan, and nodes of every kind to plan for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attention_cases import Case
from kernel_hosts import host_of
from pdl_cases import ATTENTION, NODES, node_of

from onnxfuse.runtime.plan import Device, FusedNode, Launch, Plan, TensorSpec

# Compute capability, multiprocessors and shared memory of a block, as their data sheets and CUDA tell them.
OTHER_GPUS = (
    Device("T4", 75, 40, 65536),
    Device("A100", 80, 108, 166912),
    Device("L40S", 89, 142, 101376),
    Device("RTX 5090", 120, 170, 101376),
)
FIRST_ARCH = {"quantized_matmul": 80}  # fusions that older GPUs run as bodies
HOPPER_ONLY = {"attention_hopper", "gemm_hopper", "gemm_hopper_split", "gemm_hopper_tf32"}  # wgmma: sm_90a alone has it

Node = tuple[FusedNode, Sequence[TensorSpec]]


def nodes() -> Iterator[tuple[str, Node]]:
    """Yield a node for each way to run, by name, and its inputs."""
    yield from ((name, node_of(name, constants=True)) for name in NODES)
    for name, case in ATTENTION.items():
        specs = case.specs(case.inputs()) if isinstance(case, Case) else case.specs()
        yield name, (case.node(), specs)


def plans(node: Node, device: Device) -> list[Plan]:
    """Return every plan that a host offers for a node on a device: none if the device is too old for the fusion."""
    fused, inputs = node
    host = host_of(fused.fusion)
    why = host.supports(fused, [spec.dtype for spec in inputs], device)
    if device.arch < FIRST_ARCH.get(fused.fusion, 0):
        assert why and "compute capability" in why
        return []
    assert why is None, why
    return host.candidates(fused, inputs, device)


def sources(plan: Plan) -> set[str]:
    """Return the names of the .cu files that a plan launches."""
    return {step.kernel.source for step in plan.steps if isinstance(step, Launch)}
