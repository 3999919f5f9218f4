"""Run the launches of Triton kernels on a CPU, by Triton's own interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onnxfuse.errors import UsageError
from onnxfuse.ir.dtypes import Array
from onnxfuse.runtime.plan import Launch, Pointer, Scalar


@dataclass(frozen=True)
class _Tensor:
    """A contiguous array with the methods of torch's tensors and storages that the interpreter calls."""

    array: Array

    @property
    def dtype(self) -> str:
        """Its name, as torch's dtypes are printed."""
        return f"torch.{self.array.dtype}"

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def new_empty(self, *sizes: object, **options: object) -> _Tensor:
        return self

    def nothing(self, *arguments: object) -> Any:
        """Do nothing: the interpreter works on the memory of the array itself."""

    storage_offset = size = stride = set_ = copy_ = nothing


def interpret(step: Launch, tensor: Callable[[Pointer], Array]) -> None:
    """Run a launch that `triton_launch` made; `tensor` returns the array that a pointer points into.

    Raises UsageError unless TRITON_INTERPRET=1 was set when Triton was imported.
    """
    module, _, name = step.kernel.source.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not hasattr(function, "fn") or type(function).__name__ == "JITFunction":
        raise UsageError(f"{name} is a Triton kernel; set TRITON_INTERPRET=1 before Triton is imported to check it")
    names = [each for each in function.arg_names if each not in step.kernel.defines]
    values: dict[str, Any] = dict(step.kernel.defines)
    for parameter, argument in zip(names, step.arguments, strict=True):
        if isinstance(argument, Pointer):
            array = tensor(argument)
            values[parameter] = _Tensor(array.reshape(-1)[argument.offset // array.itemsize :])
        else:
            assert isinstance(argument, Scalar)
            values[parameter] = argument.value
    function[step.grid](**values)
