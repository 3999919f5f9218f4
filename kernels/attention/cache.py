"""Caches of keys and values that each step extends: their addresses and strides, and the launch that copies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.head_tensor import HeadTensor
from onnxfuse.kernels.tensors import ITEM_BYTES, STORAGE, VECTOR_BYTES, Defines
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch, Scalar
from onnxfuse.runtime.symint import gcd

THREADS: Final = 256
ACCESSES: Final = 4  # loads per thread, all in flight at once


@dataclass(frozen=True)
class Cache:
    """The past caches and the new rows to append. The present caches are k and v of the Attention."""

    past_k: HeadTensor
    past_v: HeadTensor
    new_k: HeadTensor
    new_v: HeadTensor
    past_rows: int
    rows: int  # rows of the present cache: the past rows and the new ones
    same_offsets: bool  # each past row has the same offset in the past cache as in the present cache

    @property
    def tensors(self) -> tuple[HeadTensor, ...]:
        """The past caches and the new rows."""
        return self.past_k, self.past_v, self.new_k, self.new_v

    @property
    def pointers(self) -> tuple[Argument, ...]:
        """The addresses of the past caches and the new rows, as kernel arguments."""
        return tuple(each.pointer for each in self.tensors)

    @property
    def strides(self) -> tuple[Argument, ...]:
        """The strides of the past caches and the new rows, as kernel arguments."""
        return tuple(stride for each in self.tensors for stride in stride_arguments(each))


def stride_arguments(heads: HeadTensor) -> tuple[Scalar, ...]:
    """Return the strides of batch, head and row as kernel arguments."""
    return tuple(Scalar(stride, "int64") for stride in heads.strides)


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
    integers = (problem.kv_heads, cache.past_rows, cache.rows, +cache.same_offsets, *chunks)
    return Launch(
        Kernel("attention_append", "attention_append", defines),
        (problem.batch * problem.kv_heads * sum(chunks), 1, 1),
        (THREADS, 1, 1),
        (
            *cache.pointers,
            *(each.pointer for each in present),
            *cache.strides,
            *(stride for each in present for stride in stride_arguments(each)),
            *(Scalar(number, "int32") for number in integers),
        ),
        pdl=device.has_pdl,
    )
