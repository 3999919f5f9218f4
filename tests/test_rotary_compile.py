"""Rotary embedding of queries and keys at once: it compiles for every architecture, with a thread for all elements."""

from __future__ import annotations

import math

import pytest
from test_kernels_compile import DEVICES

from onnxfuse.kernels._attention import Heads
from onnxfuse.kernels._rotary import Rotary, Turned, launch
from onnxfuse.provider.cubin import compile_cubin
from onnxfuse.provider.plan import Device, Pointer, Scalar, TensorSpec

CASES = {
    "llama": (32, 8, 64, 64, "float16", False),
    "qwen3": (16, 8, 128, 128, "float16", True),
    "qwen3 in fp32": (16, 8, 128, 128, "float32", True),
    "gpt_neox": (64, 64, 96, 24, "bfloat16", False),
    "a norm of heads of 80": (7, 3, 80, 80, "float16", True),
}


def problem(name: str, aligned: bool = True, length: int = 512) -> Rotary:
    heads, kv_heads, size, rotated, dtype, norm = CASES[name]
    tables = TensorSpec((1, length, rotated), dtype)

    def rows(kind: str, index: int, count: int) -> Heads:
        return Heads(Pointer(kind, index), length * count * size, size, count * size)  # type: ignore[arg-type]

    tensors = tuple(
        Turned(count, rows("input", i, count), rows("scratch", i, count), Pointer("input", 4 + i))
        for i, count in enumerate((heads, kv_heads))
    )
    cos, sin = Pointer("input", 2), Pointer("input", 3)
    return Rotary(
        2, length, size, rotated, tensors, cos, sin, tables, dtype, dtype, dtype, aligned, whole_table=True,
        scale_dtype=dtype if norm else "", epsilon=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, name: str, aligned: bool) -> None:
    compiled = compile_cubin(launch(problem(name, aligned), device).kernel, device.arch)
    assert compiled.spill_stores + compiled.spill_loads == 0
    assert "warning" not in compiled.log, compiled.log


@pytest.mark.parametrize("length", [1, 77, 4096])
@pytest.mark.parametrize("name", CASES)
def test_every_element_has_a_thread(name: str, length: int) -> None:
    """Of both tensors, whatever is left over."""
    heads, kv_heads, size, rotated, _, norm = CASES[name]
    step = launch(problem(name, length=length), DEVICES[0])
    constants = {key: int(value) for key, value in step.kernel.defines.items() if isinstance(value, int)}
    pieces = (rotated // 2 + size - rotated) // constants["WIDTH"]
    groups = math.ceil(heads / constants["HEADS_EACH"]) + math.ceil(kv_heads / constants["HEADS_EACH"])
    assert groups % constants["GROUPS_EACH"] == 0
    assert constants["LANES"] == pieces or (norm and constants["LANES"] in (1, 2, 4, 8, 16, 32))
    count = step.arguments[-1]
    assert isinstance(count, Scalar)
    assert count.value == 2 * length * groups * constants["LANES"]
    assert step.grid[0] * step.block[0] >= count.value
