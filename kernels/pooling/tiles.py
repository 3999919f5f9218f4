"""The plans of max_pool and average_pool, which divide results among threads: the host side of pooling.cuh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels.image_quantizers import MAX_WIDTH, is_quantized, quantizer_pointers
from onnxfuse.kernels.pooling.windows import UNIT, Window, windows
from onnxfuse.kernels.tensors import (
    INTEGERS,
    ITEM_BYTES,
    STORAGE,
    STREAMED_FROM_BYTES,
    Defines,
    int32,
    is_released,
    is_streamed,
    operand_pointer,
    required_spec,
    vector_width,
)
from onnxfuse.runtime.plan import Device, FusedNode, Kernel, Launch, Plan, Pointer, Struct, TensorSpec
from onnxfuse.runtime.symint import estimate, is_symbolic

TILES: Final = ((2, 2), (1, 2), (1, 1))  # (rows, columns) of results per thread
THREADS: Final = 128  # largest number of threads per block
LINE_BYTES: Final = 128  # maximum bytes of a pixel that the threads of one block read
BUSY_THREADS: Final = 256  # threads per multiprocessor below which tiles are made smaller
LANES_W: Final = 8  # largest number of threads along a row
UNROLLED_LOADS: Final = 36  # loads per tile up to which window rows are unrolled
MAX_CHUNK: Final = 9  # largest number of vectors of a row in flight per thread
MAX_BLOCKS: Final = 2**31 - 1


@dataclass(frozen=True)
class Tiling:
    """The results per thread, and the threads of a block along channels, rows and columns."""

    tile_h: int
    tile_w: int
    lanes_c: int
    lanes_w: int
    lanes_h: int

    def blocks(self, images: int, vectors: int, planes: Window, rows: Window, columns: Window) -> int:
        """Return the number of blocks."""
        across = -(-columns.y_size // (self.lanes_w * self.tile_w))
        down = -(-rows.y_size // (self.lanes_h * self.tile_h))
        return images * planes.y_size * down * across * math.ceil(vectors / self.lanes_c)

    def results(self, vectors: int) -> int:
        """Return the results (vectors of y) per block, on average over the blocks that share the channels."""
        return self.tile_h * self.tile_w * self.lanes_w * self.lanes_h * vectors // math.ceil(vectors / self.lanes_c)


def window_plans(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the plans for x (n, *spatial, channels), the expected fastest first.

    Raises ValueError if the window does not fit x.
    """
    x = required_spec(node, inputs, "x")
    spatial = windows(node, x.shape)
    images, channels = x.shape[0], x.shape[-1]
    y = TensorSpec((images, *(each.y_size for each in spatial), channels), node.output_dtypes[0], x.aligned)
    if not math.prod(y.shape):
        return [Plan((y,), ())]
    planes, rows, columns = (*(UNIT,) * (3 - len(spatial)), *spatial)
    width = vector_width([x, y], channels)
    if is_quantized(node):
        width = min(width, MAX_WIDTH)
    defines: Defines = {"T": {**STORAGE, **INTEGERS}[x.dtype], "CHANNELS": channels, "WIDTH": width}
    for axis, window in zip("DHW", (planes, rows, columns), strict=True):
        defines |= {f"KERNEL_{axis}": window.kernel, f"STRIDE_{axis}": window.stride}
        defines[f"DILATION_{axis}"] = window.dilation if window.kernel > 1 else 1
    sizes = [[getattr(each, name) for each in (planes, rows, columns)] for name in ("size", "y_size", "pad_begin")]
    if node.fusion == "average_pool":
        counted = bool(node.integer("count_include_pad", 0))
        defines["COUNT_PADDING"] = int(counted)
        sizes.append([each.size + each.pad_end * counted for each in (planes, rows, columns)])
        if is_quantized(node):
            defines["QUANTIZED"] = 1
    argument = Struct(int32(*itertools.chain(*sizes)))
    arguments = (operand_pointer(node, "x"), *quantizer_pointers(node), Pointer("output", 0), argument)
    plans = []
    for tiling in tilings(images, channels // width, width * ITEM_BYTES[x.dtype], planes, rows, columns, device):
        blocks = tiling.blocks(images, channels // width, planes, rows, columns)
        if blocks > MAX_BLOCKS:
            raise ValueError(f"{node.fusion}: y has shape {list(y.shape)}, which is more than one launch can compute")
        read = planes.stride * rows.stride * columns.stride  # elements of x per element of y
        block_bytes = tiling.results(channels // width) * width * ITEM_BYTES[x.dtype] * (1 + read)
        kernel = Kernel(node.fusion, node.fusion, {
            **defines, **_loops(tiling, rows, columns),
            "STREAMED": is_streamed([x, y], f"gridDim.x > {STREAMED_FROM_BYTES // block_bytes}"),
            "RELEASE": is_released(blocks, device),
            "TILE_H": tiling.tile_h, "TILE_W": tiling.tile_w,
            "LANES_C": tiling.lanes_c, "LANES_W": tiling.lanes_w, "LANES_H": tiling.lanes_h,
        })  # fmt: skip
        block = (tiling.lanes_c, tiling.lanes_w, tiling.lanes_h)
        launch = Launch(kernel, (blocks, 1, 1), block, arguments, pdl=device.has_pdl)
        plans.append(Plan((y,), (launch,)))
    return plans


def tilings(
    images: int, vectors: int, vector_bytes: int, planes: Window, rows: Window, columns: Window, device: Device
) -> list[Tiling]:
    """Return the tilings to try.

    Tiles of several results are offered only for overlapping windows.  Tilings with enough threads to fill the GPU come
    first, from the largest tile to the smallest; the others follow, from the smallest tile to the largest.
    """
    found: dict[Tiling, int] = {}
    for tile_h, tile_w in TILES:
        shared_h = tile_h == 1 or (_is_several(rows.y_size) and _span(rows) > rows.stride)
        shared_w = tile_w == 1 or (_is_several(columns.y_size) and _span(columns) > columns.stride)
        if not (shared_h and shared_w):
            continue
        lanes_c = even_lanes(vectors, max(1, LINE_BYTES // vector_bytes), 1 if vectors % 2 else 2)
        across, down = -(-columns.y_size // tile_w), -(-rows.y_size // tile_h)
        lanes_w = even_lanes(across, min(LANES_W if _is_several(down) else THREADS, THREADS // lanes_c))
        lanes_h = min(64, even_lanes(down, max(1, THREADS // (lanes_c * lanes_w))))
        threads = images * vectors * planes.y_size * across * down
        found[Tiling(tile_h, tile_w, lanes_c, lanes_w, lanes_h)] = threads
    busy = BUSY_THREADS * device.multiprocessors
    # `found` has the order of TILES: from the largest tile, which has the fewest threads, to the smallest.
    enough = [tiling for tiling in found if estimate(found[tiling]) >= busy]
    return enough + [tiling for tiling in reversed(found) if tiling not in enough]


def _is_several(size: int) -> bool:
    """Return whether `size` exceeds 1; also True for a dynamic size, so that the plan does not depend on its value."""
    return is_symbolic(size) or size > 1


def even_lanes(extent: int, most: int, step: int = 1) -> int:
    """Return the threads along an axis: `extent`, if at most `most`; else the number that leaves the fewest idle.

    This number is at most `most`, more than half of it, and differs from `most` by a multiple of `step`.  A step of 2
    keeps pairs of vectors together: two vectors of 16 bytes are a sector of memory.  For a dynamic extent, the result
    is `most`.
    """
    if is_symbolic(extent):
        return most
    if extent <= most:
        return extent
    return min(range(most, most // 2, -step), key=lambda lanes: math.ceil(extent / lanes) * lanes)


def _span(window: Window) -> int:
    """Return how many elements of x a window spans, including those that dilations skip."""
    return (window.kernel - 1) * window.dilation + 1


def _loops(tiling: Tiling, rows: Window, columns: Window) -> Defines:
    """Return the macros ROW_UNROLL (unrolled rows) and COLUMN_CHUNK (vectors of a row that are loaded together)."""
    rows_in = (tiling.tile_h - 1) * rows.stride + _span(rows)
    columns_in = (tiling.tile_w - 1) * columns.stride + _span(columns)
    unrolled = columns_in <= MAX_CHUNK and rows_in * columns_in <= UNROLLED_LOADS
    return {"ROW_UNROLL": rows_in if unrolled else 1, "COLUMN_CHUNK": min(columns_in, MAX_CHUNK)}
