"""The host side of attention_values.cu, which transposes the values for attention_hopper.cu in TF32."""

from __future__ import annotations

from typing import Final

from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.tensors import int32
from onnxfuse.runtime.plan import Argument, Kernel, Launch, Pointer

TILE: Final = 64  # keys and columns of a block
THREADS: Final = 256
EIGHT: Final = 8  # the number of keys is rounded up to a multiple of this


def transposed(problem: Attention, pointer: Pointer) -> HeadTensor:
    """Return the transposed values at `pointer`: for each head, `head_dim_v` rows of `padded_keys` elements."""
    row = padded_keys(problem)
    head = problem.head_dim_v * row
    return HeadTensor(pointer, problem.kv_heads * head, head, row)


def padded_keys(problem: Attention) -> int:
    """Return the number of keys, rounded up."""
    return -(-problem.keys // EIGHT) * EIGHT


def scratch_bytes(problem: Attention) -> int:
    """Return the bytes of the transposed values."""
    return 4 * problem.batch * problem.kv_heads * problem.head_dim_v * padded_keys(problem)


def launch(problem: Attention, to: Pointer) -> Launch:
    """Return the launch of attention_values.cu that writes to `to`."""
    kernel = Kernel("attention_values", "attention_values", {"HEAD_DIM_V": problem.head_dim_v})
    grid = (-(-problem.keys // TILE) * problem.kv_heads * problem.batch, -(-problem.head_dim_v // TILE), 1)
    arguments: tuple[Argument, ...] = (problem.v.argument, to, *int32(problem.keys, problem.kv_heads))
    return Launch(kernel, grid, (THREADS, 1, 1), arguments, pdl=True)
