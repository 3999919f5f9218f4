"""Caches of keys and values that a step extends: where they lie, and the launch that copies them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._attention import Attention, Heads
from onnxfuse.kernels._types import EARLY_ARCH, ITEM_BYTES, STORAGE, VECTOR_BYTES
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Scalar

THREADS: Final = 256
EACH: Final = 4  # accesses of a thread, all on their way at once


@dataclass(frozen=True)
class Cache:
    """The pasts of a problem whose k and v are the present caches, and the rows that come behind them."""

    past_k: Heads
    past_v: Heads
    new_k: Heads
    new_v: Heads
    past: int  # rows
    rows: int  # of the present: the past ones and the new
    same: bool  # a row of the past has the same distance from the beginning of either cache

    def arguments(self) -> tuple[Argument, ...]:
        """Addresses, then strides, of pasts and of what is new."""
        heads = (self.past_k, self.past_v, self.new_k, self.new_v)
        return (*(each.pointer for each in heads), *(stride for each in heads for stride in strides(each)))


def strides(heads: Heads) -> tuple[Scalar, Scalar, Scalar]:
    """Of batch, head and row."""
    return Scalar(heads.batch, "int64"), Scalar(heads.head, "int64"), Scalar(heads.row, "int64")


def access(problem: Attention, *heads: Heads) -> int:
    """Bytes of an access to rows of keys and values: all that begins at a multiple of these is aligned."""
    item = ITEM_BYTES[problem.dtype]
    if not problem.aligned:
        return item
    extents = [problem.size, problem.value_size]
    extents += [stride for each in heads for stride in (each.batch, each.head, each.row)]
    return math.gcd(VECTOR_BYTES, *(extent * item for extent in extents), *(each.pointer.offset for each in heads))


def append(problem: Attention, cache: Cache, device: Device) -> Launch:
    """The step that writes both presents."""
    present = (problem.k, problem.v)
    width = access(problem, *present, cache.past_k, cache.past_v, cache.new_k, cache.new_v)
    item = ITEM_BYTES[problem.dtype]
    chunks = [-(-cache.rows * size * item // (width * THREADS * EACH)) for size in (problem.size, problem.value_size)]
    constants = {"T": STORAGE[problem.dtype], "SIZE": problem.size, "VALUE_SIZE": problem.value_size, "ACCESS": width}
    kernel = Kernel("attention_append", "attention_append", {**constants, "THREADS": THREADS, "EACH": EACH})
    numbers = (problem.kv_heads, cache.past, cache.rows, int(cache.same), *chunks)
    pointers, others = cache.arguments()[:4], cache.arguments()[4:]
    return Launch(
        kernel,
        (problem.batch * problem.kv_heads * sum(chunks), 1, 1),
        (THREADS, 1, 1),
        (
            *pointers,
            *(each.pointer for each in present),
            *others,
            *(stride for each in present for stride in strides(each)),
            *(Scalar(number, "int32") for number in numbers),
        ),
        early=device.arch >= EARLY_ARCH,
    )  # fmt: skip
