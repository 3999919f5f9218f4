"""The host side of attention_hopper_rotation.cuh: attention_hopper.cu rotates its queries in shared memory."""

from __future__ import annotations

from typing import Final

from onnxfuse.kernels.rotary.rotary import Rotary, form_defines
from onnxfuse.kernels.tensors import ABSENT, Defines, float32, int64
from onnxfuse.runtime.plan import Struct
from onnxfuse.runtime.symint import is_symbolic

WIDTH: Final = 8  # elements per access to shared memory; divides half of the rotated elements
MIN_LANES: Final = 2  # minimum threads per row: the 128 threads of a warpgroup have 64 rows
MAX_LANES: Final = 8


def defines(rotation: Rotary) -> Defines:
    """Return the macros of attention_hopper_rotation.cuh."""
    pieces = rotation.rotated // 2 // WIDTH
    if rotation.scale_dtype:
        pieces += (rotation.size - rotation.rotated) // WIDTH
    lanes = min(MAX_LANES, max(MIN_LANES, 1 << (pieces - 1).bit_length()))
    return {**form_defines(rotation), "WIDTH": WIDTH, "LANES": lanes, "KEPT_ROWS": rotation.kept}


def argument(rotation: Rotary | None) -> Struct:
    """Return the kernel's struct RotationTables for the queries; without a rotation its pointers are null."""
    if rotation is None:
        return Struct((ABSENT, ABSENT, *int64(0), ABSENT, *float32(0.0)))
    batch, _, length, row = rotation.tables.shape
    stride = length * row if is_symbolic(batch) or batch > 1 else 0
    scale = rotation.tensors[0].scale
    return Struct((rotation.cos, rotation.sin, *int64(stride), scale, *float32(rotation.epsilon)))
