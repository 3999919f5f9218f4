"""The host side of gemm_hopper.cu: which tiles a matrix product is cut into on a Hopper GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnxfuse.kernels._gemm import Candidate, Gemm
from onnxfuse.kernels._gemm_pad import launches, padded, scratch_bytes, whole
from onnxfuse.kernels._types import ABSENT, STORAGE, Defines
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Pointer, Scalar, TensorMap

K_STEP: Final = 64  # elements of k in a stage: the 128 bytes that TMA swizzles
ROW_BYTES: Final = 128
PIECE: Final = 64  # rows and columns of y that are stored at once
FEWEST_STAGES: Final = 3
MOST_STAGES: Final = 12
MOST_CANDIDATES: Final = 6
RESERVED_BYTES: Final = 256  # for barriers


@dataclass(frozen=True)
class Tiling:
    """The constants of gemm_hopper.cu that do not depend on the epilogue; n counts the columns of both products."""

    m: int
    n: int
    pingpong: bool = False  # each consumer has tiles of its own
    split: int = 1  # blocks of a cluster, which share a tile, each with a part of k

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return 3 if self.m == 192 and not self.pingpong else 2

    @property
    def name(self) -> str:
        """For reports."""
        return f"{self.m}x{self.n}{' pingpong' if self.pingpong else f' k/{self.split}' if self.split > 1 else ''}"


TILINGS: Final = (
    Tiling(128, 128, pingpong=True),
    Tiling(128, 192, pingpong=True),
    Tiling(192, 128, pingpong=True),
    Tiling(128, 256),
    Tiling(256, 128),
    Tiling(128, 192),
    Tiling(192, 192),
    Tiling(128, 128),
    Tiling(64, 256, pingpong=True),
    Tiling(64, 192, pingpong=True),
    Tiling(64, 128, pingpong=True),
    Tiling(64, 64, pingpong=True),
    Tiling(128, 64, split=2),
    Tiling(128, 64, split=3),
    Tiling(128, 64, split=4),
    Tiling(128, 64, split=6),
    Tiling(128, 64, split=8),
    Tiling(128, 128, split=2),
    Tiling(128, 128, split=4),
)


def products(gemm: Gemm) -> tuple[Gemm, ...]:
    """Those of one launch."""
    return (gemm, *gemm.beside)


def refuse(gemm: Gemm, device: Device) -> bool:
    """wgmma is Hopper's, multiplies 16-bit types here, and TMA's coordinates are ints."""
    return (
        device.arch != 90
        or gemm.dtype not in ("float16", "bfloat16")
        or not gemm.m * gemm.n * gemm.k
        or max(gemm.m, gemm.n, gemm.k) >= 2**31 - 2**16
    )


def plans(gemm: Gemm, device: Device) -> list[Candidate]:
    """Ways to run it, what is expected to be fastest first; none where there is no such GPU or type."""
    if any(refuse(each, device) for each in products(gemm)):
        return []
    fitting = [tiling for tiling in TILINGS if fits(gemm, tiling, device)]
    fitting.sort(key=lambda tiling: cycles(gemm, tiling, device))
    return [candidate(gemm, tiling, device) for tiling in fitting[:MOST_CANDIDATES]]


def cycles(gemm: Gemm, tiling: Tiling, device: Device) -> float:
    """About how long it takes, launch apart: good enough for the fastest to be among the first three.

    Constants of an H200, from times of all tilings at 22 shapes of M from 128 to 6304 and K from 768 to 8192.
    """
    multiply = tiling.m * tiling.n * K_STEP / 2048 / 0.73  # what power and shared memory leave of wgmma's rate
    load = (tiling.m + tiling.n) * ROW_BYTES / 56  # bytes a cycle from L2
    product = -(-gemm.k // (K_STEP * tiling.split)) * max(multiply, load)
    if tiling.split > 1:  # the blocks exchange their sums; large clusters start late
        return product + 750 * (tiling.split - 1) + tiling.m * tiling.n * 4 * (tiling.split - 1) / tiling.split / 16
    instructions = 8 + {"none": 0, "gelu": 13}.get(gemm.activation, 10) + 4 * bool(gemm.residual)
    finish = tiling.m * columns(gemm, tiling) * instructions / 128
    rounds = -(-tiles(gemm, tiling) // device.multiprocessors)
    if tiling.pingpong:  # a seventh of a finish is hidden
        return rounds * (product + 250) + (1 + 6 / 7 * (rounds - 1)) * finish
    return rounds * (product + finish)


def fits(gemm: Gemm, tiling: Tiling, device: Device) -> bool:
    """Whether the tiling's columns can be those of two products, its stages hide latency, and a split has its use."""
    if tiling.split > 1:
        if gemm.beside:
            return False
        # Clusters of four do not fill the chip: 128x2048x2048 took 13.3 us as 128 blocks of them, 8.8 as 64 of two.
        room = device.multiprocessors if tiling.split == 2 else device.multiprocessors * 3 // 4
        if tiles(gemm, tiling) * tiling.split > room or gemm.k <= (tiling.split - 1) * K_STEP:  # each needs some of k
            return False
    if tiling.pingpong and tiling.m * tiling.n > 128 * 128 and vectors(gemm) + bool(gemm.residual) > 2:
        return False  # they would not fit into registers beside the sums
    return columns(gemm, tiling) % PIECE == 0 and stages(gemm, tiling, device) >= FEWEST_STAGES


