"""Kernels of regions at random pass NVRTC: every operator, dtype and map, of operands that lanes share or not."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
from architectures import DEVICES, H200
from region_drafts import FLOATS, NUMPY, RegionProgram, describe
from region_emulation import plan_of
from region_random import random_program
from small_tilings import small_tilings

pytest.importorskip("cuda.bindings.nvrtc", reason="compiling needs cuda-bindings and nvidia-cuda-nvrtc")

from region_texts import refused

from onnxfuse import region_operators as operators
from onnxfuse.runtime.nvrtc import compile_cubin
from onnxfuse.runtime.plan import Device, Kernel, Launch

RANDOM = 2400
AT_ONCE = 300  # programs of a test


def check(programs: dict[str, RegionProgram], device: Device, aligned: bool = True) -> None:
    """Check that the kernels of programs compile."""
    kernels = {
        f"{name}_{i}": step.kernel
        for name, program in programs.items()
        for i, step in enumerate(plan_of(program, device, aligned).steps)
        if isinstance(step, Launch)
    }
    found = refused(kernels, device.arch)
    texts = [f"{message}\n{describe(programs[entry.rpartition('_')[0]])}" for entry, message in found.items()]
    assert not found, f"{len(found)} of {len(kernels)} kernels do not compile:\n" + "\n".join(texts[:5])


@pytest.mark.parametrize("part", range(RANDOM // AT_ONCE))
def test_random_programs(part: int) -> None:
    """Half of them by the ways of many elements; vectors of multiples of 16 bytes in four fifths of them."""
    device = dataclasses.replace(DEVICES[part % len(DEVICES)], multiprocessors=132 if part % 4 else 2)
    first = part * AT_ONCE
    with small_tilings() if part % 2 else nullcontext():
        programs = {f"seed_{seed}": random_program(seed) for seed in range(first, first + AT_ONCE)}
        check(programs, device, part % 5 != 4)


ATTRIBUTES = {"Cast": [{"to": dtype} for dtype in operators.DTYPES], "Mod": [{"fmod": 0}, {"fmod": 1}],
              "BitShift": [{"direction": "LEFT"}, {"direction": "RIGHT"}],
              "QuantizeLinear": [{"to": to, "precision": each} for to in operators.QUANTIZED for each in FLOATS],
              "DequantizeLinear": [{"to": to} for to in FLOATS],
              "Gelu": [{"approximate": "none"}, {"approximate": "tanh"}]}  # fmt: skip
INPUTS = {"Where": 3, **dict.fromkeys(operators.QUANTIZERS, 3),
          **dict.fromkeys((*operators.ARITHMETIC, *operators.COMPARISONS, "BitShift"), 2),
          **dict.fromkeys(("And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor"), 2)}  # fmt: skip
SHAPES = [(12, 40), (40,), (12, 1), ()]  # of what lanes have, and of what they share


def operator_programs() -> dict[str, RegionProgram]:
    """Return each operator of elements in each dtype, of operands of which lanes share none, the first, or the last."""
    found = {}
    for op in sorted(operators.ELEMENTWISE):
        for dtype in operators.dtypes_of(op):
            for attributes in ATTRIBUTES.get(op, [{}]):
                for number, shape in enumerate(SHAPES):
                    program = RegionProgram()
                    count = INPUTS.get(op, 1)
                    shapes = [shape if i == number % count else SHAPES[0] for i in range(count)]
                    dtypes = ["bool" if op == "Where" and i == 0 else dtype for i in range(count)]
                    if op in operators.QUANTIZERS:
                        to = attributes["to"]
                        dtypes = [dtype, *((dtype, to) if op == "QuantizeLinear" else (to, dtype))]
                    given = [program.operand(np.ones(s, NUMPY[d])) for s, d in zip(shapes, dtypes, strict=True)]
                    result = attributes.get("to", "bool" if op in ("Not", "And", "Or", "Xor", "IsNaN", "IsInf") else "")
                    name = program.op(op, *given, dtype=result or ("" if op in operators.COMPARISONS else dtype),
                                      **attributes)  # fmt: skip
                    program.outputs = [program.op("Identity", name)]
                    found[f"{op}_{dtype}_{len(found)}"] = program
    return found


def reduction_programs() -> dict[str, RegionProgram]:
    """Return each reduction in each dtype, over rows and columns, and of gathered elements that lanes share."""
    found = {}
    for op in sorted(operators.REDUCTIONS):
        for dtype in operators.dtypes_of(op):
            for axis in (0, 1):
                program = RegionProgram()
                x, at = program.operand(np.ones((24, 40), NUMPY[dtype])), program.operand(np.ones((24, 1), np.int64))
                at = program.op("Expand", at, shape=[24, 40])
                x = program.op("GatherElements", x, at, axis=axis)
                keys = {"axes": [axis], "keepdims": 1} if op in operators.SUMS else {"axis": axis}
                keys |= {"keepdims": 1, "select_last_index": 0} if op in operators.EXTREMES else {}
                result = "int64" if op in operators.EXTREMES else dtype
                program.outputs = [program.op(op, x, dtype=result, **keys)]
                found[f"{op}_{dtype}_{axis}"] = program
    return found


@pytest.mark.parametrize("multiprocessors", [2, 132])
def test_every_operator_in_every_dtype(multiprocessors: int) -> None:
    check(operator_programs() | reduction_programs(), dataclasses.replace(H200, multiprocessors=multiprocessors))


@pytest.mark.parametrize("shape", [(16, 48, 1), (16, 1, 32), (48, 1), (1,), (16, 48, 32)], ids=str)
def test_places_that_lanes_share_are_numbers(shape: tuple[int, ...]) -> None:
    """Funnel and RT-DETR gather rows by GatherElements, whose places an Expand repeats along them: vectors are read."""
    program = RegionProgram()
    x, places = program.operand(np.zeros((16, 64, 32), np.float16)), program.operand(np.zeros(shape, np.int64))
    program.outputs = [program.op("GatherElements", x, program.op("Expand", places, shape=[16, 48, 32]), axis=1)]
    (step,) = plan_of(program, H200).steps
    assert isinstance(step, Launch) and compile_cubin(step.kernel, 90).code
    assert ("load(x0 + " in step.kernel.text) == (shape[-1] == 1)


def test_a_kernel_that_does_not_compile_is_named() -> None:
    kernels = {f"seed_{i}_0": next(iter(plan_of(random_program(i), H200).steps)).kernel for i in (1, 2)}
    broken = dataclasses.replace(kernels["seed_2_0"], text=kernels["seed_2_0"].text.replace("release_successor", "f"))
    found = refused({**kernels, "seed_2_0": broken}, 90)
    assert (
        isinstance(broken, Kernel)
        and list(found) == ["seed_2_0"]
        and 'identifier "f" is undefined' in found["seed_2_0"]
    )
