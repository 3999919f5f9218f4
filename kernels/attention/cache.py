"""Caches of keys and values that each decoding step extends: their strides, and the launch that copies them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.tensors import ABSENT, ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines, float32, int32, struct
from onnxfuse.runtime.plan import Device, Kernel, Launch, Struct, Value
from onnxfuse.runtime.symint import gcd

THREADS: Final = 256
WARP: Final = 32
ACCESSES: Final = 4  # loads per thread, all in flight at once


@dataclass(frozen=True)
class Turns:
    """The norm and the rotation of new keys and of queries, as attention_turns.cuh applies them."""

    cos: Value
    sin: Value
    positions: Value  # int64 of (batch, new rows); if absent, a row's position is its row in the cache
    scales: tuple[Value, Value]  # scales of the norms of queries and of keys
    epsilons: tuple[float, float]
    table_rows: int
    half: int  # columns of the tables: half of the rotated elements
    norm: bool
    interleaved: int

    @property
    def argument(self) -> Struct:
        """The kernel's struct Turns."""
        numbers = (*float32(*self.epsilons), *int32(self.table_rows))
        return Struct((self.cos, self.sin, self.positions, *self.scales, *numbers))

    def defines(self, problem: Attention, *extents: int, whole_lanes: bool) -> Defines:
        """Return the macros of attention_turns.cuh; WIDTH divides `extents`.

        `whole_lanes`: the number of threads that share a head is a power of two, as it is with a norm.
        """
        size, storage = problem.head_dim, STORAGE[problem.dtype]
        widest = VECTOR_BYTES // ITEM_BYTES[problem.dtype] if problem.aligned else 1
        width = math.gcd(widest, self.half, size - 2 * self.half, *extents)
        pieces = self.half // width + (size - 2 * self.half) // width
        lanes = min(WARP, 1 << (pieces - 1).bit_length()) if self.norm or whole_lanes else pieces
        return {
            "X_T": storage, "COS_T": storage, "SIN_T": storage, "SCALE_T": storage, "SIZE": size,
            "ROTATED": 2 * self.half, "NORM": int(self.norm), "INTERLEAVED": self.interleaved,
            "Y_INTERLEAVED": self.interleaved, "WHOLE_TABLE": 0, "WIDTH": width, "LANES": lanes,
        }  # fmt: skip


NO_TURNS: Final = Turns(ABSENT, ABSENT, ABSENT, (ABSENT, ABSENT), (0.0, 0.0), 0, 0, False, 0)


@dataclass(frozen=True)
class Cache:
    """The caches of past keys and values, and the new rows to append to them.

    The results, the present caches, are k and v of the Attention that reads them.
    """

    past_k: HeadTensor
    past_v: HeadTensor
    new_k: HeadTensor
    new_v: HeadTensor
    past_rows: int
    rows: int  # rows of the present cache: the past rows and the new ones
    same_offsets: bool  # each past row has the same offset in the past cache as in the present cache
    turns: Turns = NO_TURNS

    @property
    def tensors(self) -> tuple[HeadTensor, ...]:
        """The past caches and the new rows."""
        return self.past_k, self.past_v, self.new_k, self.new_v

    @property
    def rows_arguments(self) -> tuple[Struct, Struct]:
        """The structs CacheRows of attention_cache.cuh, of keys and of values."""
        return struct(self.past_k.argument, self.new_k.argument), struct(self.past_v.argument, self.new_v.argument)


def access_bytes(problem: Attention, *tensors: HeadTensor) -> int:
    """Return the widest access, in bytes, for which all rows of keys and values are aligned."""
    item = ITEM_BYTES[problem.dtype]
    if not problem.aligned:
        return item
    extents = [problem.head_dim, problem.head_dim_v]
    extents += [stride for each in tensors for stride in each.strides]
    offsets = [each.pointer.offset for each in tensors]
    width: int = gcd(VECTOR_BYTES, *(extent * item for extent in extents), *offsets)
    return width


def append(problem: Attention, cache: Cache, device: Device) -> Launch:
    """Return the launch of attention_append.cu, which writes both present caches."""
    present = (problem.k, problem.v)
    width = access_bytes(problem, *present, *cache.tensors)
    item = ITEM_BYTES[problem.dtype]
    dims = (problem.head_dim, problem.head_dim_v)
    chunks = [-(-cache.rows * dim * item // (width * THREADS * ACCESSES)) for dim in dims]
    defines: Defines = {
        "T": STORAGE[problem.dtype], "HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.head_dim_v,
        "ACCESS_BYTES": width, "THREADS": THREADS, "ACCESSES": ACCESSES,
    }  # fmt: skip
    integers = int32(problem.kv_heads, cache.past_rows, cache.rows, +cache.same_offsets, *chunks)
    return Launch(
        Kernel("attention_append", "attention_append", defines),
        (problem.batch * problem.kv_heads * sum(chunks), 1, 1),
        (THREADS, 1, 1),
        (*cache.rows_arguments, *(each.argument for each in present), *integers),
        pdl=device.has_pdl,
    )
