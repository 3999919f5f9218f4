"""Linear attention and causal convolutions on a GPU: every plan against float64, states apart and in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_hosts import require_support
from kernel_runs import compile_native, cupy, launch, result, upload
from linear_attention_cases import CHUNKS, CONVS, NUMPY, PARTS, STEPS, TOKENS, Case, Conv, check, check_conv

from onnxfuse.kernels.linear_attention import host
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, NoAlias, Plan, TensorSpec

pytestmark = pytest.mark.gpu
MODEL = Case(1000, heads=16, state_heads=16, size=128, value_size=128)
SIZES = {
    "a_model": MODEL,
    "a_batch": replace(MODEL, batch=3, length=129, state_dtype="float32"),
    "many_queries": replace(MODEL, heads=32, state_heads=4, length=200, past=False),
    "many_states": replace(MODEL, heads=8, state_heads=32, length=65, size=64),
    "one_token": replace(MODEL, length=1, state_dtype="float32"),
    "tokens_of_a_batch": replace(MODEL, length=1, batch=64, state_heads=32, heads=32),
    "few_tokens": replace(MODEL, length=9, row_decays=True),
    "long": replace(MODEL, length=3000, heads=2, state_heads=2, lowest=0.02),
    "resets": replace(MODEL, length=700, lowest=3000.0),
    "a_mamba2": replace(MODEL, rule="gated", value_size=64, batch=2, heads=24, state_heads=24, k_heads=1),
    "resets_of_a_mamba2": replace(MODEL, rule="gated", value_size=64, length=700, lowest=3000.0),
}


@pytest.fixture(scope="module")
def device() -> Device:
    return cuda_driver.gpu(0)


def plans(case: Case | Conv, device: Device) -> list[Plan]:
    node, specs = case.node(), case.specs()
    require_support(host, node, [spec.dtype for spec in specs], device)
    return host.candidates(node, specs, device)


def in_place(alias: NoAlias) -> bool:
    return bool(alias.same_start)


def run(case: Case | Conv, plan: Plan, shared: bool) -> list[np.ndarray]:
    inputs = case.inputs()
    read = {name: upload(value, case.aligned) for name, value in inputs.items()}
    written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), case.aligned) for spec in plan.outputs]
    if shared:
        written[1] = read["past_state"]
    launch(plan, list(read.values()), written)
    return [result(buffer, spec, case.aligned) for buffer, spec in zip(written, plan.outputs, strict=True)]


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", [*TOKENS, *(f"chunks_{name}" for name in CHUNKS), *PARTS, *STEPS, *SIZES])
def test_every_plan(device: Device, name: str, dtype: str) -> None:
    cases = {**TOKENS, **{f"chunks_{key}": case for key, case in CHUNKS.items()}, **PARTS, **STEPS, **SIZES}
    case = replace(cases[name], dtype=dtype)
    found = [plan for tf32 in (True, False) for plan in plans(case, replace(device, tf32=tf32))]
    for plan in {repr(each): each for each in found}.values():
        for shared in {False, *map(in_place, plan.no_alias)}:
            check(case, case.inputs(), plan, *run(case, plan, shared))


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("name", CONVS)
def test_causal_convolutions(device: Device, name: str, dtype: str) -> None:
    case = replace(CONVS[name], dtype=dtype)
    for each in case, replace(case, channels=300, length=case.length * 50):
        for plan in plans(each, device):
            for shared in {False, *map(in_place, plan.no_alias)}:
                check_conv(each, each.inputs(), *run(each, plan, shared))


@pytest.mark.parametrize(
    "case", [replace(MODEL, length=1, dtype="float16"), replace(MODEL, length=300, dtype="float16"), SIZES["a_mamba2"]]
)
def test_a_cuda_graph_replays_what_its_inputs_hold_then(device: Device, case: Case) -> None:
    plan = plans(case, device)[0]
    compile_native()
    read = [upload(value) for value in case.inputs().values()]
    written = [upload(np.zeros(spec.shape, NUMPY[spec.dtype])) for spec in plan.outputs]
    ready = ready_plan(plan, [TensorSpec((each.nbytes,), "uint8") for each in read])
    scratch = cupy.zeros(max(1, ready.scratch_bytes), dtype=cupy.uint8)

    def enqueue(stream: Any) -> None:
        addresses = [[each.data.ptr for each in buffers] for buffers in (read, written)]
        ready.run(*addresses, scratch.data.ptr, stream.ptr)

    stream = cupy.cuda.Stream(non_blocking=True)
    enqueue(stream)
    stream.synchronize()
    with stream:
        stream.begin_capture()
        enqueue(stream)
        graph = stream.end_capture()
    for seed in range(2):
        inputs = case.inputs(seed)
        for buffer, value in zip(read, inputs.values(), strict=True):
            buffer.set(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)
        stream.synchronize()
        found = [result(buffer, spec, True) for buffer, spec in zip(written, plan.outputs, strict=True)]
        check(case, inputs, plan, *found)
