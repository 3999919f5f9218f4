"""Products of a few rows whose weights stream through shared memory by TMA, on compute capability 9.0 and later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.kernels._gemm_mma import RESERVED_BYTES, epilogue_defines, parts
from onnxfuse.kernels._types import ABSENT
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Pointer, Scalar, TensorMap

TMA_FROM: Final = 90  # compute capability
ROW_BYTES: Final = 128  # of k, in a stage
K_STEP: Final = 64  # elements in them
PANEL: Final = 64  # columns of a box where w is k x n
PAD: Final = 4  # PITCH - BN of gemm_stream.cu
MOST_SUMS: Final = 4096  # of a warp: 128 a thread
ROWS: Final = (8, 16, 32, 64)  # of a tile
COLUMNS: Final = (64, 32, 128)
CLUSTERS: Final = (1, 2, 4, 8)
FILLED: Final = 0.5  # of the multiprocessors, and they read nearly as fast as all


@dataclass(frozen=True)
class Stream:
    """The constants of gemm_stream.cu that a host chooses."""

    rows: int
    columns: int
    stages: int
    warps: int = 4
    cluster: int = 1

    @property
    def name(self) -> str:
        """What a report calls it."""
        split = f"_split{self.cluster}" if self.cluster > 1 else ""
        return f"stream_{self.rows}x{self.columns}_{self.warps}x{self.stages}{split}"

    def shared(self, parts: int) -> int:
        """Bytes of dynamic shared memory: every warp's ring and its barriers, and where others' sums arrive."""
        exchange = parts * self.rows * self.columns * 4 + 8 if self.cluster > 1 else 0
        return self.warps * self.stages * ((self.rows + parts * self.columns) * ROW_BYTES + 8) + exchange


def usable(gemm: Gemm, device: Device) -> bool:
    """Whether TMA reads these operands and mma.sync multiplies them as precisely as it must."""
    columns = [one.n for one in (gemm, *gemm.beside)]
    rows = [gemm.k] if gemm.transposed else [gemm.k, *columns]  # of matrices, in elements
    return (
        device.arch >= TMA_FROM
        and gemm.dtype in ("float16", "bfloat16")
        and gemm.aligned
        and all(row % 8 == 0 for row in rows)
        and min(gemm.m, *columns) > 0
    )


def fits(gemm: Gemm, stream: Stream, device: Device) -> bool:
    """Whether a thread's sums fit its registers, a warp's its stages, and all of them the shared memory."""
    sums = parts(gemm) * stream.rows * stream.columns
    ring = stream.stages * (stream.rows + parts(gemm) * stream.columns) * ROW_BYTES
    staged = parts(gemm) * stream.rows * (stream.columns + PAD) * 4
    return sums <= MOST_SUMS and staged <= ring and stream.shared(parts(gemm)) <= device.shared_per_block


def plans(gemm: Gemm, device: Device) -> list[Candidate]:
    """Ways to multiply these rows, the likeliest first: what asks for most of the weights at once."""
    rows = next((count for count in ROWS if gemm.m <= count), ROWS[-1])
    found = [stream for columns in COLUMNS if (stream := _chosen(gemm, rows, columns, device))]
    return [candidate(gemm, stream) for stream in sorted(found, key=lambda each: -_worth(gemm, each, device))]


def _chosen(gemm: Gemm, rows: int, columns: int, device: Device) -> Stream | None:
    """How many blocks share tiles of that size: as few as fill the chip, or many more rings.  None where none fits."""
    splits = [split for split in CLUSTERS if split <= _steps(gemm)]
    enough = [split for split in splits if split * _tiles(gemm, rows, columns) >= FILLED * device.multiprocessors]
    chosen = None
    for split in enough or splits[-1:]:
        made = _ring(gemm, Stream(rows, columns, 1, 1, split), device)
        if made and fits(gemm, made, device):
            more = chosen is None or _asked(gemm, made, device) > 1.5 * _asked(gemm, chosen, device)
            chosen = made if more else chosen
    return chosen


def _ring(gemm: Gemm, stream: Stream, device: Device) -> Stream | None:
    """With warps and stages for a block's part of k, in the shared memory of a multiprocessor or half of it."""
    steps = -(-_steps(gemm) // stream.cluster)
    # Blocks of larger clusters do not find a place on every multiprocessor, unless there are two on each.
    alone = stream.cluster <= 2 and _blocks(gemm, stream) <= device.multiprocessors
    room = device.shared_per_block if alone else device.shared_per_block // 2 - RESERVED_BYTES

    def of(warps: int) -> Stream | None:
        empty = replace(stream, stages=0, warps=warps).shared(parts(gemm))
        stage = replace(stream, stages=1, warps=warps).shared(parts(gemm)) - empty
        stages = min(-(-steps // warps), (room - empty) // stage)
        return replace(stream, stages=stages, warps=warps) if stages >= min(2, -(-steps // warps)) else None

    few = next((made for warps in (4, 2, 1) if steps >= 2 * warps or warps == 1 if (made := of(warps))), None)
    many = of(8) if stream.rows <= 16 and steps >= 16 else None
    return many if few and many and 8 * many.stages > 0.85 * few.warps * few.stages else few


def _asked(gemm: Gemm, stream: Stream, device: Device) -> int:
    """Columns by steps of the weights that all rings on the chip hold."""
    each = min(stream.warps * stream.stages, -(-_steps(gemm) // stream.cluster)) * stream.columns
    resident = min(2, (device.shared_per_block + RESERVED_BYTES) // (stream.shared(parts(gemm)) + RESERVED_BYTES))
    return min(_blocks(gemm, stream), resident * device.multiprocessors) * each


def _worth(gemm: Gemm, stream: Stream, device: Device) -> int:
    """The same; where it is not all of them, blocks of larger clusters, of which some start late, get half as far.

    16x2048x8192 on an H200: 12.7 us in clusters of eight, 10.4 in pairs.
    """
    asked, every = _asked(gemm, stream, device), _steps(gemm) * sum(one.n for one in (gemm, *gemm.beside))
    return every if asked >= every else asked // (2 if stream.cluster > 2 else 1)


def _tiles(gemm: Gemm, rows: int, columns: int) -> int:
    return -(-gemm.m // rows) * sum(-(-one.n // columns) for one in (gemm, *gemm.beside))


def _blocks(gemm: Gemm, stream: Stream) -> int:
    return _tiles(gemm, stream.rows, stream.columns) * stream.cluster


def _steps(gemm: Gemm) -> int:
    return -(-gemm.k // K_STEP)


def candidate(gemm: Gemm, stream: Stream) -> Candidate:
    """One launch of gemm_stream.cu, of a product and those beside it."""
    gemms = (gemm, *gemm.beside)
    tiles = [-(-one.n // stream.columns) for one in gemms]
    each = [epilogue_defines(one, stream.columns // stream.cluster) for one in gemms]
    defines = {
        **each[0], "WIDTH": min(int(one["WIDTH"]) for one in each), "BIAS": max(int(one["BIAS"]) for one in each),
        "PRODUCTS": len(gemms), "COLUMNS_2": gemms[1].n if len(gemms) > 1 else 0,
        "COLUMNS_3": gemms[2].n if len(gemms) > 2 else 0,
        "ROWS": stream.rows, "BN": stream.columns, "STAGES": stream.stages, "WARPS": stream.warps,
        "CLUSTER": stream.cluster,
        "WEIGHTS_CONSTANT": int(all(one.constant for one in gemms)),
    }  # fmt: skip
    grid = (sum(tiles) * stream.cluster, -(-gemm.m // stream.rows), 1)
    launch = Launch(
        Kernel("gemm_stream", "gemm_stream", defines), grid, (32 * stream.warps, 1, 1), _arguments(gemms, stream),
        stream.shared(parts(gemm)), stream.cluster, early=True,
    )  # fmt: skip
    return Candidate(stream.name, (launch,))


def _arguments(gemms: Sequence[Gemm], stream: Stream) -> tuple[Argument, ...]:
    first = gemms[0]
    maps = [_map(first, first.x, (first.k, first.m), (K_STEP, stream.rows))]
    for gemm in gemms:
        sizes, box = (gemm.n, gemm.k), (min(PANEL, stream.columns), K_STEP)
        if gemm.transposed:
            sizes, box = (gemm.k, gemm.n), (K_STEP, stream.columns)
        maps += [_map(gemm, weight, sizes, box) for weight in (gemm.w, gemm.up) if weight]
    biases = [first.bias, first.up_bias] if first.up else [gemm.bias for gemm in gemms]
    pointers = [*_three(biases), first.column_scale, first.residual, *_three([gemm.y for gemm in gemms])]
    numbers = (Scalar(first.alpha, "float32"), Scalar(first.beta, "float32"), Scalar(first.m, "int32"))
    return (*maps, *(ABSENT if place is None else place for place in pointers), *numbers)


def _three(pointers: Sequence[Pointer | None]) -> list[Pointer | None]:
    return [*pointers, None, None][:3]


def _map(gemm: Gemm, pointer: Pointer, sizes: tuple[int, int], box: tuple[int, int]) -> TensorMap:
    """A contiguous matrix in boxes of swizzled rows."""
    dtype = "float16" if gemm.dtype == "float16" else "bfloat16"
    return TensorMap(pointer, dtype, sizes, (2 * sizes[0],), box, swizzle=128 if box[0] == K_STEP else 64)
