"""Rotary embedding of one tensor of heads, or of queries and keys at once: the host side of rotary_embedding.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._attention import Heads
from onnxfuse.kernels._types import (
    ABSENT,
    EARLY_ARCH,
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    VECTOR_BYTES,
    Defines,
)
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Scalar, TensorSpec

THREADS: Final = 128
HEADS_EACH: Final = 2  # of a thread, which reads its piece of the tables once
GROUPS_EACH: Final = 4  # of heads side by side in a block: 10.2 us on an H200 where one took 10.8 (2048x32x128, fp16)
THREADS_EACH: Final = 512  # per multiprocessor, before a thread takes a second head
MEMORY_BYTES: Final = 24 << 20  # from these on, which come from memory, more threads are worth more than fewer reads
WARP: Final = 32


@dataclass(frozen=True)
class Turned:
    """A tensor of heads: where it lies, where the result goes, and what each head is scaled by after its norm."""

    heads: int
    x: Heads
    y: Heads
    scale: Argument = ABSENT


@dataclass(frozen=True)
class Rotary:
    """What is rotated: `rotated` of `size` elements of every head, by tables of (1 or batch, length, row)."""

    batch: int
    length: int
    size: int
    rotated: int
    tensors: tuple[Turned, ...]  # one or two
    cos: Argument
    sin: Argument
    tables: TensorSpec  # cos; sin is like it
    sin_dtype: str
    x_dtype: str
    y_dtype: str
    aligned: bool  # inputs and tables begin at multiples of 16 bytes
    whole_table: bool  # a row has `rotated` elements, else half as many
    interleaved: bool = False
    scale_dtype: str = ""  # of the norm's scales, where there is a norm
    epsilon: float = 0.0


def launch(problem: Rotary, device: Device) -> Launch:
    """The launch; there must be something to rotate."""
    wide = _width(problem)
    pieces = problem.rotated // 2 // wide + (problem.size - problem.rotated) // wide
    lanes = pieces
    if problem.scale_dtype:
        lanes = min(WARP, 1 << (pieces - 1).bit_length())
    heads = [tensor.heads for tensor in problem.tensors]
    places = problem.batch * problem.length * lanes
    elements = problem.batch * problem.length * problem.size * sum(heads)
    moved = elements * (ITEM_BYTES[problem.x_dtype] + ITEM_BYTES[problem.y_dtype])
    few = places * sum(-(-count // HEADS_EACH) for count in heads) < THREADS_EACH * device.multiprocessors
    each = 1 if few or moved > MEMORY_BYTES else HEADS_EACH
    groups = sum(-(-count // each) for count in heads)
    count = places * groups
    defines: Defines = {
        "X_T": STORAGE[problem.x_dtype], "COS_T": STORAGE[problem.tables.dtype], "SIN_T": STORAGE[problem.sin_dtype],
        "Y_T": STORAGE[problem.y_dtype], "SCALE_T": STORAGE[problem.scale_dtype or "float32"],
        "SIZE": problem.size, "ROTATED": problem.rotated, "HEADS": heads[0], "MORE_HEADS": sum(heads[1:]),
        "HEADS_EACH": each, "GROUPS_EACH": math.gcd(groups, GROUPS_EACH),
        "WIDTH": wide, "LANES": lanes, "NORM": int(bool(problem.scale_dtype)),
        "INTERLEAVED": int(problem.interleaved), "WHOLE_TABLE": int(problem.whole_table),
        "TABLE_BATCHED": int(problem.tables.shape[0] > 1), "THREADS": THREADS,
        "STREAMED": int(moved > STREAMED_FROM_BYTES),
        "INDEX": "u32" if _reach(problem) < 2**31 else "u64",
    }  # fmt: skip
    first, *rest = problem.tensors
    second = rest[0] if rest else None
    arguments = (
        first.x.pointer, problem.cos, problem.sin, first.y.pointer, *_strides(first.x), *_strides(first.y),
        second.x.pointer if second else ABSENT, second.y.pointer if second else ABSENT,
        *_strides(second.x if second else None), *_strides(second.y if second else None),
        first.scale, second.scale if second else ABSENT, Scalar(problem.epsilon, "float32"),
        Scalar(problem.length, "int64"), Scalar(count, "int64"),
    )  # fmt: skip
    kernel = Kernel("rotary_embedding", "rotary_embedding", defines)
    return Launch(kernel, (-(-count // THREADS), 1, 1), (THREADS, 1, 1), arguments, early=device.arch >= EARLY_ARCH)


def _width(problem: Rotary) -> int:
    """Elements of an access: at most 16 bytes, and what places of vectors are multiples of; 1 if misaligned."""
    if not problem.aligned:
        return 1
    places = [half for tensor in problem.tensors for half in (tensor.x, tensor.y)]
    item = {"input": ITEM_BYTES[problem.x_dtype]}
    offsets = [heads.pointer.offset // item.get(heads.pointer.kind, ITEM_BYTES[problem.y_dtype]) for heads in places]
    strides = [stride for heads in places for stride in (heads.batch, heads.head, heads.row)]
    widest = VECTOR_BYTES // max(ITEM_BYTES[problem.x_dtype], ITEM_BYTES[problem.y_dtype])
    return math.gcd(widest, problem.rotated // 2, problem.size - problem.rotated, *offsets, *strides)


def _reach(problem: Rotary) -> int:
    """No element of any tensor lies as far from its beginning."""
    return max(
        problem.batch * heads.batch + problem.length * heads.row + tensor.heads * heads.head
        for tensor in problem.tensors
        for heads in (tensor.x, tensor.y)
    )


def _strides(heads: Heads | None) -> Sequence[Scalar]:
    return [Scalar(stride, "int64") for stride in ((heads.batch, heads.head, heads.row) if heads else (0, 0, 0))]
