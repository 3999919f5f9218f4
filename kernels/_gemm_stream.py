"""Products of a few rows whose weights stream through shared memory by TMA, on compute capability 9.0 and later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.kernels._gemm_mma import epilogue_defines, parts
from onnxfuse.kernels._types import ABSENT
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Pointer, Scalar, TensorMap

TMA_FROM: Final = 90  # compute capability
ROW_BYTES: Final = 128  # of k, in a stage
K_STEP: Final = 64  # elements in them
PANEL: Final = 64  # columns of a box where w is k x n
PAD: Final = 4  # PITCH - BN of gemm_stream.cu
MOST_SUMS: Final = 4096  # of a warp: 128 a thread


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
    """Ways to multiply these rows, the likeliest first."""
    rows = next(count for count in (8, 16, 32, 64) if gemm.m <= count)
    found = []
    for columns in (64, 32, 128):
        for cluster in (1, 2, 4, 8):
            tiles = sum(-(-one.n // columns) for one in (gemm, *gemm.beside))
            if cluster > 1 and cluster * tiles > 2 * device.multiprocessors:
                continue
            warps = max(1, min(4, -(-gemm.k // K_STEP) // cluster))
            stage = (rows + parts(gemm) * columns) * ROW_BYTES + 8
            stages = max(2, min(-(-gemm.k // K_STEP // cluster // warps), 110000 // (warps * stage)))
            stream = Stream(rows, columns, stages, warps, cluster)
            if fits(gemm, stream, device):
                found.append((abs(cluster * tiles - 1.5 * device.multiprocessors), stream))
    return [candidate(gemm, stream) for _, stream in sorted(found, key=lambda pair: pair[0])[:4]]


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
