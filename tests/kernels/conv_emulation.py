"""Run a convolution kernel on the CPU: its own source and launch, with the stand-ins of cuda_emulated.h."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from conv_cases import NUMPY, ConvCase

from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Kernel, Launch, Pointer
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import pointers_to, value_of

# A GPU stops at a misaligned access; so does the emulation: in its stand-ins, and by these flags everywhere else.
ALIGNMENT = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
STOOD_IN = ("types.cuh", "gemm_multiply.cuh", "packed_words.cuh")  # headers that cuda_emulated.h replaces


def library(step: Launch, folder: Path) -> ctypes.CDLL:
    text = (
        f'#include "cuda_emulated.h"\n{text_of(step.kernel)}\n'
        'extern "C" void allow(const char* start, i64 bytes) { emulated::allow(start, bytes); }\n'
        'extern "C" void run(int grid_x, int grid_y, int threads, int shared, const void* const* arguments) {\n'
        "    emulated::launch(grid_x, grid_y, threads, shared, "
        f"[=] {{ emulated::call({step.kernel.entry}, arguments); }});\n}}\n"
    )
    return load(text, step.kernel.defines, ALIGNMENT, folder / "kernel.cc")


def text_of(kernel: Kernel) -> str:
    """Return the kernel's source without the headers that are replaced, and with its shared memory replaced."""
    parts = re.split(r'(?m)^#line \d+ "([^"]+)"\n', kernel_text(kernel))
    text = parts[0] + "".join(part for name, part in zip(parts[1::2], parts[2::2], strict=True) if name not in STOOD_IN)
    text, count = re.subn(
        r"extern __shared__ __align__\(\d+\) char memory\[\];", "char* memory = emulated::memory;", text
    )
    assert count <= 1, "at most one declaration of dynamic shared memory"
    return text


def placed(values: np.ndarray, aligned: bool) -> np.ndarray:
    """Return a copy that begins at a multiple of 16 bytes, or one element behind it."""
    buffer = np.zeros(values.size + 16, values.dtype)
    skip = -buffer.ctypes.data % 16 // values.itemsize + (0 if aligned else 1)
    copy = buffer[skip : skip + values.size].reshape(values.shape)
    copy[...] = values
    return copy


def run_emulated(case: ConvCase, way: Implementation, arrays: dict[str, np.ndarray], folder: Path) -> np.ndarray:
    """Run the one launch of an implementation, and return y."""
    (step,) = way.steps
    assert isinstance(step, Launch)
    inputs = [placed(value, case.aligned) for value in arrays.values()]
    y = placed(np.full((case.n, *case.y_sizes, case.m), np.nan, NUMPY[case.dtype]), case.aligned)
    launch_emulated(step, inputs, [y], folder)
    return y


def launch_emulated(step: Launch, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], folder: Path) -> None:
    """Run a launch, which writes the outputs."""
    loaded = library(step, folder)
    for each in (*inputs, *outputs):
        loaded.allow(ctypes.c_void_p(each.ctypes.data), ctypes.c_longlong(each.nbytes))

    def address(to: Pointer) -> int:
        return (outputs if to.kind == "output" else inputs)[to.index].ctypes.data

    values = [value_of(each, address) for each in step.arguments]
    loaded.run(*step.grid[:2], step.block[0], step.shared, pointers_to(values))
