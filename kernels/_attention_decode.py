"""Attention of few queries over many keys, which are split over the chip: attention_decode, attention_with_cache."""

from __future__ import annotations

import math
from typing import Final

from onnxfuse.kernels._attention import Attention
from onnxfuse.kernels._attention_cache import Cache, access
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
from onnxfuse.kernels._types import ABSENT, EARLY_ARCH
from onnxfuse.provider.plan import Argument, Device, Kernel, Launch, Pointer, Scalar

CLUSTER_ARCH: Final = 90
CLUSTERS: Final = (2, 4, 8)  # eight is the portable limit; sixteen were slower than eight
BUSY: Final = 0.9  # of the multiprocessors: on an H200, 64 heads in clusters of 2 outran 4 by a fifth, 8 by a quarter
MOST_ROWS: Final = 64  # queries times the query heads of a key head: four warps of sixteen
LEAST_TILES: Final = 2  # of a block: where there are fewer its start and its end cost more than they save
MOST_SPLITS: Final = 64
MANY_ROWS: Final = 1024  # of a cache from which eight warps of a block have enough to copy
COMBINE_THREADS: Final = 128


def plans(problem: Attention, device: Device, cache: Cache | None = None) -> list[Candidate]:
    """The ways to run it, the likeliest first; none where rows are many, keys few or this GPU has no tensor cores.

    With a `cache` the problem's k and v are the present caches, which are written on the way; keys may be few.
    """
    rows = problem.queries * (problem.heads // problem.kv_heads)
    if device.arch < TENSOR_CORES_FROM or rows > MOST_ROWS or max(problem.size, problem.value_size) > LARGEST_HEAD:
        return []
    found = [fitted(problem, tiling, device, shares=True) for tiling in _tilings(problem, rows, device, cache)]
    tilings = dict.fromkeys(tiling for tiling in found if tiling and tiling.rows >= rows)  # a block has all rows
    return [way for tiling in tilings for way in _ways(problem, tiling, device, cache)]


def _tilings(problem: Attention, rows: int, device: Device, cache: Cache | None) -> list[Tiling]:
    """Sixteen rows to a warp; four warps, which share keys where they do not all have rows, or eight."""
    row_warps = 1 if rows <= 16 else 2 if rows <= 32 else 4
    large = max(problem.size, problem.value_size) > 128
    if large and product(problem, device) == "FP32":  # registers have no room for what warps that share keys need
        return [Tiling(row_warps, 1, 16, stages=3)]
    wide = large or product(problem, device) != "HALF"
    key_warps = max(1, 4 // row_warps)
    usual = Tiling(row_warps, key_warps, max(32 if wide else 64, 16 * key_warps), stages=3)
    if cache is None or wide or row_warps > 1 or problem.keys < MANY_ROWS:
        return [usual]
    # 64 heads of a cache of 4096 rows on an H200: 82.5 us instead of 84.4 at size 128, 45.8 instead of 55.1 at 64.
    many = Tiling(1, 8, 128, stages=3)
    busy = problem.batch * problem.kv_heads * CLUSTERS[0] >= BUSY * device.multiprocessors
    return [many, usual] if busy else [usual, many]


def _ways(problem: Attention, tiling: Tiling, device: Device, cache: Cache | None) -> list[Candidate]:
    """The ways to share keys among blocks, the likeliest first."""
    heads, tiles = problem.batch * problem.kv_heads, -(-problem.keys // tiling.keys)
    splits = min(MOST_SPLITS, device.multiprocessors // heads, tiles // LEAST_TILES)
    if splits < 2:
        return [_alone(problem, tiling, device, cache)] if cache else []
    clusters = _clusters(problem, tiles, device)
    found = [_in_cluster(problem, tiling, cluster, device, cache) for cluster in clusters]
    apart = _combined(problem, tiling, splits, device, cache)
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


def _alone(problem: Attention, tiling: Tiling, device: Device, cache: Cache | None) -> Candidate:
    step = _split(problem, tiling, 1, 1, (ABSENT, ABSENT), device, cache)
    return Candidate(f"{step.kernel.entry} {tiling.name}", (step,))


def _in_cluster(problem: Attention, tiling: Tiling, cluster: int, device: Device, cache: Cache | None) -> Candidate:
    step = _split(problem, tiling, cluster, cluster, (ABSENT, ABSENT), device, cache)
    return Candidate(f"{step.kernel.entry} {tiling.name}, clusters of {cluster}", (step,))


def _combined(problem: Attention, tiling: Tiling, splits: int, device: Device, cache: Cache | None) -> Candidate:
    partial, totals = Pointer("scratch", 0), Pointer("scratch", 1)
    first = _split(problem, tiling, 1, splits, (partial, totals), device, cache)
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
        early=device.arch >= EARLY_ARCH,
    )  # fmt: skip
    rows = problem.batch * problem.kv_heads * splits * tiling.rows
    scratch = (rows * problem.value_size * 4, rows * 8)
    return Candidate(f"{first.kernel.entry} {tiling.name}, {splits} splits", (first, second), scratch)


def _split(
    problem: Attention,
    tiling: Tiling,
    cluster: int,
    splits: int,
    places: tuple[Pointer | Scalar, Pointer | Scalar],
    device: Device,
    cache: Cache | None,
) -> Launch:
    entry, constants = "attention_decode", {**defines(problem, tiling, device), "CLUSTER": cluster}
    more: tuple[Argument, ...] = ()
    if cache:
        entry = "attention_with_cache"
        pasts, new = (cache.past_k, cache.past_v), (cache.new_k, cache.new_v)
        constants["ACCESS"] = math.gcd(int(constants["ACCESS"]), access(problem, *pasts, *new))
        more = (*cache.arguments(), Scalar(cache.past, "int32"), Scalar(int(cache.same), "int32"))
    return Launch(
        Kernel(entry, entry, constants),
        (problem.batch * problem.kv_heads * splits, 1, 1),
        (tiling.threads, 1, 1),
        (*arguments(problem, 1), Scalar(splits, "int32"), *places, *more),
        shared_bytes(problem, tiling, device, True),
        cluster,
        early=device.arch >= EARLY_ARCH,
    )
