"""Running a kernel straight from its plan, and judging the result: for the tests of kernels on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from onnxfuse.provider import build_native, native, planner
from onnxfuse.provider.plan import Device, FusedNode, Kernel, Plan, TensorSpec
from onnxfuse.provider.source import architecture, options, source_text

cupy: Any = pytest.importorskip("cupy")

DTYPES = ("float32", "float16", "bfloat16")
NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Of the result's own size: half an ulp of the storage type, and what fp32 reductions and approximations add.
RELATIVE = {"float32": 4e-6, "float16": 5.2e-4, "bfloat16": 4.0e-3}
# Of the largest result of a row kernel, where a result is a difference of larger numbers or rounds to a subnormal.
ABSOLUTE = {"float32": 5e-7, "float16": 1e-5, "bfloat16": 1e-5}
# Of the result of an activation, whatever the others are; fp16 has no smaller number than 6e-8.
TINY = {"float32": 3e-7, "float16": 6e-8, "bfloat16": 3e-7}


def small_gpu() -> Device:
    """The GPU, planned for as if it had two multiprocessors, so that five rows are many: tests need no larger ones."""
    gpu: Device = importlib.import_module("onnxfuse.provider.compile").gpu(0)
    return dataclasses.replace(gpu, multiprocessors=2)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(NUMPY[dtype])


def normal(shape: Sequence[int], dtype: str, seed: int, scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return rounded(values * scale + shift, dtype)


def upload(array: np.ndarray, aligned: bool = True) -> Any:
    """Its bytes on the GPU, from a multiple of 16 bytes on, or one element after it."""
    skip = 0 if aligned else array.dtype.itemsize
    buffer = cupy.full(array.nbytes + skip + 16, 0xFF, dtype=cupy.uint8)  # NaN in every dtype
    view = buffer[skip : skip + array.nbytes]
    if array.nbytes:
        view.set(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return view


def run(
    fusion: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    device: Device,
    aligned: bool = True,
    **attributes: Any,
) -> list[np.ndarray]:
    """Plan, compile and launch; the outputs, with their surroundings checked, in float64.

    Vectors are planned for as a model's constants, but where nothing is aligned.
    """
    host = importlib.import_module(f"onnxfuse.kernels.{fusion}")
    node = FusedNode(fusion, fusion, tuple(inputs), attributes, tuple(outputs))
    specs = tuple(TensorSpec(v.shape, v.dtype.name, aligned, aligned and v.ndim == 1) for v in inputs.values())
    assert host.supports(node, [spec.dtype for spec in specs], device) is None
    plan = host.plan(node, specs, device)
    read = [upload(value, aligned) for value in inputs.values()]
    written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
    launch(plan, read, written)
    return [result(buffer, spec, aligned) for buffer, spec in zip(written, plan.outputs, strict=True)]


def launch(plan: Plan, read: Sequence[Any], written: Sequence[Any]) -> None:
    """The steps of a plan, through the same code as in a session; of the inputs it is told the bytes."""
    if not plan.steps:  # a session does not run these either
        return
    compile_native()
    ready = planner.ready(plan, [TensorSpec((each.nbytes,), "uint8", each.data.ptr % 16 == 0) for each in read])
    scratch = cupy.full(ready.scratch_bytes, 0xFF, dtype=cupy.uint8)
    cupy.cuda.runtime.deviceSynchronize()  # what CuPy does runs on streams of its own
    ready.run([each.data.ptr for each in read], [each.data.ptr for each in written], scratch.data.ptr)
    cupy.cuda.runtime.deviceSynchronize()


@functools.cache
def compile_native() -> None:
    """Make sure that the native library is there, and of the present sources."""
    library = native.library_path()
    newest = max(source.stat().st_mtime for source in (native.PACKAGE / "native").iterdir())
    if library is None or library.stat().st_mtime < newest:
        build_native.build(native.PACKAGE / "_native.abi3.so")


def compile_all(kernels: Iterable[Kernel], gpu: Device) -> None:
    """Fill CuPy's cache on disk, sharing the work with other processes of the tests that begin at the same time.

    NVRTC compiles one program at a time in a process.  A kernel that another process has begun is left to it; what does
    not compile says so when it is launched.
    """
    claims = Path(tempfile.gettempdir(), f"onnxfuse-tests-{os.getuid()}")
    claims.mkdir(exist_ok=True)
    for kernel in kernels:
        text, flags = source_text(kernel.source), options(kernel)
        if kernel.arch_specific:
            flags += (f"-arch={architecture(kernel, gpu.arch)}",)
        key = hashlib.sha256(repr((text, flags, kernel.entry)).encode()).hexdigest()
        with contextlib.suppress(FileExistsError, cupy.cuda.compiler.CompileException):
            (claims / key).touch(exist_ok=False)
            cupy.RawKernel(text, kernel.entry, options=flags).compile()


def result(buffer: Any, spec: TensorSpec, aligned: bool) -> np.ndarray:
    after = buffer.base[buffer.data.ptr - buffer.base.data.ptr + buffer.nbytes :].get()
    assert (after == 0xFF).all(), "written beyond the end"
    if not aligned:
        assert (buffer.base[: NUMPY[spec.dtype].itemsize].get() == 0xFF).all(), "written before the beginning"
    return buffer.get().view(NUMPY[spec.dtype]).reshape(spec.shape)


def check(found: np.ndarray, expected: np.ndarray, slack: float = 1.0, tiny: bool = False) -> None:
    """`slack` times the tolerances; `tiny`: no allowance for the largest result."""
    dtype = found.dtype.name
    with np.errstate(over="ignore"):
        reference = expected.astype(NUMPY[dtype]).astype(np.float64)
    values = found.astype(np.float64)
    finite = np.isfinite(reference)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(reference))
    np.testing.assert_array_equal(values[~finite & ~np.isnan(reference)], reference[~finite & ~np.isnan(reference)])
    least = TINY[dtype] if tiny else ABSOLUTE[dtype] * np.abs(expected[finite]).max(initial=0.0)
    allowed = slack * (RELATIVE[dtype] * np.abs(expected) + least)
    worst = np.where(finite, np.abs(values - expected), 0.0) - np.where(finite, allowed, 0.0)
    if values.size:
        place = np.unravel_index(worst.argmax(), worst.shape)
        assert worst[place] <= 0, f"at {place}: {values[place]}, expected {expected[place]}; {(worst > 0).sum()} wrong"
