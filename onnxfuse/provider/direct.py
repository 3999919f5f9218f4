"""Plans run without onnxruntime, and what cuBLASLt would choose: for tests, and for hosts that time candidates."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxfuse.provider import native
from onnxfuse.provider.compile import Function
from onnxfuse.provider.dtypes import NUMBERS
from onnxfuse.provider.native import NativeError
from onnxfuse.provider.plan import Matmul, Plan, TensorSpec
from onnxfuse.provider.wire import ALGORITHM_WORDS, input_words, matmul_bytes, plan_bytes

CUBLASLT: Final = ("libcublasLt.so.13", "libcublasLt.so.12")


@dataclass(frozen=True)
class Algorithm:
    """One that cuBLASLt proposes for a Matmul."""

    words: tuple[int, ...]  # Matmul.algorithm
    workspace_bytes: int


class ReadyPlan:
    """A plan that the native library has read for a GPU; it runs as it would in a session.

    Any number of threads may run it at once, each with scratch memory of its own: `scratch_bytes` bytes, from a
    multiple of 256 on.
    """

    def __init__(self, plan: Plan, functions: Sequence[Function], inputs: Sequence[TensorSpec], ordinal: int) -> None:
        """`functions` are those of the plan's launches, in order.  Raises NativeError where the plan is not sound."""
        open_libraries(plan)
        self._library, self._ordinal, self._functions = native.driver(), ordinal, tuple(functions)
        self._sizes = (len(inputs), len(plan.outputs))
        data = plan_bytes(plan, [function.handle for function in functions])
        key = _array(ctypes.c_int64, input_words(inputs))
        dtypes = _array(ctypes.c_int64, [NUMBERS[output.dtype] for output in plan.outputs])
        self._plan, scratch = ctypes.c_void_p(), ctypes.c_uint64()
        places = (ctypes.byref(self._plan), ctypes.byref(scratch))
        read = self._library.onnxfuse_read_plan
        native.check(read(ordinal, data, len(data), key, len(key), dtypes, len(dtypes), *places))
        weakref.finalize(self, self._library.onnxfuse_free_plan, self._plan)
        self.scratch_bytes: Final = scratch.value

    def run(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: int = 0, stream: int = 0, times: int = 1
    ) -> None:
        """Start its steps `times` times on a CUDA stream; all else are addresses on the GPU.  Raises NativeError."""
        if (len(inputs), len(outputs)) != self._sizes:
            raise NativeError(
                f"the plan has {self._sizes[0]} inputs and {self._sizes[1]} outputs, "
                f"found {len(inputs)} and {len(outputs)} addresses"
            )
        addresses = [_array(ctypes.c_void_p, each) for each in (inputs, outputs)]
        native.check(self._library.onnxfuse_run(self._ordinal, self._plan, *addresses, scratch, stream, times))


def algorithms(matmul: Matmul, ordinal: int, most: int) -> list[Algorithm]:
    """Up to `most` algorithms of cuBLASLt for a product, the best by its own estimate first; none where it has none.

    They need at most `matmul.workspace_bytes`; its `workspace` and `algorithm` do not matter.  Raises NativeError
    where cuBLASLt is missing.
    """
    library, data = cublaslt(), matmul_bytes(matmul)
    words, found = (ctypes.c_uint64 * ((ALGORITHM_WORDS + 1) * most))(), ctypes.c_int()
    native.check(library.onnxfuse_algorithms(ordinal, data, len(data), most, words, ctypes.byref(found)))
    step = ALGORITHM_WORDS + 1
    each = [tuple(words[i * step : (i + 1) * step]) for i in range(found.value)]
    return [Algorithm(numbers[:-1], numbers[-1]) for numbers in each]


def open_libraries(plan: Plan) -> None:
    """Open what the steps of a plan call, before the native library reads it.  Raises NativeError."""
    if any(isinstance(step, Matmul) for step in plan.steps):
        cublaslt()


@functools.cache
def cublaslt() -> ctypes.CDLL:
    """The native library, with the driver and cuBLASLt open.  Raises NativeError.

    It is the cuBLASLt that this process has loaded, which is onnxruntime's, or else one that is installed.
    """
    library = native.driver()
    chosen = os.environ.get("ONNXFUSE_LIBCUBLASLT")
    refusals = []
    for path in [chosen] if chosen else [None, *map(str, _installed()), *CUBLASLT]:
        refusal = library.onnxfuse_open_cublaslt(path.encode() if path else None)
        if refusal is None:
            return library
        refusals.append(refusal.decode(errors="replace"))
    raise NativeError(f"matrix products need cuBLASLt; install nvidia-cublas or a CUDA toolkit: {'; '.join(refusals)}")


def cublaslt_version() -> int:
    """Major version times 10000, plus minor times 100, plus patch.  Raises NativeError where there is none."""
    version = ctypes.c_uint64()
    native.check(cublaslt().onnxfuse_cublaslt_version(ctypes.byref(version)))
    return version.value


def _installed() -> Iterator[Path]:
    """Libraries of NVIDIA's wheels and of a CUDA toolkit."""
    try:
        packages = [Path(path) for path in importlib.import_module("nvidia").__path__]
    except ImportError:
        packages = []
    homes = [Path(home) for name in ("CUDA_PATH", "CUDA_HOME") if (home := os.environ.get(name))]
    folders = [p / part / "lib" for p in packages for part in ("cu13", "cublas")] + [home / "lib64" for home in homes]
    for name in CUBLASLT:
        yield from (folder / name for folder in folders if (folder / name).is_file())


def _array(kind: Any, values: Sequence[int]) -> Any:
    return (kind * len(values))(*values)
