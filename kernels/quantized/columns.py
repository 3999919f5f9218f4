"""The host side of quantized_columns.cu: convolutions of few channels as products of integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from onnxfuse.kernels.conv import hopper as conv_hopper
from onnxfuse.kernels.conv.matrix import as_gemm
from onnxfuse.kernels.conv.problem import Conv, plain_pads, three
from onnxfuse.kernels.epilogue_node import moved
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.quantized import hopper
from onnxfuse.kernels.tensors import ABSENT, EIGHT_BITS, VECTOR_BYTES, Defines, int32
from onnxfuse.runtime.plan import Device, Kernel, Launch, Pointer, Struct

MAX_LENGTH: Final = 752  # maximum of taps times channels: 64 rows of this many bytes fill 48 KiB of shared memory
MAX_BYTES: Final = 1 << 30  # maximum bytes of the matrix that has a row for each pixel of y
THREADS: Final = 64  # threads per block; each gathers a row
COLUMNS, ROWS = Pointer("scratch", 0), Pointer("scratch", 1)  # the matrices that quantized_columns.cu writes


def implementations(conv: Conv, device: Device) -> list[Implementation]:
    """Return implementations that first write x and w as matrices and then multiply these; none if unsupported."""
    length = conv.taps * conv.c
    vectors = -(-length // VECTOR_BYTES)
    row = vectors * VECTOR_BYTES
    if conv.x_nchw or conv.group != 1 or length > MAX_LENGTH or conv.pixels * row > MAX_BYTES:
        return []
    conv = plain_pads(conv)
    gemm = replace(as_gemm(conv), k=row, weights_constant=False)
    written = {gemm.x: COLUMNS, gemm.w: ROWS}

    def after_columns(pointer: Pointer) -> Pointer:
        if pointer.kind == "scratch":
            return replace(pointer, index=pointer.index + len(written))
        return written.get(pointer, pointer)

    return [
        Implementation(
            f"of columns, {each.name}",
            (_launch(conv, vectors), *(moved(step, after_columns) for step in each.steps)),
            (conv.pixels * row, conv.m * row, *each.scratch),
        )
        for each in hopper.products(gemm, device)
    ]


def _launch(conv: Conv, vectors: int) -> Launch:
    values = hopper.of_eight_bits(conv)
    pitch = 4 * (vectors | 1)
    defines: Defines = {
        **conv_hopper.of_filter(conv), "CHANNELS": conv.c, "OPERAND": EIGHT_BITS[values.x_dtype],
        "X_ZERO": int(values.x_zero is not None), "THREADS": THREADS, "SHARED_PITCH": pitch,
    }  # fmt: skip
    sizes = (conv.pixels, conv.m, *three(conv.sizes), *three(conv.y_sizes))
    given = (conv.x, values.x_zero or ABSENT, conv.w, COLUMNS, ROWS, Struct(int32(*sizes)))
    blocks = -(-conv.pixels // THREADS) + -(-conv.m * vectors // THREADS)
    kernel = Kernel("quantized_columns", "quantized_columns", defines)
    return Launch(kernel, (blocks, 1, 1), (THREADS, 1, 1), given, pdl=True)
