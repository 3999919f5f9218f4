"""Kernels written in Triton: compiled ahead of time for a GPU that need not be here, and launched like any other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Final

from onnxfuse.errors import KernelError, MissingPackageError, described
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer, Scalar, TensorSpec

try:
    import triton
except ImportError as error:
    message = f"a kernel in Triton is planned, and Triton is not installed ({error}); pip install triton"
    raise MissingPackageError(message) from error

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

WARP: Final = 32
ALIGNMENT: Final = [["tt.divisibility", 16]]  # lets Triton read and write vectors of 16 bytes
NO_SCRATCH: Final = Scalar(0, "int64")  # a null pointer for Triton's own memory, which these kernels do not use
# Triton's names of dtypes.
TYPES: Final = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64", "bool": "i1", "int8": "i8",
    "uint8": "u8", "int16": "i16", "uint16": "u16", "int32": "i32", "uint32": "u32", "int64": "i64", "uint64": "u64",
}  # fmt: skip


def triton_launch(
    function: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Pointer | Scalar],
    constants: Mapping[str, int | float | bool],
    *,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    device: Device,
    warps: int = 4,
    stages: int = 3,
) -> Launch:
    """Return the launch of a `@triton.jit` function, which is compiled here for `device` (Triton caches it on disk).

    function   a function of a module, so that `onnxfuse.testing` finds it by its name
    grid       blocks along x, y and z; dynamic dims may occur in them
    arguments  pointers to inputs and outputs, and numbers, in the order of the parameters that are not constants
    constants  the values of all `tl.constexpr` parameters; a dynamic dim among them makes a plan for its value alone
    inputs     the node's inputs; `outputs` are the plan's outputs; pointers have the dtypes of these tensors
    warps      Triton's `num_warps`; `stages` is its `num_stages`

    With TRITON_INTERPRET=1 nothing is compiled, and the launch can only be checked by `onnxfuse.testing`.

    Raises KernelError if the function does not compile, uses memory of Triton's own or several blocks a cluster, and
    ValueError if arguments and constants are not its parameters.
    """
    values = {name: operator.index(v) if not isinstance(v, float) else v for name, v in constants.items()}
    names = [name for name in function.arg_names if name not in values]
    if len(names) != len(arguments) or len(names) + len(values) != len(function.arg_names):
        raise ValueError(
            f"{function.fn.__name__} has the parameters {', '.join(function.arg_names)}; found {len(arguments)} "
            f"arguments and the constants {', '.join(values)}"
        )
    tensors = {"input": inputs, "output": outputs}
    kinds = {name: _type(each, tensors) for name, each in zip(names, arguments, strict=True)}
    aligned = all(each.aligned for each in (*inputs, *outputs))
    pairs = zip(names, arguments, strict=True)
    pointers = tuple(name for name, each in pairs if isinstance(each, Pointer) and each.offset % 16 == 0)
    source, name = f"{function.fn.__module__}:{function.fn.__name__}", function.fn.__name__
    if not isinstance(function, triton.JITFunction):  # TRITON_INTERPRET=1
        return Launch(Kernel(source, name, values), grid, (WARP * warps, 1, 1), tuple(arguments))
    code, entry, shared, parameters = _compiled(
        function, tuple(kinds.items()), tuple(values.items()), pointers if aligned else (), device.arch, warps, stages
    )
    kernel = Kernel(source, entry, values, code=code)
    own = [NO_SCRATCH] * (parameters - len(arguments))
    return Launch(kernel, grid, (WARP * warps, 1, 1), (*arguments, *own), shared)


def _type(argument: Pointer | Scalar, tensors: Mapping[str, Sequence[TensorSpec]]) -> str:
    """Return the type of an argument in a signature of Triton.  Raises ValueError for a pointer to scratch memory."""
    if isinstance(argument, Scalar):
        return TYPES[argument.type]
    if argument.kind not in tensors:
        raise ValueError(f"a Triton kernel reads inputs and writes outputs; found a pointer to {argument.kind}")
    return f"*{TYPES[tensors[argument.kind][argument.index].dtype]}"


@functools.cache
def _compiled(
    function: Any,
    kinds: tuple[tuple[str, str], ...],
    values: tuple[tuple[str, int | float], ...],
    aligned: tuple[str, ...],
    arch: int,
    warps: int,
    stages: int,
) -> tuple[bytes, str, int, int]:
    """Return machine code, entry, bytes of dynamic shared memory, and the number of parameters of the entry."""
    index = {name: i for i, name in enumerate(function.arg_names)}
    signature = {name: dict(kinds).get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(
        function, signature, {(index[name],): value for name, value in values},
        {(index[name],): ALIGNMENT for name in aligned},
    )  # fmt: skip
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    try:
        made = triton.compile(source, target=GPUTarget("cuda", arch, WARP), options=options)
    except Exception as error:  # Triton's errors have no common class
        raise KernelError(f"Triton does not compile {function.__name__}: {described(error)}\n{error}") from error
    found = made.metadata
    if found.num_ctas != 1 or found.global_scratch_size:
        raise KernelError(f"{function.__name__} needs clusters or memory of Triton's own, which no plan has")
    entry = made.asm["ptx"].partition(f".entry {found.name}(")[2].partition(")")[0]
    return made.asm["cubin"], found.name, found.shared, entry.count(".param")
