"""GroupQueryAttention on a GPU: every plan against float64, with caches apart and in place."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from attention_cases import DTYPES, HALF_ULP, NUMPY
from group_query_cases import PASTS, SCALES, Arrays, Case, Expected, expected, near, unwritten
from kernel_hosts import require_support
from kernel_runs import compile_native, cupy, launch, result, upload

from onnxfuse.kernels.attention import host
from onnxfuse.runtime import cuda_driver
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, Launch, Plan, TensorSpec

pytestmark = pytest.mark.gpu
ROUNDINGS = 5  # of weights, rotated rows and results, each by half an ulp
TF32 = 4e-3  # relative error of products in TF32


@pytest.fixture(scope="module")
def device() -> Device:
    return dataclasses.replace(cuda_driver.gpu(0), tf32=False)


def plans(case: Case, device: Device) -> list[Plan]:
    node, specs = case.node(), case.specs()
    require_support(host, node, [spec.dtype for spec in specs], device)
    return host.candidates(node, specs, device)


def check(case: Case, device: Device) -> None:
    """Check every plan with caches of their own and, if a past is as long as its present, in place."""
    inputs = case.inputs()
    right = expected(case, inputs)
    for plan in plans(case, device):
        name = str([step.kernel.source for step in plan.steps if isinstance(step, Launch)])
        for shared in (False, True) if case.past == case.rows else (False,):
            read = {operand: upload(value, case.aligned) for operand, value in inputs.items()}
            written = [upload(unwritten(spec.shape, spec.dtype), case.aligned) for spec in plan.outputs]
            if shared:
                for i, past in enumerate(PASTS, 1):
                    written[i] = read[past]
            launch(plan, list(read.values()), written)
            found = [result(buffer, spec, case.aligned) for buffer, spec in zip(written, plan.outputs, strict=True)]
            compare(case, inputs, found, right, f"{name}, {'in place' if shared else 'apart'}", device.tf32)


def compare(
    case: Case, inputs: Arrays, found: list[np.ndarray], right: Expected, name: str, tf32: bool = False
) -> None:
    if case.cache:
        assert all(near(case, present, rows) for present, rows in zip(found[1:], right.presents, strict=True)), name
        right = expected(case, inputs, found[1:])
    y, *presents = (each.astype(np.float64) for each in found)
    error = ROUNDINGS * (TF32 if tf32 and case.dtype == "float32" else max(HALF_ULP[case.dtype], 4e-6))
    excess = np.where(right.counts, np.abs(y - right.y) - error * (right.sizes + 1e-3), -1.0)
    assert np.isfinite(y).all(), name
    assert excess.max() <= 0, f"{name}: {int((excess > 0).sum())} of {excess.size} are wrong, first {np.argmax(excess)}"
    for present, rows in zip(presents, right.presents, strict=True):
        known = np.isfinite(rows)
        # A rotated element is a difference of two products, which are rounded and may cancel.
        allowed = 2 * HALF_ULP[case.dtype] * (np.abs(rows) + 1e-2) + 2.0**-23 * np.abs(rows[known]).max(initial=0)
        assert np.all(np.abs(present - rows)[known] <= allowed[known]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_head_sizes(device: Device, size: int, dtype: str) -> None:
    check(Case((17, 300), past=300, size=size, dtype=dtype), device)
    check(Case((1500,), past=2048, heads=8, size=size, dtype=dtype), device)
    check(Case((70, 33), new=70, past=99, size=size, dtype=dtype), device)
    check(Case((200,), new=200, size=size, dtype=dtype), device)


# Around the tiles of 64 and 128 keys, the fewest keys that several blocks share, and full buffers.
LENGTHS = [(1,), (63,), (64,), (65, 2), (127, 128, 129), (511, 1, 512, 513), (1000, 3, 999, 64, 1024)]


@pytest.mark.parametrize("past", [1024, 2500, None], ids=["full", "longer", "growing"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_one_token(device: Device, lengths: tuple[int, ...], past: int | None) -> None:
    rows = max(lengths) - 1 if past is None else past
    for heads, kv_heads in (4, 2), (32, 8), (7, 1):
        check(Case(lengths, past=rows, heads=heads, kv_heads=kv_heads), device)


@pytest.mark.parametrize("batch", range(1, 6))
@pytest.mark.parametrize("new", [2, 7, 64, 65, 159, 160, 257])
def test_first_prompts(device: Device, new: int, batch: int) -> None:
    """Padded on the right: the lengths of the batch differ."""
    lengths = tuple(max(1, new - 31 * i) for i in range(batch))
    for past in 0, 300:
        check(Case(lengths, new=new, past=past, heads=8, size=128), device)
    check(Case(lengths, new=new + 3, past=new + 3), device)  # longer than all sequences


@pytest.mark.parametrize("new", [2, 33, 200])
@pytest.mark.parametrize("before", [1, 64, 500])
def test_later_prompts(device: Device, before: int, new: int) -> None:
    for past in before, before + new, before + new + 77:
        check(Case((before + new,), new=new, past=past, heads=8), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [1, 90, 220])
def test_forms(device: Device, new: int, dtype: str) -> None:
    given: dict[str, Any] = {"lengths": (new + 200,) if new > 1 else (201, 3), "new": new, "past": new + 300}
    for form in (
        {"packed": False}, {"rotated": 0}, {"rotated": 32, "interleaved": True}, {"positions": True}, {"norms": True},
        {"norms": True, "rotated": 0, "packed": False}, {"sink": True}, {"smooth": True}, {"window": 1},
        {"window": 100, "sink": True, "softcap": 5.0}, {"softcap": 30.0}, {"scale": 0.3}, {"aligned": False},
        {"size": 40, "rotated": 24}, {"total": new + 300}, {"bias": "bh"}, {"bias": "h", "window": 100, "sink": True},
    ):  # fmt: skip
        check(Case(dtype=dtype, **given, **form), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("cache", ["int8", "float8_e4m3fn"])
def test_quantized_caches(device: Device, cache: str, per_channel: bool, dtype: str) -> None:
    def tried(*lengths: int, **given: Any) -> None:
        check(Case(lengths, dtype=dtype, cache=cache, per_channel=per_channel, **given), device)

    for size in 64, 80, 104, 128, 256:
        tried(17, 300, past=300, size=size)
        tried(1500, past=2048, heads=8, size=size)
    for lengths in LENGTHS:
        for heads, kv_heads in (4, 2), (32, 8), (7, 1):
            tried(*lengths, past=max(lengths), heads=heads, kv_heads=kv_heads)
            tried(*lengths, past=max(lengths) - 1, heads=heads, kv_heads=kv_heads)
    for lengths, new, past in ((3, 70), 70, 0), ((70, 33), 70, 99), ((1200,), 7, 1300), ((700,), 300, 1024):
        tried(*lengths, new=new, past=past)
    for new in 1, 90:
        for form in (
            {"packed": False}, {"rotated": 0}, {"rotated": 32, "interleaved": True}, {"positions": True},
            {"norms": True}, {"sink": True}, {"smooth": True, "softcap": 30.0}, {"window": 100}, {"aligned": False},
            {"bias": "h"},
        ):  # fmt: skip
            tried(new + 200, new=new, past=new + 300, **form)


def test_tf32(device: Device) -> None:
    for new in 1, 80:
        case = Case((new + 900,), new=new, past=new + 1000, dtype="float32")
        for cache in "", "int8":
            check(dataclasses.replace(case, cache=cache), dataclasses.replace(device, tf32=True))


@pytest.mark.parametrize("cache", ["", "int8"])
@pytest.mark.parametrize("past", [256, 4096])
def test_sequences_grow_in_a_cuda_graph(device: Device, past: int, cache: str) -> None:
    """The graph is captured once; the length is read on the device in each replay, and caches are written in place."""
    lengths = [9, 200]
    case = Case(tuple(lengths), past=past, heads=8, total=past, cache=cache)
    for plan in plans(case, device):
        compile_native()
        inputs = case.inputs()
        read = {name: upload(value) for name, value in inputs.items()}
        written = [upload(np.full(plan.outputs[0].shape, np.nan, NUMPY[case.dtype])), *(read[name] for name in PASTS)]
        ready = ready_plan(plan, [TensorSpec((each.nbytes,), "uint8") for each in read.values()])
        scratch = cupy.full(ready.scratch_bytes, 0xFF, dtype=cupy.uint8)
        pointers = [each.data.ptr for each in read.values()], [each.data.ptr for each in written], scratch.data.ptr
        ready.run(*pointers)  # loads the code
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            ready.run(*pointers, stream=stream.ptr)
            graph = stream.end_capture()
        caches = {name: inputs[name] for name in PASTS}
        for step in range(6):
            now = dataclasses.replace(case, lengths=tuple(length + step for length in lengths), seed=step)
            new = {**now.inputs(), **caches}
            for name in "query", "seqlens_k":
                read[name].set(np.ascontiguousarray(new[name]).reshape(-1).view(np.uint8))
            new |= {name: inputs[name] for name in ("cos_cache", "sin_cache", *(SCALES if cache else ()))}
            right = expected(now, new)
            cupy.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
            found = [result(buffer, spec, True) for buffer, spec in zip(written, plan.outputs, strict=True)]
            compare(now, new, found, right, f"step {step}")
            caches = dict(zip(PASTS, found[1:], strict=True))
