"""Run a kernel straight from its plan on a GPU, and compare the result with its formula."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest
from kernel_hosts import host_of, require_support

from onnxfuse.errors import KernelError
from onnxfuse.runtime import build_native, cuda_driver
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.code_cache import cached_cubin
from onnxfuse.runtime.loaded_templates import ready_plan
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, TensorMap, TensorSpec

cupy: Any = pytest.importorskip("cupy")
T = TypeVar("T")
MAX_COMPILERS = 8  # threads that compile at once; other processes of the tests may compile, too

DTYPES = ("float32", "float16", "bfloat16")
NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Relative to each result: half an ulp of the dtype, and the errors of fp32 reductions and approximations.
RELATIVE = {"float32": 4e-6, "float16": 5.2e-4, "bfloat16": 4.0e-3}
# Relative to the largest result of a row kernel: results may be differences of larger numbers, or subnormal.
ABSOLUTE = {"float32": 5e-7, "float16": 1e-5, "bfloat16": 1e-5}
# Absolute, for activations, whose results do not depend on each other; 6e-8 is the smallest fp16 number.
TINY = {"float32": 3e-7, "float16": 6e-8, "bfloat16": 3e-7}


launched: set[str] = set()  # the sources of all kernels that `launch` has run


def small_gpu() -> Device:
    """Return the GPU with two multiprocessors, so that five rows are planned for like many rows of a whole GPU."""
    gpu = cuda_driver.gpu(0)
    return dataclasses.replace(gpu, multiprocessors=2)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(NUMPY[dtype])


def normal(shape: Sequence[int], dtype: str, seed: int, scale: float = 1.0, shift: float = 0.0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return rounded(values * scale + shift, dtype)


def upload(array: np.ndarray, aligned: bool = True) -> Any:
    """Return the bytes of an array on the GPU, at a multiple of 16 bytes or, not aligned, one element behind it."""
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
    """Plan, compile and launch a node, check that nothing around the outputs is written, and return the outputs.

    If `aligned` is true, the plan takes vectors for constants of the model.
    """
    host = host_of(fusion)
    node = FusedNode(fusion, fusion, tuple(inputs), attributes, tuple(outputs))
    specs = tuple(TensorSpec(v.shape, v.dtype.name, aligned, aligned and v.ndim == 1) for v in inputs.values())
    require_support(host, node, [spec.dtype for spec in specs], device)
    plan = host.candidates(node, specs, device)[0]
    read = [upload(value, aligned) for value in inputs.values()]
    written = [upload(np.full(spec.shape, np.nan, NUMPY[spec.dtype]), aligned) for spec in plan.outputs]
    launch(plan, read, written)
    return [result(buffer, spec, aligned) for buffer, spec in zip(written, plan.outputs, strict=True)]


def lacks(plan: Plan, gpu: Device) -> str | None:
    """Return which instructions or how much memory of a plan, made for another GPU, this one lacks; None if none."""
    for step in plan.steps:
        if not isinstance(step, Launch):
            continue
        if step.kernel.arch_specific and gpu.arch != 90:
            return f"{step.kernel.source} needs wgmma, which sm_90a alone has; {gpu.name} is sm_{gpu.arch}"
        newer = step.pdl or step.cluster > 1 or any(isinstance(each, TensorMap) for each in step.arguments)
        if newer and gpu.arch < 90:
            return f"{step.kernel.source} needs TMA, clusters or dependent launches; {gpu.name} is sm_{gpu.arch}"
        if step.shared > gpu.shared_per_block:
            return f"{step.kernel.source} needs {step.shared} bytes of shared memory; {gpu.name} has less"
    return None


def launch(plan: Plan, read: Sequence[Any], written: Sequence[Any]) -> None:
    """Run the steps of a plan through the code that a session uses."""
    if not plan.steps:  # a session runs no such plan either
        return
    if why := lacks(plan, cuda_driver.gpu(0)):
        pytest.skip(why)
    launched.update(step.kernel.source for step in plan.steps if isinstance(step, Launch))
    compile_native()
    ready = ready_plan(plan, [TensorSpec((each.nbytes,), "uint8", each.data.ptr % 16 == 0) for each in read])
    scratch = cupy.full(ready.scratch_bytes, 0xFF, dtype=cupy.uint8)
    cupy.cuda.runtime.deviceSynchronize()  # CuPy works on streams of its own
    ready.run([each.data.ptr for each in read], [each.data.ptr for each in written], scratch.data.ptr)
    cupy.cuda.runtime.deviceSynchronize()


@functools.cache
def compile_native() -> None:
    """Build the native library unless it is there and newer than its sources."""
    library = native.library_path()
    newest = max(source.stat().st_mtime for source in (native.PACKAGE / "native").iterdir())
    if library is None or library.stat().st_mtime < newest:
        build_native.build(native.PACKAGE / "_native.abi3.so")


def compile_all(kernels: Iterable[Kernel], gpu: Device) -> None:
    """Compile kernels in several threads, before they are launched one after the other.

    Processes of the tests share what they compile (conftest.py), and begin with different kernels.  What does not
    compile says so when it is launched.
    """

    def compile_one(kernel: Kernel) -> None:
        with contextlib.suppress(KernelError):
            cached_cubin(kernel, gpu.arch)

    different = list({repr(kernel): kernel for kernel in kernels}.values())
    random.Random(os.getpid()).shuffle(different)
    with ThreadPoolExecutor(min(MAX_COMPILERS, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, different))


def in_turns(ways: Sequence[T], case: object, of: int) -> list[T]:
    """Return one of `of` parts of the ways to run a case, another part for the next case; at least one way."""
    found = ways[sum(map(ord, str(case))) % max(1, min(of, len(ways))) :: of]
    return list(found)


def result(buffer: Any, spec: TensorSpec, aligned: bool) -> np.ndarray:
    after = buffer.base[buffer.data.ptr - buffer.base.data.ptr + buffer.nbytes :].get()
    assert (after == 0xFF).all(), "written beyond the end"
    if not aligned:
        assert (buffer.base[: np.dtype(spec.dtype).itemsize].get() == 0xFF).all(), "written before the beginning"
    return buffer.get().view(np.dtype(spec.dtype)).reshape(spec.shape)


def check(found: np.ndarray, expected: np.ndarray, slack: float = 1.0, tiny: bool = False) -> None:
    """Fail unless each value is within `slack` tolerances of the expected one.

    The tolerance is relative to each result, plus a part of the largest one or, if `tiny`, an absolute minimum.
    """
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
        index = np.unravel_index(worst.argmax(), worst.shape)
        assert worst[index] <= 0, f"at {index}: {values[index]}, expected {expected[index]}; {(worst > 0).sum()} wrong"
