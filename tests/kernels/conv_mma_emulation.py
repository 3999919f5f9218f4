"""Run kernels that multiply by mma.sync on the CPU: their own sources and launches.

The stand-ins of conv_mma_emulated.h take the place of instructions.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from conv_cases import NUMPY, ConvCase
from conv_emulation import STOOD_IN, placed

from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import pointers_to, value_of

ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Of sums in fp32, relative to the sum of their terms' magnitudes; with TF32, two operands are rounded.
SUMS = {"fp32": 2e-6, "tf32": 2.0**-10}


def text_of(kernel: Kernel) -> str:
    """Return the kernel's source without the headers that are replaced, and with its shared memory replaced."""
    parts = re.split(r'(?m)^#line \d+ "([^"]+)"\n', kernel_text(kernel))
    kept = (part for name, part in zip(parts[1::2], parts[2::2], strict=True) if name not in STOOD_IN)
    memory = r"extern __shared__ __align__\(\d+\) char memory\[\];"
    return re.sub(memory, "char* memory = emulated::memory;", parts[0] + "".join(kept))


def library(kernel: Kernel, text: str, device: Device, at_once: bool, folder: Path) -> ctypes.CDLL:
    """Compile a kernel, whose source `text_of` or a function like it has returned."""
    macros = "".join(f"#define {name} {value}\n" for name, value in kernel.defines.items())  # the header has such names
    whole = (
        f'#include "conv_mma_emulated.h"\n{macros}{text}\n'
        'extern "C" void allow(const char* start, i64 bytes) { emulated::allow(start, bytes); }\n'
        'extern "C" void run(const void* const* arguments, const int* grid, int threads, int shared) {\n'
        f"    launch_all({kernel.entry}, arguments, grid, threads, shared);\n}}\n"
    )
    emulated = {"EMULATED_ARCH": 10 * device.arch, "COPIES_AT_ONCE": int(at_once)}
    return load(whole, emulated, [], folder / f"{kernel.source}.cc")


def launch(
    step: Launch,
    arrays: dict[Pointer, np.ndarray],
    device: Device,
    at_once: bool,
    folder: Path,
    text: Callable[[Kernel], str] = text_of,
) -> None:
    loaded = library(step.kernel, text(step.kernel), device, at_once, folder)
    for array in arrays.values():
        loaded.allow(ctypes.c_void_p(array.ctypes.data), ctypes.c_longlong(array.nbytes))
    values = [value_of(each, lambda to: arrays[to].ctypes.data) for each in step.arguments]
    loaded.run(pointers_to(values), (ctypes.c_int * 3)(*step.grid), step.block[0], step.shared)


def check_emulated(
    case: ConvCase, way: Implementation, device: Device, *, exact: bool, at_once: bool, folder: Path
) -> None:
    """Compare what an implementation computes with float64; `exact`: it does not round float32 to TF32."""
    arrays = case.arrays()
    given = {Pointer("input", i): placed(value, case.aligned) for i, value in enumerate(arrays.values())}
    y = placed(np.full((case.n, *case.y_sizes, case.m), np.nan, NUMPY[case.dtype]), case.aligned)
    given[Pointer("output", 0)] = y
    for i, size in enumerate(way.scratch):
        given[Pointer("scratch", i)] = placed(np.full(size // 4, np.nan, np.float32), True)
    for step in way.steps:
        assert isinstance(step, Launch)
        launch(step, given, device, at_once, folder)
    expected, magnitude = case.expect(arrays)
    tf32 = case.dtype == "float32" and not exact
    slack = SUMS["tf32" if tf32 else "fp32"] * magnitude + 1e-6 * np.abs(expected)
    excess = np.abs(y.astype(np.float64) - expected) - (slack + 1.02 * ROUNDING[case.dtype] * np.abs(expected) + 1e-7)
    place = np.unravel_index(np.nan_to_num(excess, nan=np.inf).argmax(), excess.shape)
    assert (excess <= 0).all(), f"at {place}: {y[place]}, expected {expected[place]}; {(~(excess <= 0)).sum()} wrong"
