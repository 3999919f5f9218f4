"""For tests, timing and planning: run plans without onnxruntime, and query the algorithms of cuBLASLt and cuDNN."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.ir.dtypes import DTYPE_NUMBERS
from onnxfuse.runtime import native_library as native
from onnxfuse.runtime.kernel_loader import LoadedKernel
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Convolution, Matmul, Plan, Step, TensorSpec
from onnxfuse.runtime.plan_bytes import (
    ALGORITHM_WORDS,
    MAX_ENGINE_WORDS,
    convolution_bytes,
    input_words,
    matmul_bytes,
    plan_bytes,
)

CUBLASLT_NAMES: Final = ("libcublasLt.so.13", "libcublasLt.so.12")
CUDNN_NAMES: Final = ("libcudnn.so.9",)


@dataclass(frozen=True)
class Algorithm:
    """An algorithm that cuBLASLt proposes for a Matmul."""

    words: tuple[int, ...]  # the value for Matmul.algorithm
    workspace_bytes: int


@dataclass(frozen=True)
class Engine:
    """An engine that cuDNN proposes for a Convolution."""

    words: tuple[int, ...]  # the value for Convolution.engine
    workspace_bytes: int
    compiles: bool  # whether reading a plan with this engine compiles a kernel, which can take seconds or fail


class ReadyPlan:
    """A plan whose kernels are loaded on a GPU; it runs as it would in a session.

    Any number of threads may run it at once, each with scratch memory of its own: `scratch_bytes` bytes that start at
    a multiple of 256.
    """

    def __init__(self, plan: Plan, kernels: Sequence[LoadedKernel], inputs: Sequence[TensorSpec], ordinal: int) -> None:
        """Make the native library read the plan; `kernels` are the kernels of its launches, in order.

        Raises NativeError if the plan is malformed or needs a library that is missing.
        """
        open_libraries(plan)
        self._library, self._ordinal, self._kernels = native.driver(), ordinal, tuple(kernels)
        self._counts = (len(inputs), len(plan.outputs))
        data = plan_bytes(plan, [kernel.handle for kernel in kernels])
        key = _array(ctypes.c_int64, input_words(inputs))
        dtypes = _array(ctypes.c_int64, [DTYPE_NUMBERS[output.dtype] for output in plan.outputs])
        self._plan, scratch = ctypes.c_void_p(), ctypes.c_uint64()
        results = (ctypes.byref(self._plan), ctypes.byref(scratch))
        read = self._library.onnxfuse_read_plan
        native.check(read(ordinal, data, len(data), key, len(key), dtypes, len(dtypes), *results))
        weakref.finalize(self, self._library.onnxfuse_free_plan, self._plan)
        self.scratch_bytes: Final = scratch.value

    def run(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: int = 0, stream: int = 0, times: int = 1
    ) -> None:
        """Start the plan's steps `times` times on a CUDA stream.

        `inputs`, `outputs` and `scratch` are addresses on the GPU. Raises NativeError if a step cannot be started.
        """
        if (len(inputs), len(outputs)) != self._counts:
            raise NativeError(
                f"the plan has {self._counts[0]} inputs and {self._counts[1]} outputs, "
                f"found {len(inputs)} and {len(outputs)} addresses"
            )
        addresses = [_array(ctypes.c_void_p, each) for each in (inputs, outputs)]
        native.check(self._library.onnxfuse_run(self._ordinal, self._plan, *addresses, scratch, stream, times))


def algorithms(matmul: Matmul, ordinal: int, max_count: int) -> list[Algorithm]:
    """Return up to `max_count` algorithms of cuBLASLt for a product, the best by cuBLASLt's estimate first.

    The algorithms need at most `matmul.workspace_bytes`; `matmul.workspace` and `matmul.algorithm` do not matter. The
    list is empty if cuBLASLt has none. Raises NativeError if cuBLASLt is missing.
    """
    library, data = cublaslt(), matmul_bytes(matmul)
    width = ALGORITHM_WORDS + 1  # an algorithm and its workspace
    words, found = (ctypes.c_uint64 * (width * max_count))(), ctypes.c_int()
    native.check(library.onnxfuse_algorithms(ordinal, data, len(data), max_count, words, ctypes.byref(found)))
    rows = [tuple(words[i * width : (i + 1) * width]) for i in range(found.value)]
    return [Algorithm(row[:-1], row[-1]) for row in rows]


def convolution_engines(convolution: Convolution, ordinal: int, max_count: int) -> list[Engine]:
    """Return up to `max_count` engines of cuDNN for a convolution, the best by cuDNN's estimate first.

    The engines need at most `convolution.workspace_bytes`; the convolution's `workspace` and `engine` do not matter.
    Engines whose results are less precise than sums in fp32 are left out.  Without `tf32`, engines that round float32
    operands are left out, too.  The list is empty if cuDNN has none.  Raises NativeError if cuDNN is missing.
    """
    library, data = cudnn(), convolution_bytes(convolution)
    # The words per engine: its workspace, whether it compiles, the number of words that name it, and these words.
    width = 3 + MAX_ENGINE_WORDS
    words, found = (ctypes.c_int64 * (width * max_count))(), ctypes.c_int()
    native.check(library.onnxfuse_engines(ordinal, data, len(data), max_count, width, words, ctypes.byref(found)))
    rows = [words[i * width : (i + 1) * width] for i in range(found.value)]
    return [Engine(tuple(row[3 : 3 + row[2]]), row[0], bool(row[1])) for row in rows]


def open_libraries(plan: Plan) -> None:
    """Open the libraries that the plan's steps call, which reading the plan requires.  Raises NativeError."""
    for name in libraries_of(plan.steps):
        LIBRARIES[name].open()


