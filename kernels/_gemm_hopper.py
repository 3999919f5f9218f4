"""The host side of gemm_hopper.cu: which tiles a matrix product is cut into on a Hopper GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.kernels._types import ABSENT, STORAGE, Defines
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Pointer, Scalar, TensorMap

K_STEP: Final = 64  # elements of k in a stage: the 128 bytes that TMA swizzles
ROW_BYTES: Final = 128
PIECE: Final = 64  # rows and columns of y that are stored at once
CONSUMERS: Final = 2
THREADS: Final = 128 * (1 + CONSUMERS)
FEWEST_STAGES: Final = 3
MOST_STAGES: Final = 12
MOST_CANDIDATES: Final = 6
RESERVED_BYTES: Final = 1024  # for barriers


@dataclass(frozen=True)
class Tiling:
    """The constants of gemm_hopper.cu that do not depend on the epilogue; n counts the columns of both products."""

    m: int
    n: int
    pingpong: bool = False  # each consumer has tiles of its own
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1  # blocks that share a tile, each with a part of k

    @property
    def cluster(self) -> int:
        """Blocks in a cluster."""
        return self.cluster_m * self.cluster_n * self.split

    @property
    def name(self) -> str:
        """For reports."""
        if self.split > 1:
            return f"{self.m}x{self.n} k/{self.split}"
        shape = f"{self.m}x{self.n}{' pingpong' if self.pingpong else ''}"
        return f"{shape} {self.cluster_m}x{self.cluster_n}" if self.cluster > 1 else shape


TILINGS: Final = (
    Tiling(128, 128, pingpong=True),
    Tiling(128, 256),
    Tiling(256, 128),
    Tiling(128, 192),
    Tiling(128, 128),
    Tiling(64, 256, pingpong=True),
    Tiling(64, 192, pingpong=True),
    Tiling(64, 128, pingpong=True),
    Tiling(64, 64, pingpong=True),
    Tiling(128, 64, split=2),
    Tiling(128, 64, split=4),
    Tiling(128, 64, split=8),
    Tiling(128, 128, split=2),
    Tiling(128, 128, split=4),
)


def refuse(gemm: Gemm, device: Device) -> bool:
    """TMA takes rows at multiples of 16 bytes; wgmma is Hopper's."""
    return (
        device.arch != 90
        or gemm.dtype not in ("float16", "bfloat16")
        or not gemm.aligned
        or not gemm.m * gemm.n * gemm.k
        or gemm.n % 8 > 0
        or gemm.k % 8 > 0
        or max(gemm.m, gemm.n, gemm.k) >= 2**31 - 2**16
    )


def plans(gemm: Gemm, device: Device) -> list[Candidate]:
    """Ways to run it, what is expected to be fastest first; none where TMA cannot read the operands."""
    if refuse(gemm, device):
        return []
    fitting = [tiling for tiling in TILINGS if fits(gemm, tiling, device)]
    fitting.sort(key=lambda tiling: cycles(gemm, tiling, device))
    return [candidate(gemm, tiling, device) for tiling in fitting[:MOST_CANDIDATES]]


