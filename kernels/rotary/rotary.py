"""The host side of rotary_embedding.cu: one launch rotates one tensor of heads, or queries and keys together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.tensors import (
    ABSENT,
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    VECTOR_BYTES,
    Defines,
    float32,
    int64,
    macro,
    struct,
)
from onnxfuse.runtime.plan import Device, Kernel, Launch, Struct, TensorSpec, Value
from onnxfuse.runtime.symint import estimate, gcd, is_symbolic, maximum

THREADS: Final = 128  # threads per block
THREAD_HEADS: Final = 2  # heads per thread; a thread reads its piece of the tables once for all its heads
MAX_ADJACENT_GROUPS: Final = 4  # groups of heads per block: 2048x32x128 fp16 takes 10.2 us on an H200, 10.8 us with 1
MIN_RESIDENT_THREADS: Final = 512  # threads per multiprocessor to reach before a thread takes a second head
# Bytes of x and y above which they come from memory, not L2. A thread then takes only one head: having more threads
# gains more than reading the tables less often.
MEMORY_BYTES: Final = 24 << 20
WARP: Final = 32


@dataclass(frozen=True)
class RotatedHeads:
    """A tensor of heads to rotate: its address, the result's address, and the scales of the RMS norm of each head."""

    heads: int
    x: HeadTensor
    y: HeadTensor
    scale: Value = ABSENT

    @property
    def argument(self) -> Struct:
        """The struct RotatedHeads of rotary_embedding.cu."""
        return struct(self.x.argument, self.y.argument, self.scale)


@dataclass(frozen=True)
class Rotary:
    """A rotation of the first `rotated` of the `size` elements of each head.

    The tables of cosines and sines have the shape (1 or batch, 1 or heads, 1 or length, row).  The first `kept`
    positions are copied unchanged; the tables have no rows for them.
    """

    batch: int
    length: int
    size: int
    rotated: int
    tensors: tuple[RotatedHeads, ...]  # one tensor, or queries and keys
    cos: Value
    sin: Value
    tables: TensorSpec  # the table of cos; sin has the same shape
    sin_dtype: str
    x_dtype: str
    y_dtype: str
    aligned: bool  # inputs and tables begin at multiples of 16 bytes
    whole_table: bool  # table rows have `rotated` elements; else half as many
    interleaved: bool = False  # the two elements of a pair are adjacent in x
    y_interleaved: bool = False  # the two elements of a pair are adjacent in y
    kept: int = 0
    scale_dtype: str = ""  # dtype of the norm's scales; "" without a norm
    epsilon: float = 0.0

    @property
    def has_rows(self) -> bool:
        """Return whether each position has a row of the tables; otherwise all positions share one row."""
        rows = self.tables.shape[2]
        return is_symbolic(rows) or rows > 1


def launch(problem: Rotary, device: Device) -> Launch:
    """Return the launch; the tensors must have elements."""
    width = _width(problem)
    pieces = problem.rotated // 2 // width + (problem.size - problem.rotated) // width
    lanes = pieces
    if problem.scale_dtype:
        lanes = min(WARP, 1 << (pieces - 1).bit_length())
    heads = [tensor.heads for tensor in problem.tensors]
    table_batch, table_heads, *_ = problem.tables.shape
    threads_per_head = problem.batch * problem.length * lanes
    elements = problem.batch * problem.length * problem.size * sum(heads)
    moved = elements * (ITEM_BYTES[problem.x_dtype] + ITEM_BYTES[problem.y_dtype])
    threads = threads_per_head * sum(-(-count // THREAD_HEADS) for count in heads)
    few = estimate(threads) < MIN_RESIDENT_THREADS * device.multiprocessors
    thread_heads = 1 if few or estimate(moved) > MEMORY_BYTES else THREAD_HEADS
    groups = sum(-(-count // thread_heads) for count in heads)
    count = threads_per_head * groups
    bytes_of_position = problem.size * sum(heads) * (ITEM_BYTES[problem.x_dtype] + ITEM_BYTES[problem.y_dtype])
    streamed_threads = STREAMED_FROM_BYTES // bytes_of_position * (lanes * groups)
    defines: Defines = {
        **form_defines(problem), "Y_T": STORAGE[problem.y_dtype], "HEADS": heads[0], "MORE_HEADS": sum(heads[1:]),
        "THREAD_HEADS": thread_heads, "ADJACENT_GROUPS": math.gcd(groups, MAX_ADJACENT_GROUPS),
        "WIDTH": width, "LANES": lanes,
        "TABLE_BATCHED": int(is_symbolic(table_batch) or table_batch > 1), "TABLE_BY_HEADS": int(table_heads > 1),
        "TABLE_BY_ROWS": int(problem.has_rows), "KEPT": problem.kept, "THREADS": THREADS,
        "STREAMED": macro(lambda: moved > STREAMED_FROM_BYTES, f"count > {streamed_threads}", moved),
        "INDEX": "u32" if _max_index(problem) < 2**31 else "u64",
    }  # fmt: skip
    first, second = problem.tensors[0], problem.tensors[-1]  # `second` is not read if there is only one tensor
    numbers = (*float32(problem.epsilon), *int64(problem.length, count))
    arguments = (problem.cos, problem.sin, first.argument, second.argument, *numbers)
    kernel = Kernel("rotary_embedding", "rotary_embedding", defines)
    return Launch(kernel, (-(-count // THREADS), 1, 1), (THREADS, 1, 1), arguments, pdl=device.has_pdl)


def form_defines(problem: Rotary) -> Defines:
    """Return the macros of rotation.cuh, except WIDTH and LANES."""
    return {
        "X_T": STORAGE[problem.x_dtype], "COS_T": STORAGE[problem.tables.dtype], "SIN_T": STORAGE[problem.sin_dtype],
        "SCALE_T": STORAGE[problem.scale_dtype or "float32"], "SIZE": problem.size, "ROTATED": problem.rotated,
        "NORM": int(bool(problem.scale_dtype)), "INTERLEAVED": int(problem.interleaved),
        "Y_INTERLEAVED": int(problem.y_interleaved), "WHOLE_TABLE": int(problem.whole_table),
    }  # fmt: skip


def _width(problem: Rotary) -> int:
    """Return the elements per access: at most 16 bytes, a divisor of all offsets and strides; 1 if misaligned."""
    if not problem.aligned:
        return 1
    all_heads = [heads for tensor in problem.tensors for heads in (tensor.x, tensor.y)]
    item = {"input": ITEM_BYTES[problem.x_dtype]}
    offsets = [heads.pointer.offset // item.get(heads.pointer.kind, ITEM_BYTES[problem.y_dtype]) for heads in all_heads]
    strides = [stride for heads in all_heads for stride in heads.strides]
    widest = VECTOR_BYTES // max(ITEM_BYTES[problem.x_dtype], ITEM_BYTES[problem.y_dtype])
    return int(gcd(widest, problem.rotated // 2, problem.size - problem.rotated, *offsets, *strides))


def _max_index(problem: Rotary) -> Any:
    """Return an upper bound on the element indices of all tensors."""
    return maximum(
        *(
            problem.batch * heads.batch_stride + problem.length * heads.row_stride + tensor.heads * heads.head_stride
            for tensor in problem.tensors
            for heads in (tensor.x, tensor.y)
        )
    )
