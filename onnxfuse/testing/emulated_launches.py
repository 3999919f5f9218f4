"""Run the kernels of a plan on a CPU: their own sources, compiled as C++ with native/blocks_emulated.h.

It shows wrong indices, and reads of memory that was not written; it cannot show how fast a kernel is.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Argument, Kernel, Launch, Plan, Pointer, Scalar, Struct, TensorSpec
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.triton_interpreter import interpret

NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
REPLACED = ("types.cuh", "packed_words.cuh", "cluster.cuh")  # headers that blocks_emulated.h replaces
C_TYPES: Mapping[str, Any] = {"int32": ctypes.c_int, "int64": ctypes.c_longlong, "float32": ctypes.c_float}
PARTS = re.compile(r'(?m)^#line \d+ "([^"]+)"\n')
SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
ARCHITECTURE = re.compile(r"__CUDA_ARCH__ >= \d+")  # the CPU compiles the code for the oldest architecture


def library(kernel: Kernel, folder: Path, *flags: str) -> Any:
    """Compile a kernel with these flags, too; return a function that `launch` calls."""
    text = as_c_plus_plus(kernel_text(kernel))
    stem = f"{kernel.source}_{abs(hash(repr(kernel)))}"
    text = f'#include "blocks_emulated.h"\n{text}\n{launcher(kernel.entry, "launch")}'
    return load(text, kernel.defines, ["-ffp-contract=off", *flags], folder / f"{stem}.cc").launch


def as_c_plus_plus(whole: str, replaced: Sequence[str] = REPLACED) -> str:
    """Return a kernel's text for the CPU, without the headers `replaced`, which other headers emulate."""
    parts = zip(["", *PARTS.findall(whole)], PARTS.split(whole)[::2], strict=True)
    text = "".join(part for name, part in parts if name not in replaced)
    text = ARCHITECTURE.sub("0", re.sub(r"(?m)^#pragma.*$", "", text))
    dynamic = SHARED.findall(text)
    text = SHARED.sub("", text).replace("__shared__", "static")
    for kind, name in dynamic:
        text = f"#define {name} reinterpret_cast<{kind}*>(emulated::memory())\n{text}"
    return text


def launcher(kernel: str, name: str) -> str:
    """Return a function of that name that runs all blocks of a kernel."""
    return (
        f'extern "C" void {name}(const int* grid, const int* block, int shared, const void* const* arguments) {{\n'
        "    emulated::launch({u32(grid[0]), u32(grid[1]), 1}, {u32(block[0]), u32(block[1]), u32(block[2])}, CLUSTER, "
        f"shared, [](const void* const* all) {{ emulated::call({kernel}, all); }}, arguments);\n}}\n"
    )


def value_of(argument: Argument, address: Callable[[Pointer], int]) -> Any:
    """Return an argument other than a tensor map as cuLaunchKernel reads it; `address` says where pointers point."""
    if isinstance(argument, Pointer):
        return ctypes.c_void_p(address(argument))
    if isinstance(argument, Scalar):
        return C_TYPES[argument.type](argument.value)
    assert isinstance(argument, Struct)
    values = [value_of(field, address) for field in argument.fields]
    fields = [(f"field_{i}", type(value)) for i, value in enumerate(values)]
    return type("Fields", (ctypes.Structure,), {"_fields_": fields})(*values)


def pointers_to(values: Sequence[Any]) -> Any:
    """Return an array of pointers to the values of arguments, which must outlive it."""
    return (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))


def launch(step: Launch, function: Any, address: Callable[[Pointer], int]) -> None:
    """Run a launch by a function that `launcher` wrote."""
    values = [value_of(each, address) for each in step.arguments]
    grid, block = (ctypes.c_int * 3)(*step.grid), (ctypes.c_int * 3)(*step.block)
    function(grid, block, step.shared, pointers_to(values))


def emulate(
    plan: Plan,
    inputs: Sequence[np.ndarray],
    folder: Path,
    aligned: bool = True,
    find: Callable[[Kernel, Path], Any] = library,
) -> list[np.ndarray]:
    """Run a plan; return its outputs.  Elements that no kernel writes are NaN, or 1 in dtypes of 8 bits and integers.

    `find` returns the function that `launch` calls for a kernel.  Raises AssertionError if memory around an output is
    written.
    """
    read = [_placed(each, aligned) for each in inputs]
    written = [_placed(_unwritten(spec), aligned) for spec in plan.outputs]
    scratch = [_placed(np.full(size, 0xFF, np.uint8), True) for size in plan.scratch]
    buffers = {"input": read, "output": written, "scratch": scratch}
    for step in plan.steps:
        assert isinstance(step, Launch)
        if ":" in step.kernel.source:
            interpret(step, lambda to: buffers[to.kind][to.index][1])
            continue
        launch(step, find(step.kernel, folder), lambda to: buffers[to.kind][to.index][1].ctypes.data + to.offset)
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
