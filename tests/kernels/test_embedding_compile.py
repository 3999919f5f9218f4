"""Norms of embeddings compile for every architecture and stay in registers; no GPU needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import pytest
from architectures import DEVICES, H200, check_compiles, to_compile
from embedding_cases import ADDENDS, Embedding
from kernel_hosts import host_of
from sampling import by_parts
from test_kernels_compile import ROWS, check_row_launch

from onnxfuse.runtime.nvrtc import compile_cubin
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec

PARTS = 9  # of the kernels, of which one is compiled in a plain run


def plans(case: Embedding, device: Device, aligned: bool = True) -> list[Plan]:
    """Return all plans of a node, of which no two are equal."""
    host, node, specs = host_of(case.fusion), case.node(), case.specs(aligned)
    assert host.supports(node, [spec.dtype for spec in specs], device) is None
    found = host.candidates(node, specs, device)
    assert len({repr(each) for each in found}) == len(found)
    return found


def cases() -> Iterator[Embedding]:
    """Yield rows of each length with two addends, and of a usual length with every kind of addend and other dtypes."""
    for rows, size in ROWS:
        for dtype in ("float16", "float32"):
            yield Embedding((1, rows), size, "positions and types", (1, rows), dtype=dtype)
            yield Embedding((rows,), size, rms=True, dtype=dtype, factor=4.0)
    for addends in ADDENDS:
        for lead in (8, 512), (1, 512), (8, 1), (1,):
            yield Embedding((8, 512), 768, addends, lead, dtype="bfloat16", ids_dtype="int32", outputs=1)
    yield Embedding((8, 512), 768, rms=True, dtype="bfloat16", outputs=1)


@functools.cache
def launches(device: Device) -> list[Launch]:
    found = [step for case in cases() for each in plans(case, device) for step in each.steps]
    assert all(isinstance(step, Launch) for step in found)
    return list({repr(step.kernel): step for step in found if isinstance(step, Launch)}.values())


def kernels(device: Device) -> list[Kernel]:
    return [step.kernel for step in launches(device)]


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device)


def test_compiles_for_the_architecture_itself() -> None:
    for kernel in {each.source: each for each in kernels(H200)}.values():
        assert compile_cubin(dataclasses.replace(kernel, arch_specific=True), 90).code


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_every_candidate_is_a_launch_that_the_device_takes(device: Device) -> None:
    for step in launches(device):
        check_row_launch(step, device)


@pytest.mark.parametrize(("ids", "size"), [((0, 5), 64), ((2, 0), 64), ((2, 5), 0)])
def test_nothing_to_compute_is_no_launch(ids: tuple[int, int], size: int) -> None:
    (plan,) = plans(Embedding(ids, size, "positions", ids[1:]), H200)
    assert plan.steps == ()
    assert [spec.shape for spec in plan.outputs] == [(*ids, size)] * 2


def test_rows_are_counted_in_64_bits_where_32_are_too_few() -> None:
    (few, *_), (many, *_) = (plans(Embedding((2, n), 8, "positions", (n,)), H200) for n in (2**20, 2**31))
    assert [plan.steps[0].kernel.defines["INDEX_T"] for plan in (few, many)] == ["uint32_t", "uint64_t"]


@pytest.mark.parametrize(
    ("lead", "sentence"), [((3, 512), r"ids_2 has \[3, 512\] rows"), ((511,), "do not broadcast over")]
)
def test_positions_that_do_not_fit_are_an_error(lead: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plans(Embedding((8, 512), 64, "positions", lead), H200)


def test_rows_of_another_length_are_an_error() -> None:
    case = Embedding((8, 512), 64, "positions", (512,))
    specs = case.specs()
    specs[3] = TensorSpec((17, 65), "float16")
    host = host_of("embedding_layer_norm")
    with pytest.raises(ValueError, match=r"table_2 has shape \[17, 65\]; required rows of 64 elements"):
        host.candidates(case.node(), specs, H200)


def test_dtypes_without_a_kernel_are_refused_by_name() -> None:
    host = host_of("embedding_rms_norm")
    node = FusedNode("embedding_rms_norm", "n", ("ids", "table", "scale"), {}, ("float16",))
    assert "ids is uint8; the kernel takes int32, int64" in host.supports(node, ["uint8", "float16", "float16"], H200)
    assert "table is float64" in host.supports(node, ["int64", "float64", "float16"], H200)
