"""Matrix products by cuBLASLt: with its own epilogue where it has the right one, else with epilogue.cu after it."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import Final

from onnxfuse.kernels._elementwise import element_launch, spread
from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.kernels._types import ABSENT, ITEM_BYTES, STORAGE, VECTOR_BYTES, streamed, width
from onnxfuse.provider import direct
from onnxfuse.provider.native import NativeError
from onnxfuse.provider.plan import Argument, Device, FusedNode, Launch, Matmul, Matrix, Pointer, Scalar, TensorSpec

log: Final = logging.getLogger("onnxfuse")

MOST: Final = 9  # candidates: cuBLASLt's first choice and eight more
WORKSPACE_BYTES: Final = 32 << 20  # at most; what NVIDIA recommends for Hopper
EPILOGUES: Final = ("none", "relu", "gelu_tanh")  # those of cuBLASLt that are activations of ours


def plans(gemm: Gemm, device: Device) -> list[Candidate]:
    """Ways to run a Gemm of at least one element through cuBLASLt, its first choice first; none where it is missing.

    In 16 bits a product whose epilogue cuBLASLt has not is left in fp32, so that the result is rounded once.
    """
    if not _available():
        return []
    if _has_epilogue(gemm):
        whole = replace(_product(gemm, gemm.w, gemm.y, gemm.dtype), c=_residual(gemm), bias=gemm.bias)
        whole = replace(whole, activation=gemm.activation)
        if found := direct.algorithms(whole, device.ordinal, MOST):
            return [_fused(whole, algorithm, place) for place, algorithm in enumerate(found)]
    product = _product(gemm, gemm.w, Pointer("scratch", 0), "float32")
    found = direct.algorithms(product, device.ordinal, MOST)
    return [_split(gemm, product, algorithm, place, device) for place, algorithm in enumerate(found)]


@functools.cache
def _available() -> bool:
    try:
        direct.cublaslt()
    except NativeError as error:
        log.warning("matrix products run without cuBLASLt, which some sizes are faster with: %s", error)
        return False
    return True


def _has_epilogue(gemm: Gemm) -> bool:
    """Whether cuBLASLt computes it all, and rounds once.

    In 16 bits, where rows are no whole vectors, it applies a bias or GELU in a second kernel, to a product that is
    rounded already (300x257x129 with bias and residual: 13 % of the elements off by more than half a unit in the last
    place; cuBLASLt 13.1 on an H200). ReLU commutes with rounding, and a residual alone is added by the product.
    """
    if gemm.up or gemm.column_scale or (gemm.residual and gemm.activation != "none"):
        return False
    second_kernel = (gemm.bias or gemm.activation == "gelu_tanh") and not _whole_vectors(gemm)
    return gemm.activation in EPILOGUES and not (gemm.dtype != "float32" and second_kernel)


def _whole_vectors(gemm: Gemm) -> bool:
    """Whether all rows begin at multiples of 16 bytes."""
    elements = VECTOR_BYTES // ITEM_BYTES[gemm.dtype]
    return gemm.aligned and gemm.n % elements == 0 and gemm.k % elements == 0


def _product(gemm: Gemm, w: Pointer, y: Pointer, dtype: str) -> Matmul:
    """y = x w alone."""
    rows, columns = (gemm.n, gemm.k) if gemm.transposed else (gemm.k, gemm.n)
    return Matmul(
        Matrix(gemm.x, gemm.dtype, gemm.m, gemm.k, gemm.k),
        Matrix(w, gemm.dtype, rows, columns, columns),
        Matrix(y, dtype, gemm.m, gemm.n, gemm.n),
        gemm.transposed,
        tf32=gemm.tf32,
        aligned=gemm.aligned,
        workspace_bytes=WORKSPACE_BYTES,
    )


def _residual(gemm: Gemm) -> Matrix | None:
    return gemm.residual and Matrix(gemm.residual, gemm.dtype, gemm.m, gemm.n, gemm.n)


def _chosen(matmul: Matmul, algorithm: direct.Algorithm, workspace: int) -> Matmul:
    """With an algorithm, whose workspace is scratch buffer `workspace`."""
    size = algorithm.workspace_bytes
    place = Pointer("scratch", workspace) if size else None
    return replace(matmul, algorithm=algorithm.words, workspace=place, workspace_bytes=size)


def _fused(matmul: Matmul, algorithm: direct.Algorithm, place: int) -> Candidate:
    scratch = (algorithm.workspace_bytes,) if algorithm.workspace_bytes else ()
    return Candidate(f"cublaslt {place}", (_chosen(matmul, algorithm, 0),), scratch)


def _split(gemm: Gemm, product: Matmul, algorithm: direct.Algorithm, place: int, device: Device) -> Candidate:
    """The product or both of a gated one into scratch memory, and the rest by epilogue.cu."""
    targets = [(gemm.w, 0), (gemm.up, 1)] if gemm.up else [(gemm.w, 0)]
    steps = [
        replace(
            _chosen(product, algorithm, len(targets)),
            w=replace(product.w, pointer=w),
            y=replace(product.y, pointer=Pointer("scratch", target)),
        )
        for w, target in targets
        if w is not None
    ]
    scratch = [gemm.m * gemm.n * 4] * len(targets) + [algorithm.workspace_bytes] * bool(algorithm.workspace_bytes)
    return Candidate(f"cublaslt {place} and epilogue", (*steps, epilogue(gemm, device)), tuple(scratch))


def epilogue(gemm: Gemm, device: Device) -> Launch:
    """What follows the products, which are fp32 in scratch buffer 0 and, where gated, 1."""
    y = TensorSpec((gemm.m, gemm.n), gemm.dtype, gemm.aligned)
    product = TensorSpec(y.shape, "float32")
    read = [product] * (2 if gemm.up else 1) + [y] * (1 if gemm.residual else 0)
    node = FusedNode("epilogue", "epilogue", (), {"activation": gemm.activation}, (gemm.dtype,))
    defines = {
        "T": STORAGE[gemm.dtype], "COLUMNS": gemm.n, "HAS_BIAS": int(bool(gemm.bias)), "HAS_UP": int(bool(gemm.up)),
        "HAS_UP_BIAS": int(bool(gemm.up_bias)), "HAS_SCALE": int(bool(gemm.column_scale)),
        "HAS_RESIDUAL": int(bool(gemm.residual)),
    }  # fmt: skip
    operands = [gemm.bias, gemm.up_bias, gemm.column_scale, gemm.residual, gemm.y]
    arguments: list[Argument] = [Pointer("scratch", 0), Pointer("scratch", 1) if gemm.up else ABSENT]
    arguments += [operand or ABSENT for operand in operands]
    arguments += [Scalar(gemm.alpha, "float32"), Scalar(gemm.beta, "float32")]
    tiles = spread(gemm.m * gemm.n, width([*read, y]), len(read), device)
    return element_launch(node, tiles, y, streamed([*read, y]), defines, arguments, device)
