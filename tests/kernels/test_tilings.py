"""Tilings cover all elements that they are chosen for; no GPU needed."""

from __future__ import annotations

import math

import pytest
from architectures import H200
from kernel_hosts import first_plan
from test_attention_compile import case

from onnxfuse.kernels.attention import blocks, decode
from onnxfuse.kernels.attention.operands import attention_of
from onnxfuse.kernels.attention.problem import ScoreTensor
from onnxfuse.kernels.norms.rows import row_tiling
from onnxfuse.runtime.plan import Device, FusedNode, Launch, Pointer, TensorSpec

L40S = Device("L40S", 89, 142, 101376)
A100 = Device("A100", 80, 108, 166912)


@pytest.mark.parametrize("device", [L40S, A100, H200], ids=lambda device: device.name)
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("size", [64, 128, 160, 256])
@pytest.mark.parametrize(("heads", "queries"), [((32, 1), 1), ((32, 1), 2), ((8, 8), 48), ((64, 1), 1), ((8, 8), 17)])
def test_a_block_of_decode_has_all_rows(
    heads: tuple[int, int], queries: int, size: int, dtype: str, tf32: bool, device: Device
) -> None:
    """Less shared memory makes a tile smaller, but never smaller than its queries times heads."""
    device = Device(device.name, device.arch, device.multiprocessors, device.shared_per_block, tf32)
    node, inputs = case(1, heads, queries, 2048, (size, size), dtype)
    problem, _ = attention_of(node, inputs, device)
    rows = queries * heads[0] // heads[1]
    for way in decode.implementations(problem, device):
        defines = next(step for step in way.steps if isinstance(step, Launch)).kernel.defines
        assert 16 * int(defines["M_TILES"]) * int(defines["WARPS_M"]) >= rows, way.name


@pytest.mark.parametrize("dtype", ["bool", "float16", "float32"])
@pytest.mark.parametrize("keys", range(16, 257, 16))
def test_accesses_of_a_mask_are_as_many_for_each_thread(keys: int, dtype: str) -> None:
    """64 rows of a tile are read by 128 threads, in vectors that end before the last key."""
    node, inputs = case(1, (8, 8), 512, 512, (64, 64), mask=("boolean", (1, 1, 512, 512), "bool"))
    problem, _ = attention_of(node, inputs, H200)
    mask = ScoreTensor(Pointer("input", 3), dtype, 0, 0, 512, 1, True)
    launch = blocks.launch(problem, mask, keys, Pointer("scratch", 0), Pointer("scratch", 1))
    width = int(launch.kernel.defines["WIDTH"])
    assert keys % width == 0 and 64 * (keys // width) % 128 == 0
    assert width == math.gcd(width, 512)


@pytest.mark.parametrize("device", [L40S, A100, H200], ids=lambda device: device.name)
@pytest.mark.parametrize("length", [8192, 12288, 16384, 65536, 131072])
def test_rows_in_shared_memory_are_of_one_width(length: int, device: Device) -> None:
    """In shared memory a thread's vectors of all inputs lie side by side: of 8 and 16 bytes one would be misaligned."""
    for rows in 64, 4096:
        assert not row_tiling(rows, length, 4, device, (4, 2)).in_shared
        assert not row_tiling(rows, length, 4, device, (2, 4)).in_shared


@pytest.mark.parametrize(("rows", "index"), [(100, "u32"), (40_000, "u64"), (65_536, "u64")])
def test_the_index_counts_all_elements_of_a_wide_product(rows: int, index: str) -> None:
    """A third of each row is read: fewer than 2^31 elements, whose indices exceed 2^31."""
    parts = {"activation": "silu", "d": 22_016, "gate_offset": 0, "up_offset": 22_016}
    node = FusedNode("gated_activation", "", ("gate", "up"), parts, ("float16",))
    product = TensorSpec((rows, 66_048), "float16")
    (step,) = first_plan(node, [product, product], H200).steps
    assert isinstance(step, Launch) and step.kernel.defines["INDEX"] == index


def test_rows_that_31_bits_do_not_count_are_refused() -> None:
    assert row_tiling(1, 2**31 - 8, 8, H200, (2,)).width == 8
    with pytest.raises(ValueError, match="a row has 2147483648 elements"):
        row_tiling(1, 2**31, 8, H200, (2,))
