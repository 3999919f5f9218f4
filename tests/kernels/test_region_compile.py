"""The generated kernels of regions compile for every architecture, in registers and quickly; no GPU needed."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

import numpy as np
import pytest
from architectures import DEVICES, H200, T4, to_compile
from kernel_hosts import host_of
from quick_regions import QUICK, first_launch
from region_block_cases import decoded, sines_and_cosines
from region_cases import POWERS, all_cases
from region_drafts import Made, RegionProgram, made, numbers, one
from region_emulation import plan_of
from region_speed_cases import layer_norm, masked_windows, mean_pooling, odd_windows, quantized, sums_of_rows
from sampling import by_parts, part_of

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")

from onnxfuse.runtime.nvrtc import compile_cubin
from onnxfuse.runtime.plan import Device, Launch, TensorSpec

CASES = all_cases()
PARTS = 64  # of the cases; a plain run plans and compiles one of them for each GPU
MAX_CODE_BYTES = 48_000  # of a region of QUICK; NVRTC 13.5 makes up to 37,504


@functools.cache
def launches(device: Device, part: int, of: int) -> Sequence[Launch]:
    plans = [plan_of(program, device) for program in part_of(list(CASES.values()), part, of)]
    return [step for plan in plans for step in plan.steps if isinstance(step, Launch)]


@by_parts(PARTS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: f"sm_{device.arch}")
def test_compiles_in_registers(device: Device, part: int) -> None:
    for kernel in to_compile(device, lambda each: [step.kernel for step in launches(each, part, PARTS)]):
        compiled = compile_cubin(kernel, device.arch)
        assert compiled.spill_stores + compiled.spill_loads == 0, f"spills on sm_{device.arch}: {kernel.text}"
        assert "warning" not in compiled.log, f"{compiled.log}\n{kernel.text}"


def test_texts_can_be_read() -> None:
    """Lines fit a screen, each operator is a line that names it, and nothing is written that says nothing."""
    for kernel in (step.kernel for name in list(CASES)[::12] for step in launches_of(CASES[name])):
        assert max(map(len, kernel.text.splitlines())) <= 120, kernel.text
        remnants = re.search(r"if \(1\)|if \(0\)|\(0\)|\+ -|float\(-?[\d.]+f\)|\+ \(\w+\)|\(\(\w+\)\)", kernel.text)
        assert remnants is None, f"{remnants}\n{kernel.text}"
    (step,) = launches_of(CASES["rotary embedding"])
    assert "v4[j] = x0_1[j] * x1_1[j];  // Mul" in step.kernel.text


def test_what_lies_as_it_is_stored_is_at_the_place_of_the_thread() -> None:
    (step,) = launches_of(CASES["rows and columns of images"])
    assert "load(x0 + (at * 4), x0_1);" in step.kernel.text and "put(0, y0 + (at * 4), " in step.kernel.text


def test_tensors_of_more_elements_than_a_word_counts() -> None:
    program = RegionProgram()
    program.outputs = [program.op("Transpose", program.operand(np.zeros((0, 0), np.float16)), perm=[1, 0])]
    (plan,) = host_of("region").candidates(program.node(), [TensorSpec((1 << 16, (1 << 16) + 8), "float16")], H200)
    (step,) = plan.steps
    assert isinstance(step, Launch) and "const long long at" in step.kernel.text
    assert "(long long)(u64(at) / 1024u)" in step.kernel.text  # without a sign
    assert compile_cubin(step.kernel, 90).spill_stores <= 0


@pytest.mark.parametrize("shape", [(64, 1024), (13, 197, 1025)], ids=str)
def test_whole_vectors_are_read_where_counts_are_odd(shape: tuple[int, ...]) -> None:
    program = RegionProgram()
    x, y = (program.operand(np.zeros(shape, np.float16)) for _ in range(2))
    program.outputs = [program.op("Add", x, y)]
    (plan,) = host_of("region").candidates(program.node(), program.specs(), T4)
    (step,) = plan.steps
    assert isinstance(step, Launch) and "load(x0" in step.kernel.text and "put(" in step.kernel.text


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_mask_does_not_narrow_the_vectors_of_scores(dtype: str) -> None:
    """One of 64 bits, which takes many lines, is read once for eight rows."""
    program = RegionProgram()
    x, mask = program.operand(np.zeros((128, 256, 512), np.float16)), program.operand(np.zeros(512, dtype))
    chosen = program.op("Cast", mask, dtype="bool", to="bool")
    program.outputs = [program.op("Where", chosen, x, program.op("Neg", x), dtype="float16")]
    (step,) = launches_of(program)
    repeats = 8 if dtype == "int64" else 1
    before, *behind = step.kernel.text.split("for (int k = 0; k < 8; ++k)")
    assert "load(x1 + o" in before and len(behind) == repeats // 8
    assert step.grid[0] == 128 * 256 * 512 // (repeats * 8 * 128)


def test_elements_lie_apart_where_a_warp_then_reads_fewer_lines() -> None:
    """Rows are too few for a thread to have several."""
    program = RegionProgram()
    x, mask = program.operand(np.zeros((64, 64, 512), np.float16)), program.operand(np.zeros(512, np.int64))
    chosen = program.op("Cast", mask, dtype="bool", to="bool")
    program.outputs = [program.op("Where", chosen, x, program.op("Neg", x), dtype="float16")]
    (step,) = launches_of(program)
    assert "EACH(8) at[j] = first + j * 128;" in step.kernel.text and step.grid[0] == 64 * 64 * 512 // (8 * 128)


@pytest.mark.parametrize("computed", [False, True])
def test_lanes_choose_among_the_parts_of_a_concat(computed: bool) -> None:
    """One load, where all parts are read as they are; else a load of each, of the lanes that need it."""
    program = RegionProgram()
    x, y = (program.operand(np.zeros((4096, columns), np.float16)) for columns in (384, 1))
    program.outputs = [program.op("Concat", program.op("Neg", y) if computed else y, x, axis=1)]
    (step,) = launches_of(program)
    assert "if (o1" not in step.kernel.text
    assert ("[j] ? x0_1[j] : v0[j]" if computed else "load_one(o1[j] < 1 ? x1 + ") in step.kernel.text
    assert step.grid[0] == -(-4096 * 385 // (8 * 128))


def test_operands_are_read_once_for_outputs_of_several_shapes() -> None:
    program = RegionProgram()
    x = program.operand(np.zeros((1024, 96, 112), np.float16))
    clipped = program.op("Relu", x)
    mean = program.op("ReduceMean", clipped, axes=[2], keepdims=0)
    program.outputs = [clipped, program.op("Reshape", clipped, shape=[0, 1, 96, 112]), mean]
    (step,) = launches_of(program)
    assert step.kernel.text.count("load(x0") == 1


def test_what_lies_as_it_is_stored_does_not_go_through_a_tile() -> None:
    """ConvNeXt's layer scale: the residual is channels-first, read with all else, and added when the tile is stored."""
    program = RegionProgram()
    shapes = [(16, 56, 56, 96), (96,), (16, 96, 56, 56)]
    x, gamma, residual = (program.operand(np.zeros(shape, np.float16)) for shape in shapes)
    turned = program.op("Transpose", program.op("Mul", x, gamma), perm=[0, 3, 1, 2])
    program.outputs = [program.op("Add", turned, residual)]
    (step,) = launches_of(program)
    read, stored = step.kernel.text.split("__syncthreads();")
    assert all(f"load(x{i}" in read for i in range(3)) and "load" not in stored
    assert re.search(r"= v1\w*\[j\] \+ x2_1\[k\]\[j\]", stored)


