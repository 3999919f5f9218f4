"""Run the kernels of a plan on a CPU: their own sources, compiled as C++ with tests/native/blocks_emulated.h.

It shows wrong indices, and what is read before it is written; it cannot show how fast a kernel is.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from emulated_build import load

from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Kernel, Launch, Plan, Pointer, Scalar, TensorSpec

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
REPLACED = ("types.cuh", "cluster.cuh")  # headers in whose place blocks_emulated.h stands
C_TYPES: Mapping[str, Any] = {"int32": ctypes.c_int, "int64": ctypes.c_longlong, "float32": ctypes.c_float}
PARTS = re.compile(r'(?m)^#line \d+ "([^"]+)"\n')
SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
ARCHITECTURE = re.compile(r"__CUDA_ARCH__ >= \d+")  # the CPU takes what the oldest architecture does


def library(kernel: Kernel, folder: Path) -> Any:
    """Compile a kernel; return a function that takes the grid, the block, the shared bytes, then the arguments."""
    text = as_c_plus_plus(kernel_text(kernel))
    stem = f"{kernel.source}_{abs(hash(repr(kernel)))}"
    text = f'#include "blocks_emulated.h"\n{text}\n{launcher(kernel.entry, text, "launch")}'
    return load(text, kernel.defines, ["-ffp-contract=off"], folder / f"{stem}.cc").launch


def as_c_plus_plus(whole: str) -> str:
    """Return a kernel's text for the CPU, without the headers in whose place blocks_emulated.h stands."""
    parts = zip(["", *PARTS.findall(whole)], PARTS.split(whole)[::2], strict=True)
    text = "".join(part for name, part in parts if name not in REPLACED)
    text = ARCHITECTURE.sub("0", re.sub(r"(?m)^#pragma.*$", "", text))
    dynamic = SHARED.findall(text)
    text = SHARED.sub("", text).replace("__shared__", "static")
    for kind, name in dynamic:
        text = f"#define {name} reinterpret_cast<{kind}*>(emulated::memory())\n{text}"
    return text


def launcher(name: str, text: str, launch: str) -> str:
    """Return a function `launch` that runs all blocks of a kernel, which the text defines."""
    entry = re.search(rf"\b{name}\(([^)]*)\)\s*{{", text)
    assert entry is not None, f"{name} is not defined in its file"
    behind = re.search(r"(?m)^#define PROGRAM_PARAMETERS(.*)$", text)
    parameters = entry[1].replace("PROGRAM_PARAMETERS", behind[1] if behind else "")
    names_of = [each.split()[-1].lstrip("*") for each in parameters.split(",")]
    return (
        f'extern "C" void {launch}(const int* grid, const int* block, int shared, {parameters}) {{\n'
        "    emulated::launch({unsigned(grid[0]), unsigned(grid[1]), 1}, "
        "{unsigned(block[0]), unsigned(block[1]), unsigned(block[2])}, shared, "
        f"[=] {{ {name}({', '.join(names_of)}); }});\n}}\n"
    )


def emulate(
    plan: Plan,
    inputs: Sequence[np.ndarray],
    folder: Path,
    aligned: bool = True,
    find: Callable[[Kernel, Path], Any] = library,
) -> list[np.ndarray]:
    """Run a plan; return its outputs, of which all that is not written is NaN, and around which nothing is written.

    `find` returns what launches a kernel.
    """
    read = [_placed(each, aligned) for each in inputs]
    written = [_placed(_unwritten(spec), aligned) for spec in plan.outputs]
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
        find(step.kernel, folder)(grid, block, step.shared, *arguments)
    for whole, view in written:
        start = view.ctypes.data - whole.ctypes.data
        assert (whole[:start] == 0xFF).all(), "written before the beginning"
        assert (whole[start + view.nbytes :] == 0xFF).all(), "written beyond the end"
    return [view for _, view in written]


def _unwritten(spec: TensorSpec) -> np.ndarray:
    dtype = NUMPY.get(spec.dtype) or np.dtype(spec.dtype)
    return np.full(spec.shape, np.nan if spec.dtype in NUMPY or dtype.kind == "f" else 1, dtype)


def _placed(array: np.ndarray, aligned: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes and, in them, a copy of the array from a multiple of 16 bytes on or, not aligned, one element on."""
    whole = np.full(array.nbytes + 64, 0xFF, np.uint8)
    start = -whole.ctypes.data % 16 + 16 + (0 if aligned else array.dtype.itemsize)
    view = whole[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return whole, view
