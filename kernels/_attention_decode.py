"""Attention of few queries over many keys, which are split over the chip: the host side of attention_decode.cu."""

from __future__ import annotations

from typing import Final

from onnxfuse.kernels._attention import Attention
from onnxfuse.kernels._attention_mma import (
    LARGEST_HEAD,
    TENSOR_CORES_FROM,
    Tiling,
    arguments,
    defines,
    fitted,
    product,
    shared_bytes,
)
from onnxfuse.kernels._gemm import Candidate
from onnxfuse.kernels._types import ABSENT
from onnxfuse.provider.plan import Device, Kernel, Launch, Pointer, Scalar

CLUSTER_ARCH: Final = 90
CLUSTERS: Final = (2, 4, 8)  # eight is the portable limit; sixteen were slower than eight
BUSY: Final = 0.9  # of the multiprocessors: on an H200, 64 heads in clusters of 2 outran 4 by a fifth, 8 by a quarter
MOST_ROWS: Final = 64  # queries times the query heads of a key head: four warps of sixteen
LEAST_TILES: Final = 2  # of a block: where there are fewer its start and its end cost more than they save
MOST_SPLITS: Final = 64
COMBINE_THREADS: Final = 128


def plans(problem: Attention, device: Device) -> list[Candidate]:
    """The ways to run it, the likeliest first; none where rows are many, keys few or this GPU has no tensor cores."""
    rows = problem.queries * (problem.heads // problem.kv_heads)
    if device.arch < TENSOR_CORES_FROM or rows > MOST_ROWS or max(problem.size, problem.value_size) > LARGEST_HEAD:
        return []
    if product(problem, device) == "FP32" and max(problem.size, problem.value_size) > 128:
        return []
    row_warps = 1 if rows <= 16 else 2 if rows <= 32 else 4
    wide = max(problem.size, problem.value_size) > 128 or product(problem, device) != "HALF"
    key_warps = max(1, 4 // row_warps)
    wanted = Tiling(row_warps, key_warps, max(32 if wide else 64, 16 * key_warps), stages=3)
    tiling = fitted(problem, wanted, device, shares=True)
    if tiling is None:
        return []
    tiles = -(-problem.keys // tiling.keys)
    if tiles < 2 * LEAST_TILES:
        return []
    heads = problem.batch * problem.kv_heads
    splits = min(MOST_SPLITS, device.multiprocessors // heads, tiles // LEAST_TILES)
    if splits < 2:
        return []
    clusters = _clusters(problem, tiles, device)
    found = [_in_cluster(problem, tiling, cluster, device) for cluster in clusters]
    apart = _combined(problem, tiling, splits, device)
    busy = clusters and heads * clusters[0] >= BUSY * device.multiprocessors
    return [*found, apart] if busy else [apart, *found]


def _clusters(problem: Attention, tiles: int, device: Device) -> list[int]:
    """Cluster sizes, the likeliest first: the smallest that gives every multiprocessor a block, and the next."""
    if device.arch < CLUSTER_ARCH:
        return []
    heads = problem.batch * problem.kv_heads
    possible = [cluster for cluster in CLUSTERS if tiles >= cluster * LEAST_TILES]
    busy = [cluster for cluster in possible if heads * cluster >= BUSY * device.multiprocessors]
    return busy[:2] if busy else possible[-1:]


def _in_cluster(problem: Attention, tiling: Tiling, cluster: int, device: Device) -> Candidate:
    step = _split(problem, tiling, cluster, cluster, (ABSENT, ABSENT), device)
    return Candidate(f"attention_decode {tiling.name}, clusters of {cluster}", (step,))


def _combined(problem: Attention, tiling: Tiling, splits: int, device: Device) -> Candidate:
    partial, totals = Pointer("scratch", 0), Pointer("scratch", 1)
    first = _split(problem, tiling, 1, splits, (partial, totals), device)
    out = problem.out
    second = Launch(
        Kernel("attention_decode", "attention_combine", first.kernel.defines),
        (problem.batch * problem.heads * problem.queries, 1, 1),
        (COMBINE_THREADS, 1, 1),
        (
            out.pointer,
            *(Scalar(stride, "int64") for stride in (out.batch, out.head, out.row)),
            *(Scalar(number, "int32") for number in (problem.queries, problem.kv_heads, splits)),
            partial,
            totals,
        ),
    )  # fmt: skip
    rows = problem.batch * problem.kv_heads * splits * tiling.rows
    scratch = (rows * problem.value_size * 4, rows * 8)
    return Candidate(f"attention_decode {tiling.name}, {splits} splits", (first, second), scratch)


def _split(
    problem: Attention,
    tiling: Tiling,
    cluster: int,
    splits: int,
    places: tuple[Pointer | Scalar, Pointer | Scalar],
    device: Device,
) -> Launch:
    kernel = Kernel("attention_decode", "attention_decode", {**defines(problem, tiling, device), "CLUSTER": cluster})
    return Launch(
        kernel,
        (problem.batch * problem.kv_heads * splits, 1, 1),
        (tiling.threads, 1, 1),
        (*arguments(problem, 1), Scalar(splits, "int32"), *places),
        shared_bytes(problem, tiling, device, True),
        cluster,
    )
