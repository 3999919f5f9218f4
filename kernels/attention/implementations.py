"""All implementations of an Attention on a GPU, the expected fastest first."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.attention import decode, hopper, mma
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.symint import estimate, for_later_plans

MAX_IMPLEMENTATIONS: Final = 6  # maximum number of implementations; tuning compiles and times each
MAX_DECODE_ROWS: Final = 64  # largest number of rows (queries times query heads per key head) in one block
MIN_DECODE_KEYS: Final = 512  # from this number of keys on, several blocks share the keys if queries are few
# From this number of queries on, attention_hopper is tried first; see `_fills_hopper`.
MIN_HOPPER_QUERIES: Final = 160
MIN_WIDE_QUERIES: Final = 96  # replaces MIN_HOPPER_QUERIES for heads of more than 64 elements
MIN_MANY_QUERIES: Final = 40  # replaces MIN_HOPPER_QUERIES if batch times heads is at least MANY_HEADS
MIN_MASKED_QUERIES: Final = 96  # like MIN_MANY_QUERIES, but under a mask that attention_blocks.cu scans
# Replaces the last two in float32, where another launch transposes the values before attention_hopper. On an H200, 16 x
# 12 heads with 64 queries take 7.3 us by attention_mma and 8.6 by attention_hopper; 8 x 12 heads with 128, 9.7 and 9.1.
MIN_MANY_TF32_QUERIES: Final = 128
MANY_HEADS: Final = 24


def implementations(problem: Attention, device: Device) -> list[Implementation]:
    """Return the implementations of all kernels, the expected fastest first; none if no kernel takes the problem."""
    if math.isinf(problem.masked_score):
        problem = replace(problem, add_masked_score=False)  # adding -inf equals replacing the score by -inf
    if problem.positions:
        return mma.implementations(problem, device)
    rows = problem.queries * problem.gqa_group
    is_long = _fills_hopper(problem)
    if is_long and _skips_tiles(problem) and (wgmma := hopper.implementations(problem, device)):
        return wgmma[:1]
    if estimate(rows) <= MAX_DECODE_ROWS and estimate(problem.keys) >= MIN_DECODE_KEYS:
        order = [(decode.implementations, MAX_IMPLEMENTATIONS), (mma.implementations, 2), (hopper.implementations, 1)]
    elif is_long:
        order = [(hopper.implementations, 4), (mma.implementations, 2), (decode.implementations, 1)]
    else:
        order = [(mma.implementations, 3), (hopper.implementations, 2), (decode.implementations, 1)]
    found: list[Implementation] = []
    for kernels, most in order:
        with for_later_plans(*problem.sizes) if found else nullcontext():
            found += kernels(problem, device)[:most]
    return found[:MAX_IMPLEMENTATIONS]


def _fills_hopper(problem: Attention) -> bool:
    """Return whether attention_hopper is expected to be faster than attention_mma.

    The choice was measured on an H200 in 218 cases: plain, causal, with a bias, a mask of keys or of rows, or shared
    key heads; 16 to 150 queries and as many keys; 12 to 384 heads of 64 or 128 elements. The chosen kernel takes 1.008
    times as long as the faster one in the geometric mean, and 1.44 times at most. With MIN_HOPPER_QUERIES for all
    cases, these numbers would be 1.20 and 2.2.
    """
    many = bool(estimate(problem.batch) * problem.heads >= MANY_HEADS)
    if many and problem.dtype == "float32":
        least = MIN_MANY_TF32_QUERIES
    elif _skips_tiles(problem):
        least = MIN_MASKED_QUERIES if many else MIN_HOPPER_QUERIES
    elif many:
        least = MIN_MANY_QUERIES
    else:
        least = MIN_HOPPER_QUERIES if problem.head_dim <= 64 else MIN_WIDE_QUERIES
    return bool(estimate(problem.queries) >= least)


def _skips_tiles(problem: Attention) -> bool:
    """Return whether masks of this shape usually let a kernel skip whole tiles in models.

    The random masks of tuning let a kernel skip no tiles, so that times measured with these masks mislead. A mask that
    differs between heads acts as a bias, for which random values give fair times.
    """
    mask = problem.mask
    return bool(mask and mask.differs[2] and mask.key_stride and not mask.differs[1])
