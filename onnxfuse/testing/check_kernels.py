"""Compare the kernels of a model's fused nodes with the nodes' bodies, without a GPU."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from onnxfuse.errors import KernelError, UsageError
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.extract import extract
from onnxfuse.ir.load import load
from onnxfuse.runtime.fused_calls import Call, read_calls
from onnxfuse.runtime.gpu_kinds import named_gpus
from onnxfuse.runtime.hosts import find_host, numbers_of
from onnxfuse.runtime.kernel_folders import OWN, kernel_folders
from onnxfuse.runtime.plan import Device, Launch, TensorSpec
from onnxfuse.testing.emulated_launches import emulate
from onnxfuse.verify.cpu_session import open_session, run
from onnxfuse.verify.difference import compare_output


@dataclass(frozen=True)
class KernelCheck:
    """A fused node whose kernels equal its body on a CPU; `error` is the largest, relative to the largest value."""

    node: str
    fusion: str
    plans: int  # the host's candidates, which all ran
    error: float


def check_kernels(
    model: str | os.PathLike[str] | onnx.ModelProto,
    feeds: Mapping[str, Array],
    fusions: Collection[str] = (),
    arch: str = "sm_90",
) -> list[KernelCheck]:
    """Run the kernels of a fused model's nodes on the CPU, at their inputs in a run, and compare them with the bodies.

    Sources in CUDA are compiled as C++ (which needs g++ or clang++), with emulated blocks, shared memory, barriers and
    shuffles. `@triton.jit` functions run in Triton's interpreter, which needs TRITON_INTERPRET=1 before Triton is
    imported. Every plan that a host offers runs. Float outputs are NaN before a plan runs, and memory around outputs
    must not change. Fast arithmetic, races and instructions of tensor cores are not emulated, so test on a GPU as well.

    feeds    the model's inputs
    fusions  the fusions whose nodes are checked; by default, those with kernels of other packages and added folders
    arch     the compute capability that hosts plan for

    Raises KernelError for a kernel that differs or does not compile, and for a plan that calls a library of NVIDIA;
    AssertionError for a kernel that writes around an output; UsageError if there is no such node, or all of them are
    refused; VerificationError if the model does not run.
    """
    families = [family for each in kernel_folders() if each.origin is OWN for family in each.families]
    own = {name for family in families for name in family.fusions}
    proto, folder = load(model)
    calls = [call for call in read_calls(proto) if not call.in_function and find_host(call.node.fusion)]
    calls = [call for call in calls if call.node.fusion in (fusions or {call.node.fusion} - own)]
    names = {name for call in calls for name in (*call.proto.input, *call.proto.output) if name}
    given = {*feeds, *(each.name for each in proto.graph.initializer)}
    values: dict[str, object] = dict(feeds)
    if computed := sorted(names - given):
        values |= run(open_session(extract(proto, computed), folder), feeds)
    for each in proto.graph.initializer:
        if each.name in names and each.name not in values:
            values[each.name] = onnx.numpy_helper.to_array(each, str(folder or ""))
    (device,) = named_gpus([arch], [], [])
    refused: list[str] = []
    checks = []
    for call in calls:
        arrays = {name: np.asarray(values[name]) for name in (*call.proto.input, *call.proto.output) if name}
        if why := _why_not(call, arrays, device):
            refused.append(why)
        else:
            checks.append(_check(call, arrays, device))
    if not checks:
        raise UsageError(refused[0] if refused else "no fused node of the model has a kernel to check")
    return checks


def _why_not(call: Call, arrays: Mapping[str, Array], device: Device) -> str | None:
    """Return why a node cannot be checked; None if it can."""
    if numbers_of(call.node):
        return f"{call.node.label}: its host plans by the value of an operand, which is not emulated"
    host = find_host(call.node.fusion)
    assert host is not None
    return host.supports(call.node, [str(arrays[name].dtype) for name in call.proto.input], device)


def _check(call: Call, arrays: Mapping[str, Array], device: Device) -> KernelCheck:
    """Run all plans of a node.  Raises KernelError if one of them does not compute what the body did."""
    host = find_host(call.node.fusion)
    assert host is not None
    inputs = [arrays[name] for name in call.proto.input]
    specs = [
        TensorSpec(each.shape, str(each.dtype), constant=constant)
        for each, constant in zip(inputs, call.constants, strict=True)
    ]
    plans, largest = host.candidates(call.node, specs, device), 0.0
    for number, plan in enumerate(plans):
        if not all(isinstance(step, Launch) for step in plan.steps):
            raise KernelError(f"{call.node.label}: plan {number} calls a library of NVIDIA, which is not emulated")
        with tempfile.TemporaryDirectory() as scratch:
            outputs = emulate(plan, inputs, Path(scratch))
        for name, output in zip(call.proto.output, outputs, strict=True):
            found = compare_output(name, arrays[name], output)
            if not found.passed:
                raise KernelError(f"{call.node.label}: plan {number} differs from the body: {found.reason}")
            largest = max(largest, found.max_rel)
    return KernelCheck(call.node.name, call.node.fusion, len(plans), largest)