def test_threads_read_side_by_side_where_a_reduction_is_not_over_the_last_axis() -> None:
    program = RegionProgram()
    x, mask = program.operand(np.zeros((256, 128, 48), np.float16)), program.operand(np.zeros((256, 128, 1), np.int64))
    program.outputs = [mean_pooling(program, x, mask)]
    (step,) = launches_of(program)
    assert "merge_columns" in step.kernel.text and "load(x1" not in step.kernel.text
    assert "load(x0 + (48 * r2_0 + 6144 * o0 + o1)" in step.kernel.text


@pytest.mark.parametrize("last", [7, 14, 49, 85], ids=str)
def test_vectors_lie_across_short_and_odd_rows(last: int) -> None:
    program = RegionProgram()
    shapes = [(240, 196, last), (240, 1, last), (196, 1)]
    x, row, column = (program.operand(np.zeros(shape, np.float16)) for shape in shapes)
    program.outputs = [program.op("Add", program.op("Add", x, row), column)]
    (step,) = launches_of(program)
    assert "load(x0 + e, " in step.kernel.text and "put(0, y0 + e, " in step.kernel.text
    assert step.grid[0] == -(-240 * 196 * last // (8 * 128))


def gathered_sums(p: RegionProgram, x: str, place: str) -> list[str]:
    lengths = p.op("ReduceL2", x, axes=[0], keepdims=1)
    sums = p.op("ReduceLogSumExp", lengths, axes=[1], keepdims=1)
    none = p.op("Slice", sums, axes=[0], starts=[3], ends=[1], steps=[3])
    return [p.op("Abs", lengths), none, p.op("Gather", sums, place, axis=1)]


def means_of_means(p: RegionProgram, x: str, condition: str, other: str) -> list[str]:
    means = p.op("ReduceMean", x, axes=[2], keepdims=1)
    lengths = p.op("ReduceL2", means, axes=[0, 1], keepdims=1)
    whole = p.op("Where", condition, x, other, dtype="bfloat16")
    return [whole, lengths, p.op("ReduceMean", means, axes=[3], keepdims=1)]


def least_sum(p: RegionProgram, x: str, place: str, condition: str) -> list[str]:
    sums = p.op("ReduceSum", x, axes=[0, 1], keepdims=1)
    least = p.op("ReduceMin", sums, axes=[2], keepdims=0)
    largest = p.op("Max", p.op("Gather", least, place, axis=1), sums)
    return [p.op("Reshape", largest, shape=[16]), p.op("Where", condition, p.op("Abs", least), least, dtype="int32")]


def sum_of_lengths(p: RegionProgram, x: str) -> list[str]:
    split = p.op("Reshape", x, shape=[2, 2, 4, 3, 4])
    lengths = p.op("ReduceL2", split, axes=[1, 2], keepdims=1)
    sums = p.op("ReduceSum", lengths, axes=[0, 1], keepdims=1)
    best = p.op("ArgMax", split, dtype="int64", axis=1, keepdims=1, select_last_index=0)
    return [best, p.op("Sqrt", lengths), p.op("Transpose", sums, perm=[3, 0, 1, 4, 2])]


PLACE = np.array(0)
IN_PLACE = [
    (132, made("gathered sums", [numbers((6, 12)), PLACE], gathered_sums, (12, 6))),
    (2, made("means of means", [numbers((1, 8, 3, 16), "bfloat16"), numbers((16,), "bool", 1, 0, 1),
                                numbers((1, 1, 1, 16), "bfloat16")], means_of_means)),
    (2, made("the least sum", [numbers((2, 6, 16), "int32"), PLACE, numbers((1,), "bool")], least_sum, (16, 2, 6))),
    (132, made("the sum of lengths", [numbers((4, 4, 12))], sum_of_lengths, (4, 12))),
]  # fmt: skip


@pytest.mark.parametrize(("multiprocessors", "case"), IN_PLACE, ids=[name for _, (name, _) in IN_PLACE])
def test_what_a_reduction_in_place_reads_is_not_read_ahead(multiprocessors: int, case: Made) -> None:
    """It depends on the variables of a loop of its own."""
    device = dataclasses.replace(H200, multiprocessors=multiprocessors)
    for aligned in (True, False):
        for step in plan_of(case[1], device, aligned).steps:
            assert isinstance(step, Launch) and compile_cubin(step.kernel, 90).code


def test_biases_and_masks_of_odd_windows_are_read_once_for_all_images() -> None:
    """Swin's shifted windows of 49 places: vectors lie across rows, and a thread loads those of all images first."""
    program = RegionProgram()
    program.outputs = [masked_windows(program, *map(program.operand, odd_windows(8, 64, 49)))]
    (step,) = launches_of(program)
    _, once, stored = step.kernel.text.split("for (int k = 0; k < 8; ++k)")
    assert "load(x0 + (" in once and "load_one" in once and "load" not in stored and "put(0, y0 + (" in stored
    assert step.grid[0] == -(-8 * 64 * 3 * 49 * 49 // (8 * 8 * 128))


def test_powers_of_small_numbers_are_products_and_roots() -> None:
    """powf takes ten times their instructions."""
    for exponent in POWERS:
        assert all("powf" not in step.kernel.text for step in launches_of(CASES[f"Pow {exponent}"]))
    assert all("powf" in step.kernel.text for step in launches_of(CASES["Pow"]))


def test_sin_and_cos_of_an_angle_reduce_it_once() -> None:
    (step,) = launches_of(CASES["Sin and Cos of the same angles"])
    assert step.kernel.text.count("= angle(") == 1
    assert "= sine(angle_of_x0_1[j]);  // Sin" in step.kernel.text
    assert "= cosine(angle_of_x0_1[j]);  // Cos" in step.kernel.text


def test_sin_of_a_row_in_registers_has_an_array_of_angles() -> None:
    (step,) = launches_of(CASES["a softmax of sines"])
    assert "EACH(8) angle_of_held0_0[j] = angle(held0_0[k][j]);" in step.kernel.text
    compile_cubin(step.kernel, 90)


@pytest.mark.parametrize("keepdims", [0, 1])
def test_rows_are_read_once_for_all_outputs(keepdims: int) -> None:
    program = RegionProgram()
    x = program.operand(np.zeros((5000, 4096), np.float16))
    program.outputs = list(quantized(program, x, 1, keepdims))
    (step,) = launches_of(program)
    assert step.grid[0] == 5000 and step.kernel.text.count("load(x0") == 1


def test_rows_are_read_once_for_all_reductions_that_are_stored() -> None:
    """The mean and the variance of rows, of which some are gathered."""
    program = RegionProgram()
    x, places = program.operand(np.zeros((5000, 512), np.float16)), program.operand(np.zeros(3, np.int64))
    program.outputs = [program.op("Gather", layer_norm(program, x, [1]), places, axis=0)]
    first, second = launches_of(program)
    assert first.kernel.text.count("load(x0") == 1 and first.kernel.text.count("store_accumulator") == 2
    assert second.grid[0] * second.block[0] * 2 == 3 * 512


def test_rows_are_read_once_for_outputs_with_other_axes() -> None:
    program = RegionProgram()
    program.outputs = list(sums_of_rows(program, program.operand(np.zeros((64, 384, 64), np.float16))))
    (step,) = launches_of(program)
    assert step.grid[0] * step.block[0] == 8 * 64 * 384 and step.kernel.text.count("load(x0") == 1


def test_tiles_are_read_and_stored_by_vectors() -> None:
    program = RegionProgram()
    x = program.operand(np.zeros((128, 512, 520), np.float16))
    program.outputs = [program.op("Transpose", x, perm=[0, 2, 1])]
    (step,) = launches_of(program)
    read, stored = step.kernel.text.split("__syncthreads();")
    assert "float x0_1[8]; load(x0 + (" in read and "put(1, y0 + (" in stored
    assert step.grid[0] == 128 * (512 // 64) * -(-520 // 64)


def test_short_axes_that_are_read_side_by_side_are_read_at_once() -> None:
    """The patches of DiT: eight channels are one load, and a store of each is side by side with those of a warp."""
    (step,) = launches_of(
        one("", "Transpose", np.zeros((256, 16, 16, 2, 2, 8), np.float16), perm=[0, 5, 1, 3, 2, 4])[1]
    )
    assert "load(x0 + (" in step.kernel.text and "EACH(8) put_one(0, y0 + (" in step.kernel.text
    assert step.grid[0] * step.block[0] == 256 * 32 * 32


@pytest.mark.parametrize(("last", "blocks"), [(16, 6), (40, 16), (96, 36)])
def test_tiles_have_as_many_elements_as_short_axes(last: int, blocks: int) -> None:
    """So that no thread is without elements."""
    program = RegionProgram()
    program.outputs = [program.op("Transpose", program.operand(np.zeros((96, 384, last), np.float32)), perm=[0, 2, 1])]
    (step,) = launches_of(program)
    assert step.grid[0] == 96 * blocks


def test_tiles_of_few_elements_are_small() -> None:
    """The scores of DeBERTa: 1.6M elements are in 12 blocks for each multiprocessor."""
    program = RegionProgram()
    x, y = (program.operand(np.zeros((96, 128, 128), np.float16)) for _ in range(2))
    program.outputs = [program.op("Add", y, program.op("Transpose", x, perm=[0, 2, 1]))]
    (step,) = launches_of(program)
    assert step.grid[0] == 96 * 16


def test_rows_of_odd_lengths_are_read_by_vectors() -> None:
    program = RegionProgram()
    x = program.operand(np.zeros((256, 50257), np.float16))
    program.outputs = [program.op("ArgMax", x, dtype="int64", axis=1, keepdims=0, select_last_index=0)]
    (step,) = launches_of(program)
    assert "load(x0 + (50257 * o0 + r2_0), " in step.kernel.text and step.grid[0] == 256


@pytest.mark.parametrize(("dtype", "length", "threads"), [("float16", 50257, 512), ("float32", 12288, 256)])
def test_long_rows_are_read_once(dtype: str, length: int, threads: int) -> None:
    """Shared memory keeps them from the loop that reduces to the one that stores, of several blocks if they fit."""
    (step,) = launches_of(one("", "LogSoftmax", np.zeros((512, length), dtype), axis=1)[1])
    assert abs(step.shared - length * np.dtype(dtype).itemsize) < 16
    assert step.block[0] == threads and "load(x0" not in step.kernel.text
    assert compile_cubin(step.kernel, 90).registers <= 65536 // 1024


def test_rows_that_exceed_shared_memory_are_read_again() -> None:
    (step,) = launches_of(one("", "Softmax", np.zeros((512, 60000), np.float32), axis=1)[1])
    assert step.shared == 0 and step.kernel.text.count("load(x0") == 4  # two loops, each in whole batches and a rest


def test_rows_are_read_again_beside_blocks_that_need_no_shared_memory() -> None:
    program = RegionProgram()
    x, other = program.operand(np.zeros((512, 12288), np.float32)), program.operand(np.zeros((7, 9), np.float16))
    program.outputs = [program.op("Softmax", x, axis=1), program.op("Neg", other)]
    (step,) = launches_of(program)
    assert step.shared == 0 and step.grid[0] == 512 + 1


def test_planes_that_become_the_last_axis_are_read_and_stored_by_vectors() -> None:
    """The patches of an MAE: a thread has three vectors of eight, and its block exchanges what they become."""
    program = RegionProgram()
    split = program.op(
        "Reshape", program.operand(np.zeros((32, 3, 224, 224), np.float16)), shape=[-1, 3, 14, 16, 14, 16]
    )
    program.outputs = [program.op("Transpose", split, perm=[0, 2, 4, 3, 5, 1])]
    (step,) = launches_of(program)
    assert "load(x0 + (" in step.kernel.text and "put_by_block<8, 128>" in step.kernel.text
    assert step.grid[0] * step.block[0] * 24 == 32 * 3 * 224 * 224


def test_a_thread_computes_one_part_of_a_short_concat() -> None:
    """A branch on a number that the compiler knows: no thread computes sines and cosines of the same element."""
    program = RegionProgram()
    x, powers = program.operand(np.zeros((196608, 1), np.float32)), program.operand(np.zeros(10, np.float32))
    program.outputs = [sines_and_cosines(program, x, powers)]
    (step,) = launches_of(program)
    assert "if (o1 < 10) {" in step.kernel.text and step.kernel.text.count("load_one(x0") == 1


def test_vectors_choose_no_part_where_one_prevails() -> None:
    """The boxes of a YOLO: a thread stores one of the 4 elements in 85 that are not a plain sigmoid."""
    program = RegionProgram()
    x, grid = program.operand(np.zeros((8, 19200, 85), np.float16)), program.operand(np.zeros((19200, 1), np.float16))
    program.outputs = [decoded(program, x, grid, (2, 2, 81))]
    (step,) = launches_of(program)
    before, behind = step.kernel.text.split("__syncthreads();")
    assert "put(1, y0 + e, " in before and "put_one(1, y0 + e, " in behind
    assert before.count("bool ") == before.count("bool is_other1 ") == 1


def test_a_warp_has_several_short_rows() -> None:
    program = RegionProgram()
    program.outputs = [program.op("Softmax", program.operand(np.zeros((40000, 32), np.float16)), axis=1)]
    (step,) = launches_of(program)
    assert "merge_warp<4>" in step.kernel.text and step.grid[0] * step.block[0] == 4 * 40000


def launches_of(program: RegionProgram) -> list[Launch]:
    (plan,) = host_of("region").candidates(program.node(), program.specs(), H200)
    return [step for step in plan.steps if isinstance(step, Launch)]


def test_every_launch_is_one_that_the_device_takes() -> None:
    for step in launches(H200, 0, 1):
        assert 0 < step.grid[0] <= 2**31 - 1 and step.grid[1:] == (1, 1) and step.block[0] <= 1024
        assert step.pdl


@pytest.mark.parametrize("name", QUICK)
def test_a_region_has_little_machine_code(name: str) -> None:
    """Vectors are narrower, and loops not unrolled, where a text would have thousands of instructions.

    The bytes stand for the seconds that the kernel takes to compile; with twice the instructions they were 66,000.
    """
    assert len(compile_cubin(first_launch(QUICK[name]).kernel, 90).code) < MAX_CODE_BYTES
