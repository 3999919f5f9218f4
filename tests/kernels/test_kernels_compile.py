"""Elementwise, norm and rotary kernels compile for every architecture, and rows stay in registers; no GPU needed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from architectures import DEVICES, H200, TOLD_APART, check_compiles, covering, to_compile
from kernel_hosts import host_of
from sampling import by_parts

import onnxfuse.kernels
from onnxfuse.activations import ACTIVATIONS
from onnxfuse.kernels.elementwise.host import WITHOUT_PARAMETERS
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorSpec

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")

from onnxfuse.runtime.nvrtc import compile_cubin

PARTS = 54  # of the kernels, of which one is compiled in a plain run

ROW_KERNELS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "softmax", "group_norm")

# A size for each path of rows.cuh: rows of a part of a warp, of a warp, of a block whose threads are all full or partly
# empty; single elements; few rows; rows in the registers of a large block; rows in the shared memory of one block, of
# several, and of odd length there; few rows that blocks share in registers; a row that does not fit anywhere.
ROWS = [(4096, 64), (4096, 768), (16384, 4096), (8192, 5000), (16384, 4097), (33, 1023), (128, 128), (4096, 16384),
        (2048, 32768), (512, 65536), (600, 40001), (64, 40960), (5, 100003)]  # fmt: skip
LONG = (2, 4000000)


def node(fusion: str, operands: str, outputs: list[str], **attributes: object) -> FusedNode:
    return FusedNode(fusion, fusion, tuple(operands.split()), attributes, tuple(outputs))


def tensors(dtype: str, *shapes: tuple[int, ...], aligned: bool = True) -> list[TensorSpec]:
    """Return specs; vectors are weights, and constants if all is aligned."""
    return [TensorSpec(shape, dtype, aligned, aligned and len(shape) == 1) for shape in shapes]


def row_cases(dtype: str) -> Iterator[tuple[FusedNode, list[TensorSpec]]]:
    for x in [*ROWS, LONG]:
        d = x[-1:]
        yield node("layer_norm", "x scale bias", [dtype], epsilon=1e-5), tensors(dtype, x, d, d)
        yield node("rms_norm", "x scale", [dtype]), tensors(dtype, x, d)
        yield node("softmax", "x", [dtype]), tensors(dtype, x)
        yield node("add_layer_norm", "x residual scale bias", [dtype] * 2), tensors(dtype, x, x, d, d)
        yield node("add_rms_norm", "x residual scale", [dtype]), tensors(dtype, x, x, d)
    yield node("layer_norm", "x scale", ["float16"]), [*tensors(dtype, (77, 768)), *tensors("float32", (768,))]
    yield node("rms_norm", "x scale", [dtype]), tensors(dtype, (77, 768), (768,), aligned=False)
    computed = [TensorSpec((768,), dtype)] * 2
    yield node("add_layer_norm", "x residual scale bias", [dtype] * 2), [*tensors(dtype, *[(4096, 768)] * 2), *computed]
    for x, groups in (((2, 320, 64, 64), 32), ((1, 512, 7, 7), 32), ((8, 128, 256, 256), 32), ((2, 64, 64, 64), 64)):
        weights = tensors(dtype, x[1:2], x[1:2])
        yield (
            node("group_norm", "x scale bias", [dtype], groups=groups, activation="silu", epsilon=1e-5),
            [*tensors(dtype, x), *weights],
        )


def element_cases(dtype: str) -> Iterator[tuple[FusedNode, list[TensorSpec]]]:
    for activation in ACTIVATIONS:
        yield node("activation", "x", [dtype], activation=activation), tensors(dtype, (4096, 768))
        yield (
            node("bias_activation", "x bias", [dtype], activation=activation),
            tensors(dtype, (33, 1023), (1023,)),
        )
    yield node("bias_activation", "x bias", [dtype], activation="gelu"), tensors(dtype, (16384, 4096), (4096,))
    for activation in WITHOUT_PARAMETERS:
        x = (16384, 4096)
        yield node("gated_activation", "gate up", [dtype], activation=activation), tensors(dtype, x, x)
    halves = {"activation": "silu", "d": 1024, "gate_offset": 0, "up_offset": 1024}
    for width in 2048, 2051:
        product = tensors(dtype, (512, width), (512, width))
        yield node("gated_activation", "gate up", [dtype], **halves), product
    table = (1, 512, 128)
    for layout, x in ("packed", (2, 512, 1024)), ("bshd", (2, 512, 8, 128)), ("bhsd", (2, 8, 512, 128)):
        yield node("rotary_embedding", "x cos sin", [dtype], layout=layout), tensors(dtype, x, table, table)
        pairs = {"layout": layout, "form": "rotate_pairs", "order": "rows_first"}
        yield node("rotary_embedding", "x cos sin", [dtype], **pairs), tensors(dtype, x, table, table)
        half_table = (1, 512, 64)
        for form in "complex_halves", "complex_pairs", "complex_pairs_to_halves":
            half = node("rotary_embedding", "x cos sin", [dtype], layout=layout, form=form, size=128)
            yield half, tensors(dtype, x, half_table, half_table)
    for kind, count in ("int64", 64), ("int32", 5):
        inputs = [TensorSpec((2, 512), kind), TensorSpec((count,), "float32")]
        yield node("rotary_table", "positions frequencies", [dtype] * 2, angles="twice"), inputs
    part = {"layout": "packed", "form": "rotate_part", "heads": 8, "size": 128, "rotated": 32}
    for pitch in 384, 385:
        product = (2, 512, 8 * pitch)
        yield (
            node("rotary_embedding", "x cos sin", [dtype], x_offset=128, x_pitch=pitch, **part),
            tensors(dtype, product, (1, 512, 32), (1, 512, 32)),
        )
    small = (2, 512, 30)
    for interleaved in 0, 1:
        yield (
            node("rotary_embedding", "x cos sin", [dtype], form="operator", interleaved=interleaved, num_heads=8),
            tensors(dtype, (2, 512, 1024), small, small),
        )


def plan(case: tuple[FusedNode, list[TensorSpec]], device: Device) -> Plan:
    fused, inputs = case
    host = host_of(fused.fusion)
    assert host.supports(fused, [tensor.dtype for tensor in inputs], device) is None
    return host.candidates(fused, inputs, device)[0]


def candidates(case: tuple[FusedNode, list[TensorSpec]], device: Device) -> list[Plan]:
    """Return all plans of a node, of which no two are equal."""
    fused, inputs = case
    plans = host_of(fused.fusion).candidates(fused, inputs, device)
    assert len({repr(each) for each in plans}) == len(plans)
    return plans


@functools.cache
def kernels(device: Device) -> list[Kernel]:
    """Return the kernels of the cases: fp16 in full, rows in fp32, which needs more registers, some bf16."""
    cases = [*row_cases("float16"), *element_cases("float16"), *row_cases("float32")]
    cases += [*list(row_cases("bfloat16"))[:4], *list(element_cases("bfloat16"))[:4]]
    found = [step.kernel for case in cases for each in candidates(case, device) for step in each.steps]
    return list({(kernel.source, tuple(sorted(kernel.defines.items()))): kernel for kernel in found}.values())


def test_the_first_part_of_kernels_has_each_value_of_a_macro() -> None:
    kernels = [Kernel("a", "a", {"SIZE": i, "MASK": i % 2, "STAGES": i % 4}) for i in range(12)]
    kernels += [Kernel("b", "b", {"MASK": 1}, text=text) for text in ("x\ny", "x", "z")]
    parts = [covering(kernels, part, 3) for part in range(3)]
    assert sorted(repr(each) for part in parts for each in part) == sorted(map(repr, kernels))
    assert sorted(each.source for each in parts[0]) == [*"aaaabb"] and abs(len(parts[1]) - len(parts[2])) <= 1
    assert {each.defines.get("STAGES") for each in parts[0]} == {0, 1, 2, 3, None}
    assert {each.text for each in parts[0]} == {"", "x\ny", "z"}


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_without_spills(device: Device, part: int) -> None:
    for kernel in to_compile(device, kernels, part, PARTS):
        check_compiles(kernel, device, spills=0 if kernel.source in ROW_KERNELS else None)


def test_what_sources_tell_apart() -> None:
    """Kernels are compiled for one of the architectures that have the same instructions; see `to_compile`."""
    files = [path for folder in onnxfuse.kernels.__path__ for path in Path(folder).rglob("*.cu*")]
    assert len(files) > 40
    found = {text for path in files for text in re.findall(r"__CUDA_ARCH__[^\n)&|]*", path.read_text(encoding="utf-8"))}
    on_every_gpu = {"__CUDA_ARCH__ >= 750"}  # and not where kernels are emulated
    assert {text.strip() for text in found} - on_every_gpu == set(TOLD_APART)


@pytest.mark.parametrize("source", [*ROW_KERNELS, "activation", "gated_activation", "rotary_embedding"])
def test_compiles_for_the_architecture_itself(source: str) -> None:
    """Kernels compile for sm_90a, too, whose own instructions a kernel may ask for."""
    kernel = next(k for k in kernels(H200) if k.source == source)
    assert compile_cubin(dataclasses.replace(kernel, arch_specific=True), 90).code


THREADS_PER_MULTIPROCESSOR = {75: 1024, 86: 1536, 89: 1536, 120: 1536}  # elsewhere 2048
STATIC_BYTES = 2 * 32 * 8 * 3 * 4  # at most: two sets of partials of 32 warps in 8 blocks, with three numbers each


def any_rows(dtype: str) -> Iterator[tuple[FusedNode, list[TensorSpec]]]:
    """Yield every row kernel at every size at which its tiling might change."""
    lengths = sorted({2**i + more for i in range(20) for more in (-1, 0, 24)} | {20000, 40000, 100003, 4000000})
    for rows, length in itertools.product((1, 131, 264, 265, 600, 1056, 2112, 9001, 2**31 + 5), lengths):
        for aligned in (True, False):
            x, d = (rows, length), (length,)
            for fusion, operands, outputs in (
                ("layer_norm", "x scale bias", 1), ("rms_norm", "x scale", 1), ("softmax", "x", 1),
                ("add_layer_norm", "x residual scale bias", 2), ("add_rms_norm", "x residual scale", 1),
            ):  # fmt: skip
                shapes = [x if name in ("x", "residual") else d for name in operands.split()]
                yield node(fusion, operands, [dtype] * outputs), tensors(dtype, *shapes, aligned=aligned)
            channels = tensors(dtype, (rows, 1, length), (1,), (1,), aligned=aligned)
            yield node("group_norm", "x scale bias", [dtype], groups=1), channels


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_every_candidate_is_a_launch_that_the_device_takes(device: Device, dtype: str) -> None:
    for case in itertools.chain(row_cases(dtype), any_rows(dtype)):
        for step in [step for each in candidates(case, device) for step in each.steps]:
            assert isinstance(step, Launch)
            check_row_launch(step, device)


CHECKED = ("ROW", "WIDTH", "THREADS", "CHUNKS", "ROWS_PER_BLOCK", "CLUSTER", "IN_SHARED", "PERSISTENT", "MIN_BLOCKS")


def check_row_launch(step: Launch, device: Device) -> None:
    row, width, threads, chunks, side, cluster, in_shared, persistent, blocks = (
        int(step.kernel.defines[name]) for name in CHECKED
    )
    rows = step.arguments[-1].value
    all_threads = threads * side
    assert step.block == (threads, side, 1)
    assert all_threads <= 1024
    assert all_threads % 32 == 0, "a warp holds whole rows, and all its lanes take part in shuffles"
    assert blocks * all_threads <= THREADS_PER_MULTIPROCESSOR.get(device.arch, 2048)
    assert cluster == step.cluster <= (8 if device.arch >= 90 else 1)
    assert step.grid[0] % cluster == 0
    assert 0 < step.grid[0] <= 2**31 - 1
    assert step.shared + STATIC_BYTES <= device.shared_per_block
    assert row % width == 0
    batch = threads * cluster * chunks * width
    assert bool(step.shared) == bool(in_shared)
    assert not in_shared or step.shared * cluster >= row * 2
    assert persistent or in_shared or batch < row or step.grid[0] // cluster * side >= rows, "all rows have a block"


@pytest.mark.parametrize("count", [1, 3, 7, 8, 4095, 4096, 33759, 67584, 262144, 3145728, 3145729, 67108864])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_blocks_cover_elements(device: Device, dtype: str, count: int) -> None:
    (step,) = plan((node("activation", "x", [dtype], activation="silu"), tensors(dtype, (count,))), device).steps
    width, threads, chunks, rest, whole = (
        int(step.kernel.defines[name]) for name in ("WIDTH", "THREADS", "CHUNKS", "REST", "WHOLE")
    )
    vectors, blocks = count // width, step.grid[0] - rest
    assert step.block == (threads, 1, 1)
    assert bool(rest) == bool(count % width)
    assert (blocks - 1) * threads * chunks < vectors <= blocks * threads * chunks or vectors == blocks == 0
    assert bool(whole) == (vectors == blocks * threads * chunks)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0)])
def test_nothing_to_compute_is_no_launch(shape: tuple[int, int]) -> None:
    x = tensors("float16", shape)
    assert plan((node("rms_norm", "x scale", ["float16"]), [*x, *tensors("float16", shape[-1:])]), H200).steps == ()
    assert plan((node("softmax", "x", ["float16"]), x), H200).steps == ()
    assert plan((node("activation", "x", ["float16"], activation="silu"), x), H200).steps == ()


def test_a_dtype_without_a_kernel_is_refused_by_name() -> None:
    host = host_of("rms_norm")
    refusal = host.supports(node("rms_norm", "x scale", ["float16"]), ["float64", "float64"], DEVICES[0])
    assert refusal == "rms_norm: x is float64; the kernel takes float32, float16, bfloat16"


def test_shapes_that_do_not_fit_are_named() -> None:
    case = node("layer_norm", "x scale", ["float16"]), tensors("float16", (4, 8), (7,))
    with pytest.raises(ValueError, match=r"layer_norm: scale has shape \[7\]; required 8 elements"):
        plan(case, DEVICES[0])
