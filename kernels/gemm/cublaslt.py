"""Matrix products by cuBLASLt.  If cuBLASLt cannot compute the epilogue, a launch of epilogue.cu follows."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Final, Literal, TypeAlias, TypeGuard, get_args

from onnxfuse.kernels.elementwise.elements import element_launch, vector_tiling
from onnxfuse.kernels.gemm.problem import Gemm
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import (
    ABSENT,
    ITEM_BYTES,
    STREAMED_FROM_BYTES,
    VECTOR_BYTES,
    Defines,
    is_streamed,
    vector_width,
)
from onnxfuse.runtime import run_plan
from onnxfuse.runtime.native_library import NativeError
from onnxfuse.runtime.plan import Argument, Device, FusedNode, Launch, Matmul, Matrix, Pointer, TensorSpec
from onnxfuse.runtime.symint import gcd, is_symbolic

log: Final = logging.getLogger("onnxfuse")

MAX_ALGORITHMS: Final = 9  # cuBLASLt's first choice and eight more
MAX_WORKSPACE_BYTES: Final = 32 << 20  # NVIDIA's recommended workspace for Hopper
CublasltActivation: TypeAlias = Literal["none", "relu", "gelu_tanh"]
CUBLASLT_ACTIVATIONS: Final = get_args(CublasltActivation)  # activations of cuBLASLt's epilogues


def implementations(gemm: Gemm, device: Device) -> list[Implementation]:
    """Return the algorithms that cuBLASLt proposes for a Gemm of at least one element, its first choice first.

    If epilogue.cu follows, cuBLASLt stores the product in fp32, so that 16-bit results are rounded only once.  The list
    is empty if the library is missing, the GPU is in another machine, or operators are fused into the epilogue.
    """
    if gemm.program or not (device.is_here and _is_available()):
        return []
    if _is_cublaslt_activation(gemm.activation) and _has_epilogue(gemm):
        complete = replace(
            _product(gemm, gemm.w, gemm.y, gemm.dtype), c=_residual(gemm), bias=gemm.bias, activation=gemm.activation
        )
        if found := _algorithms(complete, device):
            return [_with_own_epilogue(complete, algorithm, rank) for rank, algorithm in enumerate(found)]
    product = _product(gemm, gemm.w, Pointer("scratch", 0), "float32")
    found = _algorithms(product, device)
    return [_with_epilogue_kernel(gemm, product, algorithm, rank, device) for rank, algorithm in enumerate(found)]


@functools.cache
def _is_available() -> bool:
    try:
        run_plan.cublaslt()
    except NativeError as error:
        log.warning("matrix products run without cuBLASLt, which some sizes are faster with: %s", error)
        return False
    return True


def _algorithms(matmul: Matmul, device: Device) -> list[run_plan.Algorithm]:
    """Return the algorithms that cuBLASLt proposes, best first.

    If sizes are symbolic, the list has one algorithm without a description (`words`): the native library calls
    cuBLASLt's heuristic once it knows the sizes.
    """
    if is_symbolic(*(size for matrix in (matmul.x, matmul.w) for size in (matrix.rows, matrix.columns))):
        return [run_plan.Algorithm((), matmul.workspace_bytes)]
    return run_plan.algorithms(matmul, device.ordinal, MAX_ALGORITHMS)


def _is_cublaslt_activation(activation: str) -> TypeGuard[CublasltActivation]:
    return activation in CUBLASLT_ACTIVATIONS


def _has_epilogue(gemm: Gemm) -> bool:
    """Return whether cuBLASLt computes the whole epilogue and rounds once.

    For 16-bit types, if rows are not whole vectors, cuBLASLt applies a bias or GELU in a second kernel, to a product
    that is rounded already.  With cuBLASLt 13.1 on an H200, 13 % of the elements of 300x257x129 with bias and residual
    are then off by more than half a unit in the last place.  A second kernel for ReLU does no harm, because ReLU
    commutes with rounding.  A residual without bias and GELU needs no second kernel.
    """
    if gemm.up or gemm.column_scale or gemm.extra:
        return False
    if gemm.residual and not gemm.residual_first and gemm.activation != "none":
        return False
    second_kernel = (gemm.bias or gemm.activation == "gelu_tanh") and not _has_aligned_rows(gemm)
    return not (gemm.dtype != "float32" and second_kernel)


def _has_aligned_rows(gemm: Gemm) -> bool:
    """Return whether the rows of all matrices begin at multiples of 16 bytes."""
    elements = VECTOR_BYTES // ITEM_BYTES[gemm.dtype]
    return gemm.aligned and gemm.n % elements == 0 and gemm.k % elements == 0


def _product(gemm: Gemm, w: Pointer, y: Pointer, dtype: str) -> Matmul:
    """Return y = x w without an epilogue."""
    rows, columns = (gemm.n, gemm.k) if gemm.transposed else (gemm.k, gemm.n)
    return Matmul(
        Matrix(gemm.x, gemm.dtype, gemm.m, gemm.k, gemm.k),
        Matrix(w, gemm.dtype, rows, columns, columns),
        Matrix(y, dtype, gemm.m, gemm.n, gemm.n),
        gemm.transposed,
        tf32=gemm.tf32,
        aligned=gemm.aligned,
        workspace_bytes=MAX_WORKSPACE_BYTES,
    )


def _residual(gemm: Gemm) -> Matrix | None:
    return Matrix(gemm.residual, gemm.dtype, gemm.m, gemm.n, gemm.n) if gemm.residual else None


def _with_algorithm(matmul: Matmul, algorithm: run_plan.Algorithm, workspace: int) -> Matmul:
    """Return the product with an algorithm; its workspace is the scratch buffer with index `workspace`."""
    size = algorithm.workspace_bytes
    pointer = Pointer("scratch", workspace) if size else None
    return replace(matmul, algorithm=algorithm.words, workspace=pointer, workspace_bytes=size)


def _with_own_epilogue(matmul: Matmul, algorithm: run_plan.Algorithm, rank: int) -> Implementation:
    scratch = (algorithm.workspace_bytes,) if algorithm.workspace_bytes else ()
    return Implementation(f"cublaslt {rank}", (_with_algorithm(matmul, algorithm, 0),), scratch)


def _with_epilogue_kernel(
    gemm: Gemm, product: Matmul, algorithm: run_plan.Algorithm, rank: int, device: Device
) -> Implementation:
    """Return launches that store the product (two products if gated) in scratch memory, then run epilogue.cu."""
    weights = [gemm.w, gemm.up] if gemm.up else [gemm.w]
    steps = [
        replace(
            _with_algorithm(product, algorithm, len(weights)),
            w=replace(product.w, pointer=w),
            y=replace(product.y, pointer=Pointer("scratch", i)),
        )
        for i, w in enumerate(weights)
    ]
    scratch = [gemm.m * gemm.n * 4] * len(weights) + [algorithm.workspace_bytes] * bool(algorithm.workspace_bytes)
    return Implementation(f"cublaslt {rank} and epilogue", (*steps, epilogue(gemm, device)), tuple(scratch))


def epilogue(gemm: Gemm, device: Device, slices: int = 1) -> Launch:
    """Return the launch of epilogue.cu; scratch buffer 0 has the fp32 product, and buffer 1 the second one if gated.

    With several slices of k, scratch buffer 0 holds one partial product per slice, one after the other.
    """
    y = TensorSpec((gemm.m, gemm.n), gemm.dtype, gemm.aligned)
    product = TensorSpec(y.shape, "float32")
    read = [product] * (gemm.weight_count + slices - 1) + [y] * (1 if gemm.residual else 0)
    defines: Defines = {**gemm.epilogue_defines(), "COLUMNS": gemm.n, "SLICES": slices}
    node = FusedNode("epilogue", "epilogue", (), {"activation": defines["ACTIVATION"]}, (gemm.dtype,))
    up = Pointer("scratch", 1) if gemm.up else ABSENT
    arguments: list[Argument] = [Pointer("scratch", 0), up, gemm.epilogue_operands]
    width = vector_width([*read, y])
    if slices > 1:  # vectors of each slice must start at a multiple of their width
        width = gcd(width, gemm.m * gemm.n)
    tiling = vector_tiling(gemm.m * gemm.n, width, device)
    moved = sum(ITEM_BYTES[tensor.dtype] for tensor in (*read, y))  # bytes per element of y
    streamed = is_streamed([*read, y], f"count > {STREAMED_FROM_BYTES // moved}")
    largest = gemm.m * gemm.n * slices
    return element_launch(node, tiling, y, streamed, defines, arguments, device, largest)
