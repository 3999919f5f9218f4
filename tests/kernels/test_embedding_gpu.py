"""Norms of embeddings, launched from their plans, against float64: addends, sizes, ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
from embedding_cases import ADDENDS, Embedding, expected, inputs
from kernel_hosts import host_of
from kernel_runs import DTYPES, NUMPY, check, cupy, launch, result, run, small_gpu, upload

from onnxfuse.runtime.cuda_driver import gpu
from onnxfuse.runtime.plan import Device, Plan

pytestmark = pytest.mark.gpu

# As in test_kernels_gpu.py, a size for each path of rows.cuh.
SIZES = [((1, 1), 1), ((1, 3), 5), ((3, 1), 1023), ((1, 7), 4097), ((2, 2), 128), ((8, 16), 128), ((2, 15), 768),
         ((1, 1), 4096), ((3, 3), 4096), ((1, 2), 65536), ((3, 3), 16384), ((1, 3), 100003), ((1, 1), 300000),
         ((0, 5), 128), ((2, 0), 128), ((64, 64), 64), ((3, 3), 20000)]  # fmt: skip
MISALIGNED = [((3, 1), 1023), ((2, 2), 128), ((2, 15), 768), ((3, 3), 4096), ((1, 5), 20001)]
IDS_SIZE_AND_ALIGNMENT = [*((*case, True) for case in SIZES), *((*case, False) for case in MISALIGNED)]


@pytest.fixture(scope="module")
def device() -> Device:
    return small_gpu()


def judge(case: Embedding, arrays: Mapping[str, np.ndarray], device: Device, aligned: bool = True) -> None:
    found = run(case.fusion, arrays, case.node().output_dtypes, device, aligned, **case.node().attributes)
    assert len(found) == case.outputs
    for each, reference in zip(found, expected(case, arrays), strict=False):
        check(each, reference)


@pytest.mark.parametrize(("ids", "size", "aligned"), IDS_SIZE_AND_ALIGNMENT, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(device: Device, dtype: str, ids: tuple[int, int], size: int, aligned: bool) -> None:
    vocabulary = 50 if size < 10_000 else 6
    layer = Embedding(ids, size, "positions and types", ids[1:], dtype=dtype, vocabulary=vocabulary)
    rms = Embedding(ids, size, rms=True, dtype=dtype, vocabulary=vocabulary)
    for case in (layer, rms):
        judge(case, inputs(case, NUMPY[dtype]), device, aligned)


@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
@pytest.mark.parametrize("lead", [(5, 9), (1, 9), (9,), (5, 1), (1, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("addends", ADDENDS)
def test_what_is_added_broadcasts(device: Device, addends: str, lead: tuple[int, ...], ids_dtype: str) -> None:
    case = Embedding((5, 9), 96, addends, lead, dtype="float32", ids_dtype=ids_dtype, outputs=1 + (len(lead) < 2))
    judge(case, inputs(case, NUMPY["float32"]), device)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 4), ()], ids=str)
@pytest.mark.parametrize("factor", [None, 5.5, 0.0])
def test_rms_norm_of_ids_of_any_rank(device: Device, shape: tuple[int, ...], factor: float | None) -> None:
    case = Embedding(shape, 96, rms=True, factor=factor)
    judge(case, inputs(case, NUMPY["float16"]), device)


@pytest.mark.parametrize("ids_dtype", ["int32", "int64"])
@pytest.mark.parametrize("size", [96, 40000])
def test_ids_outside_of_the_table_are_zeros(device: Device, size: int, ids_dtype: str) -> None:
    """ONNX says nothing of them; no memory outside of the table is read."""
    case = Embedding((2, 4), size, "positions", (4,), dtype="float32", ids_dtype=ids_dtype, vocabulary=10)
    arrays = inputs(case, NUMPY["float32"])
    far = 2**31 - 1 if ids_dtype == "int32" else 2**62
    outside = np.array([[10, -11, far, -far - 1], [3, -3, 0, -10]])
    positions = np.array([0, 5, -6, -5])  # of five, of which one is outside on either side
    padded = {name: np.concatenate([arrays[name], np.zeros((1, size), np.float32)]) for name in ("table", "table_2")}
    arrays |= {"ids": outside.astype(ids_dtype), "ids_2": positions.astype(ids_dtype)}
    inside = {
        "ids": np.where((outside >= -10) & (outside < 10), outside % 10, 10),
        "ids_2": np.where((positions >= -5) & (positions < 5), positions % 5, 5),
    }
    total, norm = run(case.fusion, arrays, ["float32"] * 2, device, epsilon=1e-5)[::-1]
    right = expected(case, {**arrays, **padded, **inside})
    check(norm, right[0])
    check(total, right[1])
    assert (total[0, 1] == 0).all()  # both are outside


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("size", [768, 2048])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_candidate(device: Device, dtype: str, size: int, rms: bool) -> None:
    """More rows than are resident at once, which one of the candidates takes in a loop; the last ones end unevenly."""
    addends = "none" if rms else "positions"
    case = Embedding((1, 137), size, addends, (137,), rms=rms, dtype=dtype)
    arrays, specs = inputs(case, NUMPY[dtype]), case.specs()
    host = host_of(case.fusion)
    plans: list[Plan] = host.candidates(case.node(), specs, device)
    for plan in plans:
        written = [upload(np.full(spec.shape, np.nan, NUMPY[dtype])) for spec in plan.outputs]
        launch(plan, [upload(each) for each in arrays.values()], written)
        for buffer, spec, reference in zip(written, plan.outputs, expected(case, arrays), strict=True):
            check(result(buffer, spec, aligned=True), reference)


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("other_dtype", DTYPES)
def test_dtypes_may_differ(device: Device, table_dtype: str, other_dtype: str) -> None:
    case = Embedding((3, 7), 96, "positions and a row", (7,), dtype=other_dtype)
    arrays = inputs(case, NUMPY[other_dtype])
    arrays["table"] = arrays["table"].astype(NUMPY[table_dtype])
    arrays["row"] = arrays["row"].astype(np.float32)
    y, total = run(case.fusion, arrays, ["float32", other_dtype], device, epsilon=1e-5)
    for found, reference in zip((y, total), expected(case, arrays), strict=True):
        check(found, reference)


@pytest.mark.parametrize("rms", [False, True])
def test_rows_that_fill_the_gpu(rms: bool) -> None:
    case = Embedding((8, 512), 768, "none" if rms else "positions and types", (1, 512), rms=rms, vocabulary=3000)
    judge(case, inputs(case, NUMPY["float16"]), gpu(0))


def test_tables_that_begin_anywhere(device: Device) -> None:
    """Ids whose data is not at a multiple of 16 bytes do not keep rows from being read in vectors."""
    case = Embedding((2, 15), 768, "positions", (15,))
    host = host_of(case.fusion)
    specs = case.specs()
    specs[0] = dataclasses.replace(specs[0], aligned=False)
    plan, arrays = host.candidates(case.node(), specs, device)[0], inputs(case, NUMPY["float16"])
    assert plan.steps[0].kernel.defines["WIDTH"] > 1
    written = [upload(np.full(spec.shape, np.nan, NUMPY["float16"])) for spec in plan.outputs]
    launch(plan, [upload(each, aligned=name != "ids") for name, each in arrays.items()], written)
    cupy.cuda.runtime.deviceSynchronize()
    for buffer, spec, reference in zip(written, plan.outputs, expected(case, arrays), strict=True):
        check(result(buffer, spec, aligned=True), reference)
