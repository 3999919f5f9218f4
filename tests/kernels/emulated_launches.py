"""Run the kernels of a plan on a CPU: their own sources, compiled as C++ with tests/native/blocks_emulated.h.

It shows wrong indices, and what is read before it is written; it cannot show how fast a kernel is.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from emulated_build import load

from onnxfuse.runtime.nvrtc import source_text
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer, Scalar

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
REPLACED = ("types.cuh", "cluster.cuh")  # headers in whose place blocks_emulated.h stands
C_TYPES: Mapping[str, Any] = {"int32": ctypes.c_int, "int64": ctypes.c_longlong, "float32": ctypes.c_float}
PARTS = re.compile(r'(?m)^#line \d+ "([^"]+)"\n')
SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
ARCHITECTURE = re.compile(r"__CUDA_ARCH__ >= \d+")  # the CPU takes what the oldest architecture does


def library(kernel: Kernel, folder: Path) -> ctypes.CDLL:
    """Compile a kernel; its function `launch` takes the grid, the block, the shared bytes, then the arguments."""
    names = ["", *PARTS.findall(source_text(kernel.source))]
    parts = zip(names, PARTS.split(source_text(kernel.source))[::2], strict=True)
    text = "".join(part for name, part in parts if name not in REPLACED)
    text = ARCHITECTURE.sub("0", re.sub(r"(?m)^#pragma.*$", "", text))
    dynamic = SHARED.findall(text)
    text = SHARED.sub("", text).replace("__shared__", "static")
    for kind, name in dynamic:
        text = f"#define {name} reinterpret_cast<{kind}*>(emulated::memory())\n{text}"
    entry = re.search(rf"\b{kernel.entry}\(([^)]*)\)\s*{{", text)
    assert entry is not None, f"{kernel.entry} is not defined in its file"
    names_of = [each.split()[-1].lstrip("*") for each in entry[1].split(",")]
    launch = (
        f'extern "C" void launch(const int* grid, const int* block, int shared, {entry[1]}) {{\n'
        "    emulated::launch({unsigned(grid[0]), unsigned(grid[1]), 1}, "
        "{unsigned(block[0]), unsigned(block[1]), unsigned(block[2])}, shared, "
        f"[=] {{ {kernel.entry}({', '.join(names_of)}); }});\n}}\n"
    )
    stem = f"{kernel.source}_{abs(hash(repr(kernel)))}"
    text = f'#include "blocks_emulated.h"\n{text}\n{launch}'
    return load(text, kernel.defines, ["-ffp-contract=off"], folder / f"{stem}.cc")


def emulate(plan: Plan, inputs: Sequence[np.ndarray], folder: Path, aligned: bool = True) -> list[np.ndarray]:
    """Run a plan; return its outputs, of which all that is not written is NaN, and around which nothing is written."""
    read = [_placed(each, aligned) for each in inputs]
    written = [_placed(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
    scratch = [_placed(np.full(size, 0xFF, np.uint8), True) for size in plan.scratch]
    buffers = {"input": read, "output": written, "scratch": scratch}
    for step in plan.steps:
        assert isinstance(step, Launch)
        arguments: list[Any] = []
        for each in step.arguments:
            if isinstance(each, Scalar):
                arguments.append(C_TYPES[each.type](each.value))
            else:
                assert isinstance(each, Pointer)
                arguments.append(ctypes.c_void_p(buffers[each.kind][each.index][1].ctypes.data + each.offset))
        grid, block = (ctypes.c_int * 3)(*step.grid), (ctypes.c_int * 3)(*step.block)
        library(step.kernel, folder).launch(grid, block, step.shared, *arguments)
    for whole, view in written:
        start = view.ctypes.data - whole.ctypes.data
        assert (whole[:start] == 0xFF).all(), "written before the beginning"
        assert (whole[start + view.nbytes :] == 0xFF).all(), "written beyond the end"
    return [view for _, view in written]


def _placed(array: np.ndarray, aligned: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes and, in them, a copy of the array from a multiple of 16 bytes on or, not aligned, one element on."""
    whole = np.full(array.nbytes + 64, 0xFF, np.uint8)
    start = -whole.ctypes.data % 16 + 16 + (0 if aligned else array.dtype.itemsize)
    view = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return whole, view
