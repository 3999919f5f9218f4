"""Every way to run an Attention on a GPU, the expected fastest first."""

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

MAX_IMPLEMENTATIONS: Final = 6  # each is compiled and timed when a new shape comes
MAX_DECODE_ROWS: Final = 64  # queries times query heads of a key head, which one block can hold
MIN_DECODE_KEYS: Final = 512  # keys from which it pays to split a few queries over several blocks
MIN_HOPPER_QUERIES: Final = 160  # queries from which Hopper's kernel fills its tiles


def implementations(problem: Attention, device: Device) -> list[Implementation]:
    """Return the implementations of all kernels, the expected fastest first; none if no kernel takes the problem."""
    if math.isinf(problem.masked_score):
        problem = replace(problem, add_masked_score=False)  # adding -inf is the same as putting it in place
    rows = problem.queries * problem.gqa_group
    is_long = estimate(problem.queries) >= MIN_HOPPER_QUERIES
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


def _skips_tiles(problem: Attention) -> bool:
    """Return whether models' masks of this shape skip whole tiles, which random masks never do: timing is no guide.

    A mask that differs between heads is a bias in effect, so that timing with random values is fair.
    """
    mask = problem.mask
    return bool(mask and mask.differs[2] and mask.key_stride and not mask.differs[1])