def cycles(gemm: Gemm, tiling: Tiling, device: Device) -> float:
    """About how long it takes, launch apart: good enough to put the fastest two or three first.

    Constants of an H200, from times of all tilings over M from 128 to 8192 and K from 768 to 8192.
    """
    multiply = tiling.m * tiling.n * K_STEP / 2048 / 0.8  # a fifth is lost to power and to the pipeline's ends
    load = (tiling.m / tiling.cluster_n + tiling.n / tiling.cluster_m) * ROW_BYTES / 56  # bytes a cycle from L2
    steps = -(-gemm.k // (K_STEP * tiling.split))
    product = steps * max(multiply, load)
    if tiling.split > 1:  # the blocks exchange their sums
        return product + 1500 + tiling.m * tiling.n * 4 * (tiling.split - 1) / tiling.split / 16
    finish = 500 + 8 * tiling.m * tiling.n / (128 if tiling.pingpong else 256)
    rounds = -(-tiles(gemm, tiling) // (device.multiprocessors // tiling.cluster))
    return rounds * product + (1 if tiling.pingpong else rounds) * finish


def fits(gemm: Gemm, tiling: Tiling, device: Device) -> bool:
    """Whether the tiling's columns can be those of two products, its stages hide latency, and a split has its use."""
    if tiling.split > 1:
        # Clusters of four do not fill the chip: 128x2048x2048 took 13.3 us as 128 blocks of them, 8.8 as 64 of two.
        room = device.multiprocessors if tiling.split == 2 else device.multiprocessors * 3 // 4
        if tiles(gemm, tiling) * tiling.split > room or gemm.k <= (tiling.split - 1) * K_STEP:  # each needs some of k
            return False
    return columns(gemm, tiling) % PIECE == 0 and stages(gemm, tiling, device) >= FEWEST_STAGES


def tiles(gemm: Gemm, tiling: Tiling) -> int:
    """How many tiles, or clusters of them, y has."""
    rows, right = tiling.m * tiling.cluster_m, columns(gemm, tiling) * tiling.cluster_n
    return -(-gemm.m // rows) * -(-gemm.n // right)


def vectors(gemm: Gemm) -> int:
    """How many vectors of n elements the epilogue reads."""
    return sum(pointer is not None for pointer in (gemm.bias, gemm.up_bias, gemm.column_scale))


def columns(gemm: Gemm, tiling: Tiling) -> int:
    """Columns of y in a tile."""
    return tiling.n // 2 if gemm.up else tiling.n


def slots(gemm: Gemm, tiling: Tiling) -> int:
    """Pieces of y that a consumer has under way: all of a tile where the residual is to arrive while it multiplies."""
    pieces = tiling.m * columns(gemm, tiling) // PIECE**2 // (1 if tiling.pingpong else CONSUMERS)
    return max(2, pieces) if gemm.residual else 2


def fixed_bytes(gemm: Gemm, tiling: Tiling) -> int:
    """Shared memory besides the ring of operand tiles."""
    if tiling.split > 1:
        products = 2 if gemm.up else 1
        return tiling.m * columns(gemm, tiling) * products * 4 * (tiling.split - 1) // tiling.split + RESERVED_BYTES
    pieces = CONSUMERS * slots(gemm, tiling) * PIECE * ROW_BYTES
    return pieces + CONSUMERS * vectors(gemm) * columns(gemm, tiling) * 2 + RESERVED_BYTES


def stage_bytes(tiling: Tiling) -> int:
    """Shared memory of a stage."""
    return (tiling.m + tiling.n) * ROW_BYTES


def stages(gemm: Gemm, tiling: Tiling, device: Device) -> int:
    """How many stages fit."""
    return min(MOST_STAGES, (device.shared_per_block - fixed_bytes(gemm, tiling)) // stage_bytes(tiling))


def candidate(gemm: Gemm, tiling: Tiling, device: Device) -> Candidate:
    """One launch of gemm_hopper.cu."""
    blocks = min(tiles(gemm, tiling), device.multiprocessors // tiling.cluster) * tiling.cluster
    count = stages(gemm, tiling, device)
    source = "gemm_hopper_split" if tiling.split > 1 else "gemm_hopper"
    launch = Launch(
        Kernel(source, source, defines(gemm, tiling, count), arch_specific=True),
        (blocks, 1, 1),
        (THREADS, 1, 1),
        arguments(gemm, tiling),
        shared=count * stage_bytes(tiling) + fixed_bytes(gemm, tiling),
        cluster=tiling.cluster,
    )
    return Candidate(f"gemm_hopper {tiling.name}", (launch,))


def defines(gemm: Gemm, tiling: Tiling, stages: int) -> Defines:
    """The compile-time constants."""
    return {
        "ELEMENT": STORAGE[gemm.dtype], "TRANSPOSED": int(gemm.transposed), "GATED": int(gemm.up is not None),
        "TILE_M": tiling.m, "TILE_N": columns(gemm, tiling), "PINGPONG": int(tiling.pingpong),
        "STAGES": stages, "SLOTS": slots(gemm, tiling), "CLUSTER_M": tiling.cluster_m, "CLUSTER_N": tiling.cluster_n,
        "SPLIT": tiling.split, "ACTIVATION": gemm.activation, "PRECISE": 0,
        "BIAS": int(gemm.bias is not None), "UP_BIAS": int(gemm.up_bias is not None),
        "COLUMN_SCALE": int(gemm.column_scale is not None), "RESIDUAL": int(gemm.residual is not None),
    }  # fmt: skip


def arguments(gemm: Gemm, tiling: Tiling) -> tuple[Argument, ...]:
    """What the kernel is called with."""
    n, k = gemm.n, gemm.k
    right = columns(gemm, tiling)
    if gemm.transposed:
        weight_box, weight_sizes = (K_STEP, right // tiling.cluster_m), (k, n)
    else:
        weight_box, weight_sizes = (PIECE, K_STEP // tiling.cluster_m), (n, k)
    maps = [
        tensor_map(gemm, gemm.x, (k, gemm.m), (K_STEP, tiling.m // tiling.cluster_n)),
        tensor_map(gemm, gemm.w, weight_sizes, weight_box),
        *([tensor_map(gemm, gemm.up, weight_sizes, weight_box)] if gemm.up else []),
    ]
    written: list[Argument]
    if tiling.split > 1:
        written = [gemm.y, gemm.residual or ABSENT]
    else:
        written = [tensor_map(gemm, each, (n, gemm.m), (PIECE, PIECE)) for each in (gemm.y, gemm.residual) if each]
    pointers = [gemm.bias or ABSENT, gemm.up_bias or ABSENT, gemm.column_scale or ABSENT]
    scalars = [Scalar(gemm.alpha, "float32"), Scalar(gemm.beta, "float32")]
    sizes = [Scalar(value, "int32") for value in (gemm.m, n, k, band(gemm, tiling))]
    return (*maps, *written, *pointers, *scalars, *sizes)


def tensor_map(gemm: Gemm, pointer: Pointer, sizes: tuple[int, int], box: tuple[int, int]) -> TensorMap:
    """A contiguous row-major matrix, read in boxes of swizzled rows."""
    dtype = "float16" if gemm.dtype == "float16" else "bfloat16"
    return TensorMap(pointer, dtype, sizes, (sizes[0] * 2,), box, swizzle=128)


def band(gemm: Gemm, tiling: Tiling) -> int:
    """Rows of tiles (of clusters) that are computed before the next columns: those in flight form about a square."""
    return max(1, 8 // tiling.cluster_m * 128 // tiling.m)
