"""Run kernels of Hopper's tensor cores on the CPU: their own sources, with the instructions of hopper_emulated.h."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxfuse.runtime.nvrtc import kernel_text
from onnxfuse.runtime.plan import Argument, Kernel, Launch, Pointer, TensorMap
from onnxfuse.testing.emulated_build import load
from onnxfuse.testing.emulated_launches import PARTS, pointers_to, value_of

STOOD_IN = ("types.cuh", "hopper.cuh", "packed_words.cuh", "gemm_multiply.cuh")  # headers that are replaced
SHARED = re.compile(r"extern __shared__ __align__\(1024\) (?:unsigned )?char (\w+)\[\];")
# The instructions of gemm_stream.cu for clusters. Blocks wait for each other's mbarriers in one place, after the sums.
OF_CLUSTERS = (
    (r'asm volatile\("(fence.mbarrier_init|barrier.cluster.arrive)[^;]*;" ::: "memory"\);', ""),
    (r'asm volatile\("barrier.cluster.wait[^;]*;" ::: "memory"\);', "hopper::cluster_barrier();"),
    (
        r"asm volatile\(\s*\"\{ \.reg \.b32 target.*?\"memory\"\);",
        "store_async(to, barrier, column / OWN_COLUMNS, values);",
    ),
)
MAX_RANK = 5
# What reads through a null pointer stops, even where the value is not used: a compiler may drop all that follows.
NULL_POINTERS = ("-fsanitize=null", "-fsanitize-undefined-trap-on-error")


class Map(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("sizes", ctypes.c_long * MAX_RANK), ("strides", ctypes.c_long * MAX_RANK)]
    _fields_ += [("box", ctypes.c_int * MAX_RANK), ("walks", ctypes.c_int)]
    _fields_ += [("lower", ctypes.c_int * 2), ("upper", ctypes.c_int * 2), ("rounds", ctypes.c_int)]


def map_of(argument: TensorMap, address: int) -> Map:
    """Return a map of bytes, of 16-bit elements, or of float32, as the emulation has it; loads of tfloat32 round."""

    def padded(kind: type[ctypes.c_long | ctypes.c_int], values: Sequence[int]) -> ctypes.Array[ctypes.c_long]:
        return (kind * MAX_RANK)(*values, *[1] * (MAX_RANK - len(values)))

    item = {"tfloat32": 4, "float32": 4, "uint8": 1}.get(argument.dtype, 2)
    found = Map(
        address, padded(ctypes.c_long, argument.sizes), padded(ctypes.c_long, (item, *argument.strides)),
        padded(ctypes.c_int, argument.box), int(argument.im2col is not None), rounds=int(argument.dtype == "tfloat32"),
    )  # fmt: skip
    if argument.im2col is not None:
        assert argument.im2col.steps == (1, 1)
        found.lower[:], found.upper[:] = argument.im2col.lower, argument.im2col.upper
    return found


def parameter_of(argument: Argument, addresses: Mapping[Pointer, int]) -> Any:
    """Return what a kernel takes for an argument, as cuLaunchKernel reads it; `addresses` are those of the pointers."""
    if isinstance(argument, TensorMap):
        return ctypes.pointer(map_of(argument, addresses[argument.pointer]))
    laid_out = bytes(value_of(argument, addresses.__getitem__))
    return ctypes.create_string_buffer(laid_out, (len(laid_out) + 7) // 8 * 8)  # whole words, as in a launch


def run(step: Launch, addresses: Mapping[Pointer, int], folder: Path) -> None:
    """Run a launch, the blocks of each z of the grid in turn; `addresses` are those of the pointers."""
    parameters = [parameter_of(each, addresses) for each in step.arguments]
    grid = (ctypes.c_int * 3)(*step.grid)
    _library(step.kernel, step.block[0], folder).run(pointers_to(parameters), grid, step.cluster, step.shared)


def _library(kernel: Kernel, threads: int, folder: Path) -> ctypes.CDLL:
    whole = kernel_text(kernel)
    parts = zip(["", *PARTS.findall(whole)], PARTS.split(whole)[::2], strict=True)
    text = re.sub(r"(?m)^#pragma.*$", "", "".join(part for name, part in parts if name not in STOOD_IN))
    text = SHARED.sub(r"char* \1 = emulated::memory;", text)
    header = "hopper_emulated.h"
    if kernel.source == "gemm_stream":
        header = "gemm_stream_emulated.h"
        for instruction, function in OF_CLUSTERS:
            text, count = re.subn(instruction, function, text, flags=re.DOTALL)
            assert count
    text = (
        f'#include "{header}"\n{text}\n'
        'extern "C" void run(const void* const* arguments, const int* grid, int cluster, int shared_bytes) {\n'
        "    gridDim.z = grid[2];\n    for (int z = 0; z < grid[2]; ++z)\n"
        "        emulated::launch(grid[0], cluster, emulated::THREADS, emulated::ITEM, shared_bytes, [=] {\n"
        "            blockIdx.z = z;\n"
        f"            emulated::call({kernel.entry}, arguments);\n        }});\n}}\n"
    )
    return load(text, {**kernel.defines, "BLOCK_THREADS": threads}, NULL_POINTERS, folder / "kernel.cc")
