"""Tilings (divisions among threads) of rows of symbolic length in rows.cuh: one for each range of lengths.

The kernel takes the length as an argument, and has registers for the longest row of its range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.norms.rows import (
    MAX_CLUSTER,
    MAX_VALUES,
    REREAD_CHUNKS,
    REREAD_THREADS,
    RESIDENT_BYTES,
    SHARED_BLOCKS,
    SHARED_BYTES,
    SHARED_CHUNKS,
    SHORT_ROW,
    USUAL_VALUES,
    WARP_BLOCK_THREADS,
    RowTiling,
    cluster_size,
    resident_blocks,
)
from onnxfuse.kernels.tensors import VECTOR_BYTES
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.symint import estimate

BLOCK_THREADS: Final = 256  # threads per block that keeps a row in registers
SINGLES_THREADS: Final = 128  # threads per block that keeps a row of single elements in registers
WARP_ROW: Final = 32 * MAX_VALUES  # elements of the longest row that one warp keeps
BLOCK_ROW: Final = BLOCK_THREADS * MAX_VALUES  # elements of the longest row that one block keeps


def short_rows(length: int, width: int, device: Device, item_bytes: Sequence[int]) -> RowTiling:
    """Return the tiling (division among threads) for mostly short rows of any length, such as attention scores.

    Most sequence lengths are not multiples of a vector. So rows that are accessed by single elements have two ranges of
    lengths with kernels of their own. Rows beyond all ranges share one kernel, which reads them twice, element by
    element.
    """
    if _within(length, SHORT_ROW):
        return _row_of_a_warp(SHORT_ROW, width, device, item_bytes)
    if width == 1 and _within(length, WARP_ROW):  # a block computes a row: in a warp, a thread would need 32 addresses
        return RowTiling(1, SINGLES_THREADS, WARP_ROW // SINGLES_THREADS, longest=WARP_ROW)
    if _within(length, WARP_ROW):
        return _row_of_a_warp(WARP_ROW, width, device, item_bytes)
    if width > 1 and _within(length, BLOCK_ROW):
        return _row_of_a_block(width)
    return _row_read_twice(1, 1)


def long_rows(length: int, width: int, device: Device, item_bytes: Sequence[int]) -> RowTiling:
    """Return the tiling (division among threads) for rows that can be long and mostly have whole vectors."""
    if width == 1:
        return _row_read_twice(width, 1)
    if _within(length, WARP_ROW):
        return _row_of_a_warp(WARP_ROW, width, device, item_bytes)
    if _within(length, BLOCK_ROW):
        return _row_of_a_block(width)
    cluster = cluster_size(MAX_CLUSTER, device)
    threads, resident = SHARED_BLOCKS[cluster > 1]
    chunks = min(SHARED_CHUNKS if cluster > 1 else 2, MAX_VALUES // width)
    batch = threads * chunks * width  # elements per batch
    longest = SHARED_BYTES // (batch * sum(item_bytes)) * batch * cluster
    if _within(length, longest):
        return RowTiling(width, threads, chunks, 1, cluster, in_shared=True, min_blocks=resident, longest=longest)
    return _row_read_twice(width, cluster)


def _within(length: int, longest: int) -> bool:
    """Return whether `length` is at most `longest`.

    Adds a hard guard, a condition without which the plan would be wrong: the tiling is correct only for such rows.
    """
    return bool(estimate(length) <= longest and length <= longest)


def _row_of_a_warp(longest: int, width: int, device: Device, item_bytes: Sequence[int]) -> RowTiling:
    tiling = RowTiling(width, 32, longest // (32 * width), WARP_BLOCK_THREADS // 32, longest=longest)
    resident = resident_blocks(tiling, device, item_bytes, 0)
    # The kernel checks at run time which vectors lie in the row. For long rows, these checks take registers, so only
    # half as many blocks have to be resident.
    return replace(tiling, min_blocks=resident if longest == SHORT_ROW else max(1, resident // 2))


def _row_of_a_block(width: int) -> RowTiling:
    chunks = MAX_VALUES // width
    resident = RESIDENT_BYTES // (BLOCK_THREADS * chunks * VECTOR_BYTES)
    return RowTiling(width, BLOCK_THREADS, chunks, min_blocks=max(1, resident), longest=BLOCK_ROW)


def _row_read_twice(width: int, cluster: int) -> RowTiling:
    chunks = min(REREAD_CHUNKS, USUAL_VALUES // width)
    return RowTiling(width, REREAD_THREADS, chunks, 1, cluster, longest=0)