@functools.cache
def cublaslt() -> ctypes.CDLL:
    """Return the native library with the driver and cuBLASLt open.

    The cuBLASLt is the one that this process has loaded, which is onnxruntime's, or else an installed one.
    Raises NativeError if there is neither.
    """
    names, folders = CUBLASLT_NAMES, ("cu13", "cublas")
    if why := _refusal("onnxfuse_open_cublaslt", "ONNXFUSE_LIBCUBLASLT", names, folders):
        what = "install nvidia-cublas or a CUDA toolkit, or name it in ONNXFUSE_LIBCUBLASLT"
        raise NativeError(f"matrix products need cuBLASLt; {what}: {why}")
    return native.driver()


def cublaslt_version() -> int:
    """Return 10000 times cuBLASLt's major version plus 100 times the minor one plus the patch.  Raises NativeError."""
    version = ctypes.c_uint64()
    native.check(cublaslt().onnxfuse_cublaslt_version(ctypes.byref(version)))
    return version.value


@functools.cache
def cudnn() -> ctypes.CDLL:
    """Return the native library with the driver and cuDNN 9 open.

    The cuDNN is the one that this process has loaded, which is onnxruntime's, or else an installed one.
    Raises NativeError if there is neither.
    """
    if why := _refusal("onnxfuse_open_cudnn", "ONNXFUSE_LIBCUDNN", CUDNN_NAMES, ("cudnn",)):
        what = "install nvidia-cudnn-cu13, or name it in ONNXFUSE_LIBCUDNN"
        raise NativeError(f"convolutions by cuDNN need cuDNN 9; {what}: {why}")
    return native.driver()


def cudnn_version() -> int:
    """Return 10000 times cuDNN's major version plus 100 times the minor one plus the patch.  Raises NativeError."""
    version = ctypes.c_uint64()
    native.check(cudnn().onnxfuse_cudnn_version(ctypes.byref(version)))
    return version.value


@dataclass(frozen=True)
class Library:
    """A library that steps of plans call."""

    name: str
    open: Callable[[], object]  # raises NativeError if the library is missing
    version: Callable[[], int]


LIBRARIES: Final = {
    "cublaslt": Library("cuBLASLt", lambda: cublaslt(), cublaslt_version),  # a lambda, because tests replace cublaslt
    "cudnn": Library("cuDNN", lambda: cudnn(), cudnn_version),
}


def libraries_of(steps: Iterable[Step]) -> dict[str, bool]:
    """Return the libraries that steps call, with True where a step names an algorithm or an engine of the library."""
    found: dict[str, bool] = {}
    for step in steps:
        if isinstance(step, Matmul):
            found["cublaslt"] = found.get("cublaslt", False) or bool(step.algorithm)
        elif isinstance(step, Convolution):
            found["cudnn"] = found.get("cudnn", False) or bool(step.engine)
    return found


def _refusal(function: str, variable: str, names: Sequence[str], folders: Sequence[str]) -> str | None:
    """Make the native library open the first of several libraries that can be opened; if none can, return why."""
    open_library = getattr(native.driver(), function)
    chosen = os.environ.get(variable)
    refusals = []
    for path in [chosen] if chosen else [None, *map(str, _installed(names, folders)), *names]:
        refusal = open_library(path.encode() if path else None)
        if refusal is None:
            return None
        refusals.append(refusal.decode(errors="replace"))
    return "; ".join(refusals)


def _installed(names: Sequence[str], parts: Sequence[str]) -> Iterator[Path]:
    """Yield the installed files called `names`, from the folders `parts` of NVIDIA's wheels and from a CUDA toolkit."""
    try:
        packages = [Path(path) for path in importlib.import_module("nvidia").__path__]
    except ImportError:
        packages = []
    homes = [Path(home) for name in ("CUDA_PATH", "CUDA_HOME") if (home := os.environ.get(name))]
    folders = [p / part / "lib" for p in packages for part in parts] + [home / "lib64" for home in homes]
    for name in names:
        yield from (folder / name for folder in folders if (folder / name).is_file())


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
