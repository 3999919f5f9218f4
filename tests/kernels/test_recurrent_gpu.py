"""Recurrent layers on a GPU: every plan against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from attention_cases import DTYPES, NUMPY
from kernel_hosts import require_support
from kernel_runs import compile_all, cupy, launch, result, upload
from recurrent_cases import CASES, STATES, Case, attributes

from onnxfuse.kernels.recurrent import host
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, Launch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Device:
    return dataclasses.replace(cuda_driver.gpu(0), tf32=False)


def check(case: Case, device: Device) -> None:
    """Check the results of every plan, and that nothing around them is written."""
    node, specs = case.node(), case.specs()
    if device.arch < 90 and case.hidden > 128:
        pytest.skip("weights need the memory of several blocks")
    require_support(host, node, [spec.dtype for spec in specs], device)
    plans = host.candidates(node, specs, device)
    compile_all([step.kernel for plan in plans for step in plan.steps if isinstance(step, Launch)], device)
    right = case.expect()
    for plan in plans:
        read = [upload(value, case.aligned) for value in case.arrays().values()]
        written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), case.aligned) for spec in plan.outputs]
        launch(plan, read, written)
        found = [result(buffer, spec, case.aligned) for buffer, spec in zip(written, plan.outputs, strict=True)]
        case.check(found, right, device.tf32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_forms(device: Device, name: str, dtype: str) -> None:
    case = dataclasses.replace(CASES[name], dtype=dtype)
    if dtype == "float32" or case.scale <= 1:  # products of large inputs, rounded to 16 bits, are far from the clip
        check(case, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 3, 17, 64, 100, 128, 256, 300, 512])
@pytest.mark.parametrize("fusion", ["lstm", "gru", "rnn"])
def test_sizes(device: Device, fusion: str, hidden: int, dtype: str) -> None:
    for batch in (1, 5, 33):
        check(Case(fusion, 9, batch, 24, hidden, "bidirectional", STATES, dtype=dtype), device)
    check(Case(fusion, 7, 3, 5, hidden, "reverse", dtype=dtype, aligned=False), device)


@pytest.mark.parametrize("linear", [0, 1])
def test_gru(device: Device, linear: int) -> None:
    for hidden in (48, 130, 512):
        given = attributes(linear_before_reset=linear)
        check(Case("gru", 12, 10, 16, hidden, lengths=tuple(range(3, 13)), attributes=given), device)


def test_tf32(device: Device) -> None:
    for batch in (1, 12, 40):
        for fusion in ("lstm", "gru"):
            check(Case(fusion, 8, batch, 64, 256), dataclasses.replace(device, tf32=True))


def test_many_steps(device: Device) -> None:
    """A barrier at each of 1000 steps; errors do not grow, because the layer forgets."""
    for hidden in (32, 200):
        check(Case(steps=1000, batch=2, hidden=hidden, scale=0.3), device)


def test_more_sequences_than_clusters_at_once(device: Device) -> None:
    check(Case(steps=3, batch=1000, inputs=16, hidden=96, dtype="float16"), device)
    check(Case(steps=2, batch=300, inputs=16, hidden=256), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values(device: Device, dtype: str) -> None:
    case = Case(steps=20, batch=3, hidden=40, dtype=dtype, scale=30.0)
    for plan in host.candidates(case.node(), case.specs(), device):
        read = [upload(value) for value in case.arrays().values()]
        written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype])) for spec in plan.outputs]
        launch(plan, read, written)
        y = result(written[0], plan.outputs[0], True).astype(np.float32)
        assert np.isfinite(y).all() and np.abs(y).max() <= 1


def test_a_cuda_graph_replays_a_layer(device: Device) -> None:
    case, other = (Case(steps=30, batch=4, hidden=256, dtype="float16", seed=seed) for seed in (0, 9))
    node, specs = case.node(), case.specs()
    for plan in host.candidates(node, specs, device):
        ready = ready_plan(plan, specs)
        read = [upload(value) for value in case.arrays().values()]
        written = [upload(np.full(spec.shape, np.nan, np.float16)) for spec in plan.outputs]
        scratch, stream = cupy.zeros(ready.scratch_bytes, dtype=cupy.uint8), cupy.cuda.Stream(non_blocking=True)
        addresses = [each.data.ptr for each in read], [each.data.ptr for each in written], scratch.data.ptr, stream.ptr
        cupy.cuda.runtime.deviceSynchronize()
        ready.run(*addresses)
        stream.synchronize()
        with stream:
            stream.begin_capture()
            ready.run(*addresses)
            graph = stream.end_capture()
        for buffer, value in zip(read, other.arrays().values(), strict=True):
            buffer.set(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        found = [result(buffer, spec, True) for buffer, spec in zip(written, plan.outputs, strict=True)]
        other.check(found, other.expect(), False)