def tiles(gemm: Gemm, tiling: Tiling) -> int:
    """How many tiles the results have."""
    return -(-gemm.m // tiling.m) * sum(-(-each.n // columns(gemm, tiling)) for each in products(gemm))


def direct(gemm: Gemm) -> bool:
    """Whether TMA cannot write y, of any of the products."""
    return not gemm.aligned or any(each.n < whole(each.n, each.dtype) for each in products(gemm))


def vectors(gemm: Gemm) -> int:
    """How many vectors of n elements the epilogue reads."""
    return has_bias(gemm) + sum(pointer is not None for pointer in (gemm.up_bias, gemm.column_scale))


def has_bias(gemm: Gemm) -> int:
    """1 where any of the products has one."""
    return int(any(each.bias for each in products(gemm)))


def columns(gemm: Gemm, tiling: Tiling) -> int:
    """Columns of y in a tile."""
    return tiling.n // 2 if gemm.up else tiling.n


def fixed_bytes(gemm: Gemm, tiling: Tiling) -> int:
    """Shared memory besides the ring of operand tiles."""
    if tiling.split > 1:
        eights = tiling.m // PIECE // tiling.consumers * columns(gemm, tiling) // 8  # of a thread's columns of y
        products = 2 if gemm.up else 1
        return (tiling.split - 1) * -(-eights // tiling.split) * products * tiling.consumers * 128 * 16 + RESERVED_BYTES
    results = tiling.m * columns(gemm, tiling) * 2 * (2 if tiling.pingpong else 1)
    return results + tiling.consumers * vectors(gemm) * columns(gemm, tiling) * 4 + RESERVED_BYTES


def stage_bytes(tiling: Tiling) -> int:
    """Shared memory of a stage."""
    return (tiling.m + tiling.n) * ROW_BYTES


def stages(gemm: Gemm, tiling: Tiling, device: Device) -> int:
    """How many stages fit."""
    return min(MOST_STAGES, (device.shared_per_block - fixed_bytes(gemm, tiling)) // stage_bytes(tiling))


def candidate(gemm: Gemm, tiling: Tiling, device: Device) -> Candidate:
    """One launch of gemm_hopper.cu, after one of gemm_pad.cu where TMA cannot read the operands as they are.

    Blocks that share a tile read the residual without TMA.
    """
    gemm, copies = padded(gemm, residual=tiling.split == 1)
    blocks = min(tiles(gemm, tiling), device.multiprocessors // tiling.split) * tiling.split
    count = stages(gemm, tiling, device)
    source = "gemm_hopper_split" if tiling.split > 1 else "gemm_hopper"
    launch = Launch(
        Kernel(source, source, defines(gemm, tiling, count), arch_specific=True),
        (blocks, 1, 1),
        (128 * (1 + tiling.consumers), 1, 1),
        arguments(gemm, tiling),
        shared=count * stage_bytes(tiling) + fixed_bytes(gemm, tiling),
        cluster=tiling.split,
        early=True,
    )
    several = f", {len(products(gemm))} products" if gemm.beside else ""
    name = f"gemm_hopper {tiling.name}{several}{' of copies' if copies else ''}"
    return Candidate(name, (*launches(copies, device), launch), scratch_bytes(copies))


def defines(gemm: Gemm, tiling: Tiling, stages: int) -> Defines:
    """The compile-time constants."""
    return {
        "ELEMENT": STORAGE[gemm.dtype], "TRANSPOSED": int(gemm.transposed), "GATED": int(gemm.up is not None),
        "TILE_M": tiling.m, "TILE_N": columns(gemm, tiling), "PINGPONG": int(tiling.pingpong),
        "DIRECT": int(direct(gemm)), "STAGES": stages, "SPLIT": tiling.split, "CONSUMERS": tiling.consumers,
        "ACTIVATION": gemm.activation, "PRECISE": 0,
        "PRODUCTS": len(products(gemm)), "WEIGHTS_CONSTANT": int(all(each.constant for each in products(gemm))),
        "BIAS": has_bias(gemm), "UP_BIAS": int(gemm.up_bias is not None),
        "COLUMN_SCALE": int(gemm.column_scale is not None), "RESIDUAL": int(gemm.residual is not None),
    }  # fmt: skip


def arguments(gemm: Gemm, tiling: Tiling) -> tuple[Argument, ...]:
    """What the kernel is called with."""
    n, k = gemm.n, gemm.k
    every = products(gemm)
    maps = [
        tensor_map(gemm, gemm.x, (k, gemm.m), (K_STEP, tiling.m)),
        *(weight_map(each, each.w, tiling) for each in every),
        *([weight_map(gemm, gemm.up, tiling)] if gemm.up else []),
    ]
    by_threads = direct(gemm) or tiling.split > 1
    written: list[Argument] = [each.y if by_threads else result_map(gemm, each.y, each.n) for each in every]
    if tiling.split > 1:
        written.append(gemm.residual or ABSENT)
    elif gemm.residual:
        written.append(result_map(gemm, gemm.residual, n))
    pointers = [*(each.bias or ABSENT for each in every), gemm.up_bias or ABSENT, gemm.column_scale or ABSENT]
    scalars = [Scalar(gemm.alpha, "float32"), Scalar(gemm.beta, "float32")]
    sizes = [Scalar(value, "int32") for value in (gemm.m, *(each.n for each in every), k, band(gemm, tiling))]
    return (*maps, *written, *pointers, *scalars, *sizes)


def weight_map(gemm: Gemm, pointer: Pointer, tiling: Tiling) -> TensorMap:
    """A weight, in boxes of one stage's k: a tile's columns at once where they are rows in memory."""
    if gemm.transposed:
        return tensor_map(gemm, pointer, (gemm.k, gemm.n), (K_STEP, columns(gemm, tiling)))
    return tensor_map(gemm, pointer, (gemm.n, gemm.k), (PIECE, K_STEP))


def result_map(gemm: Gemm, pointer: Pointer, n: int) -> TensorMap:
    """y or the residual of a product, in pieces."""
    return tensor_map(gemm, pointer, (n, gemm.m), (PIECE, PIECE))


def tensor_map(gemm: Gemm, pointer: Pointer, sizes: tuple[int, int], box: tuple[int, int]) -> TensorMap:
    """A row-major matrix whose rows begin at the next multiple of 16 bytes, read in boxes of swizzled rows."""
    dtype = "float16" if gemm.dtype == "float16" else "bfloat16"
    return TensorMap(pointer, dtype, sizes, (whole(sizes[0], gemm.dtype) * 2,), box, swizzle=128)


def band(gemm: Gemm, tiling: Tiling) -> int:
    """Rows of tiles that are computed before the next columns: some 2048 of y, so that weights are read few times."""
    rows, most = -(-gemm.m // tiling.m), max(1, 2048 // tiling.m)
    return -(-rows // -(-rows // most))
