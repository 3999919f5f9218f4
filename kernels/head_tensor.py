"""The layout in memory of the heads of an attention or a rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.kernels.tensors import int64
from onnxfuse.runtime.plan import Pointer, Struct


@dataclass(frozen=True)
class HeadTensor:
    """A tensor of (batch, heads, rows, head_dim) whose last axis is contiguous; the strides are in elements."""

    pointer: Pointer
    batch_stride: int
    head_stride: int
    row_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        """The strides of batch, head and row."""
        return self.batch_stride, self.head_stride, self.row_stride

    @property
    def argument(self) -> Struct:
        """The struct HeadTensor of head_tensor.cuh."""
        return Struct((self.pointer, *int64(*self.strides)))
