"""The host side of attention_one_query.cu: a cluster of blocks attends to the cache of a key head."""

from __future__ import annotations

from typing import Final

from onnxfuse.kernels.attention.cache import NO_TURNS, Cache, access_bytes
from onnxfuse.kernels.attention.mma import LOG2_E
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.kernels.tensors import ABSENT, STORAGE, VECTOR_BYTES, Defines, float32, int32
from onnxfuse.runtime.plan import Device, Kernel, Launch, Struct
from onnxfuse.runtime.symint import estimate

ARCH: Final = 90  # the lowest compute capability with thread block clusters
CLUSTER: Final = 8  # blocks per key head: the portable limit
WARPS: Final = 8
# Threads for which a multiprocessor's registers suffice, by head_dim: registers that blocks do not take are left for
# kernels that start early.
REGISTER_THREADS: Final = {64: 512, 128: 256}
MAX_GROUP: Final = 8  # query heads per key head: mma's columns
MAX_KEYS: Final = 1536  # longer caches, whose keys other plans divide among more blocks, were not timed
BUSY_SHARE: Final = 0.92  # of the multiprocessors: so many can have clusters at once


def implementations(problem: Attention, device: Device, cache: Cache | None) -> list[Implementation]:
    """Return the implementation if the kernel takes the problem, and is expected to be the fastest; else none."""
    if cache is None or device.arch < ARCH or not _takes(problem, cache):
        return []
    resident = REGISTER_THREADS[problem.head_dim] // (32 * WARPS)  # blocks per multiprocessor
    blocks = estimate(problem.batch) * problem.kv_heads * CLUSTER
    is_fastest = estimate(problem.keys) <= MAX_KEYS and blocks <= BUSY_SHARE * resident * device.multiprocessors
    return [_implementation(problem, cache, device)] if is_fastest else []


def _takes(problem: Attention, cache: Cache) -> bool:
    """Return whether the kernel computes everything that the problem has."""
    others = (
        problem.mask, problem.bias, problem.slopes, problem.sinks, problem.program, problem.positions,
        problem.quantized, problem.softcap, problem.out_dtype,
    )  # fmt: skip
    if any(others) or problem.mask_kind != "none" or problem.lengths is None:
        return False
    if problem.window is not None and problem.window < problem.keys:
        return False
    if problem.dtype not in ("float16", "bfloat16") or problem.gqa_group > MAX_GROUP:
        return False
    if problem.head_dim not in REGISTER_THREADS or problem.head_dim_v != problem.head_dim:
        return False
    if cache.turns is not NO_TURNS and 2 * cache.turns.half not in (0, problem.head_dim):
        return False
    whole = access_bytes(problem, problem.q, problem.k, problem.v, *cache.tensors)
    return bool(whole == VECTOR_BYTES and problem.queries == 1)


def _implementation(problem: Attention, cache: Cache, device: Device) -> Implementation:
    shared = _shared_bytes(problem)
    constants: Defines = {
        "T": STORAGE[problem.dtype], "HEAD_DIM": problem.head_dim, "GQA_GROUP": problem.gqa_group, "WARPS": WARPS,
        "CLUSTER": CLUSTER, "SHARED_BYTES": shared, "ZERO_MASKED_ROWS": int(problem.zero_masked_rows),
        "REGISTER_THREADS": REGISTER_THREADS[problem.head_dim], "TURNS": int(cache.turns is not NO_TURNS),
    }  # fmt: skip
    if cache.turns is not NO_TURNS:
        constants |= {**cache.turns.defines(problem, whole_lanes=True), "LANES": 4}
        constants["POSITIONS"] = int(cache.turns.positions != ABSENT)
    sizes = Struct(int32(cache.past_rows, problem.keys, problem.kv_heads, +cache.same_offsets))
    step = Launch(
        Kernel("attention_one_query", "attention_one_query", constants),
        (problem.batch * problem.kv_heads * CLUSTER, 1, 1),
        (32 * WARPS, 1, 1),
        (
            *(each.argument for each in (problem.q, problem.out, problem.k, problem.v)), *cache.rows_arguments,
            problem.lengths or ABSENT, sizes, *float32(problem.scale * LOG2_E), cache.turns.argument,
        ),
        shared,
        CLUSTER,
        pdl=device.has_pdl,
    )  # fmt: skip
    return Implementation("attention_one_query", (step,))


def _shared_bytes(problem: Attention) -> int:
    """Return the bytes of the struct Memory of attention_one_query.cu."""
    rows = next(count for count in (1, 2, 4, MAX_GROUP) if problem.gqa_group <= count)
    of_warps = WARPS * rows * (problem.head_dim + 4 + 2)
    shares = CLUSTER * (rows * problem.head_dim // CLUSTER + 2)
    return -(-4 * (of_warps + shares) // 8) * 8 + 8
