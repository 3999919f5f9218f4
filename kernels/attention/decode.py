"""Attention of few queries over many keys, which several blocks share: attention_decode and attention_with_cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

from onnxfuse.kernels.attention import one_query
from onnxfuse.kernels.attention.cache import NO_TURNS, Cache, access_bytes
from onnxfuse.kernels.attention.mma import (
    MAX_HEAD_DIM,
    MmaAttentionConfig,
    argument,
    defines,
    fitted,
    math_kind,
    shared_bytes,
)
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.multiprocessor import MMA_ARCH
from onnxfuse.kernels.tensors import ABSENT, int32
from onnxfuse.runtime.plan import Argument, Device, Kernel, Launch, Pointer, Struct, Value
from onnxfuse.runtime.symint import always, estimate, for_later_plans, gcd, is_symbolic, maximum, minimum

CLUSTER_ARCH: Final = 90  # the lowest compute capability with thread block clusters
CLUSTERS: Final = (2, 4, 8)  # blocks per cluster; eight is the portable limit, and sixteen were slower
# Clusters are preferred if their blocks occupy at least this share of the multiprocessors. On an H200, 64 heads run 1/5
# faster in clusters of 2 than in clusters of 4, and 1/4 faster than in clusters of 8.
BUSY_SHARE: Final = 0.9
MAX_ROWS: Final = 64  # maximum rows per block (queries x query heads per key head): four warps of sixteen rows
MIN_KEYS: Final = 128  # per block, but no more than two tiles; with fewer, it takes longer to start than it saves
MAX_SPLITS: Final = 64
FEWER_BLOCKS: Final = 1.5  # a cluster, which saves a launch, is preferred to up to so many times as many splits
MIN_ROWS_OF_EIGHT_WARPS: Final = 1024  # with fewer cache rows, eight warps per block do not have enough to copy
MAX_ROWS_OF_FEW_TILES: Final = 1536  # of caches without lengths; see _configs
COMBINE_THREADS: Final = 128
NO_SCRATCH: Final[tuple[Value, Value]] = (ABSENT, ABSENT)


def implementations(problem: Attention, device: Device, cache: Cache | None = None) -> list[Implementation]:
    """Return the implementations, the expected fastest first; none for many rows, few keys or no tensor cores.

    With a `cache`, k and v of the problem are the present caches, which the kernel also writes; any number of keys is
    then accepted.
    """
    rows = problem.queries * problem.gqa_group
    if device.arch < MMA_ARCH or rows > MAX_ROWS or max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return []
    found = [fitted(problem, config, device, combines=True) for config in _configs(problem, rows, device, cache)]
    # A block must hold all rows that share a key head.
    configs = dict.fromkeys(config for config in found if config and config.block_m >= rows)
    ways = one_query.implementations(problem, device, cache)
    for config in configs:
        with for_later_plans(*problem.sizes) if ways else nullcontext():
            ways += _implementations_of(problem, config, device, cache)
    return ways


def _configs(problem: Attention, rows: int, device: Device, cache: Cache | None) -> list[MmaAttentionConfig]:
    """Return configs of four or eight warps, or of fewer if registers do not suffice, with sixteen rows per warp.

    If the rows need fewer warps than a block has, several warps have the same rows, and divide the keys of each tile.
    """
    # Two warps suffice only if there are at most 32 rows for all values of dynamic sizes.
    warps_m = 1 if rows <= 16 else 2 if always(lambda: rows <= 32, rows) else 4
    large = max(problem.head_dim, problem.head_dim_v) > 128
    if large and math_kind(problem, device) == "FP32":  # too few registers for warps that share keys
        return [MmaAttentionConfig(warps_m, 1, 16, stages=3)]
    wide = large or math_kind(problem, device) != "HALF"
    warps_n, stages = max(1, 4 // warps_m), 4 if problem.quantized else 3  # a stage of bytes takes half of the memory
    four_warps = MmaAttentionConfig(warps_m, warps_n, max(32 if wide else 64, 16 * warps_n), stages=stages)
    if cache is None or wide or warps_m > 1 or estimate(problem.keys) < MIN_ROWS_OF_EIGHT_WARPS:
        return [four_warps]
    # With 64 heads and a cache of 4096 rows on an H200, eight warps take 82.5 us and four take 84.4 at head_dim 128; at
    # head_dim 64, eight take 45.8 us and four 55.1.  In caches of few tiles, a block of eight warps has two tiles where
    # one of four has three: a token of Llama-1B (int4) takes 0.456 ms in place of 0.477.  With lengths, most steps over
    # such caches have a kernel of their own (one_query.py).
    few_tiles = problem.lengths is None and estimate(problem.keys) <= MAX_ROWS_OF_FEW_TILES
    eight_warps = MmaAttentionConfig(1, 8, 128, stages=2 if few_tiles and problem.head_dim > 64 else 3)
    if is_symbolic(rows) and problem.head_dim > 64:  # a gain of 2 % is not worth compiling another kernel
        return [eight_warps if few_tiles else four_warps]
    busy = problem.batch * problem.kv_heads * CLUSTERS[0] >= BUSY_SHARE * device.multiprocessors
    return [eight_warps, four_warps] if few_tiles or busy else [four_warps, eight_warps]


def _implementations_of(
    problem: Attention, config: MmaAttentionConfig, device: Device, cache: Cache | None
) -> list[Implementation]:
    """Return one implementation for each way to split the keys over blocks, the expected fastest first."""
    heads, tiles = problem.batch * problem.kv_heads, -(-problem.keys // config.block_n)
    splits = maximum(1, minimum(MAX_SPLITS, device.multiprocessors // heads, tiles // _min_tiles(config)))
    # For dynamic sizes, this comparison becomes a soft guard: a condition under which the plan is expected to be the
    # fastest. At sizes for which the comparison has another answer, the plan's estimated loss is the ratio of the
    # compared numbers, minus 1 (`Expressions.miss`). If the limit were 2, the plan without splits would have a loss of
    # 2 / 2 - 1 = 0 at sizes that need two splits, and could be chosen for them.
    if estimate(splits) < 1.5:
        return [_in_cluster(problem, config, 1, device, cache)] if cache else []
    clusters = _clusters(problem, tiles // _min_tiles(config), device)
    in_clusters = [_in_cluster(problem, config, cluster, device, cache) for cluster in clusters]
    combined = _combined(problem, config, splits, device, cache)
    are_first = clusters and (
        heads * clusters[0] >= BUSY_SHARE * device.multiprocessors or splits <= clusters[-1] * FEWER_BLOCKS
    )
    return [*in_clusters, combined] if are_first else [combined, *in_clusters]


def _min_tiles(config: MmaAttentionConfig) -> int:
    """Return the minimum tiles per block."""
    return min(2, max(1, MIN_KEYS // config.block_n))


def _clusters(problem: Attention, most: int, device: Device) -> list[int]:
    """Return cluster sizes: the smallest that gives every multiprocessor a block, then the next larger one.

    `most` is the maximum number of blocks of a cluster.
    """
    if device.arch < CLUSTER_ARCH:
        return []
    heads = problem.batch * problem.kv_heads
    possible = [cluster for cluster in CLUSTERS if estimate(most) >= cluster]
    busy = [cluster for cluster in possible if heads * cluster >= BUSY_SHARE * device.multiprocessors]
    return busy[:2] if busy else possible[-1:]


def _in_cluster(
    problem: Attention, config: MmaAttentionConfig, cluster: int, device: Device, cache: Cache | None
) -> Implementation:
    """Return an implementation of one launch, in which the blocks of a cluster divide the keys of a head.

    If `cluster` is 1, each block has all keys.
    """
    step = _split(problem, config, cluster, NO_SCRATCH, device, cache)
    clusters = f", clusters of {cluster}" if cluster > 1 else ""
    return Implementation(f"{step.kernel.entry} {config.name}{clusters}", (problem.with_program(step),))


def _combined(
    problem: Attention, config: MmaAttentionConfig, splits: int, device: Device, cache: Cache | None
) -> Implementation:
    """Return an implementation of two launches: one computes the splits, one combines them."""
    first = _split(problem, config, splits, (Pointer("scratch", 0), Pointer("scratch", 1)), device, cache)
    _, shares, *_ = first.arguments
    names = ("OUT_T", "HEAD_DIM_V", "GQA_GROUP", "OUT_WIDTH", "ZERO_MASKED_ROWS")
    second = Launch(
        Kernel("attention_combine", "attention_combine", {name: first.kernel.defines[name] for name in names}),
        (problem.batch * problem.heads * problem.queries, 1, 1),
        (COMBINE_THREADS, 1, 1),
        (problem.out.argument, shares, *int32(problem.queries, problem.kv_heads, config.block_m)),
        pdl=device.has_pdl,
    )
    rows = problem.batch * problem.kv_heads * splits * config.block_m
    scratch = (rows * problem.head_dim_v * 4, rows * 8)
    count = "" if is_symbolic(splits) else f"{splits} "
    steps = (first, problem.with_program(second))
    return Implementation(f"{first.kernel.entry} {config.name}, {count}splits", steps, scratch)


def _split(
    problem: Attention, config: MmaAttentionConfig, splits: int, scratch: tuple[Value, Value], device: Device,
    cache: Cache | None,
) -> Launch:  # fmt: skip
    """Return the launch whose blocks each take one of `splits` slices of the keys.

    The blocks of a head write their results to `scratch` memory; with NO_SCRATCH they form a cluster.
    """
    cluster = splits if scratch == NO_SCRATCH else 1
    # For dynamic sizes, one kernel serves clusters of every size and blocks without a cluster.
    constant = 0 if problem.is_symbolic and device.arch >= CLUSTER_ARCH else cluster
    entry, constants = "attention_decode", {**defines(problem, config, device), "CLUSTER": constant}
    cache_arguments: tuple[Argument, ...] = ()
    if cache:
        entry = "attention_with_cache"
        constants["ACCESS_BYTES"] = gcd(int(constants["ACCESS_BYTES"]), access_bytes(problem, *cache.tensors))
        constants |= {"TURNS": int(cache.turns is not NO_TURNS)}
        if cache.turns is not NO_TURNS:
            constants |= cache.turns.defines(problem, whole_lanes=True)
        cache_arguments = (*cache.rows_arguments, *int32(cache.past_rows, +cache.same_offsets), cache.turns.argument)
        if problem.quantized:
            cache_arguments += (Struct(problem.quantized.scales),)
    return Launch(
        Kernel(entry, entry, constants),
        (problem.batch * problem.kv_heads * splits, 1, 1),
        (config.threads, 1, 1),
        (argument(problem, 1), Struct((*scratch, *int32(splits))), *cache_arguments),
        shared_bytes(problem, config, device, True),
        cluster,
        pdl=device.has_pdl,
    )
