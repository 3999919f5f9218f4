"""Every way to run an Attention on a GPU, the expected fastest first."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from onnxfuse.kernels.attention import decode, hopper, mma
from onnxfuse.kernels.attention.problem import Attention
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device

MAX_IMPLEMENTATIONS: Final = 6  # each is compiled and timed when a new shape comes
MAX_DECODE_ROWS: Final = 64  # queries times query heads of a key head, which one block can hold
MIN_DECODE_KEYS: Final = 512  # keys from which it pays to split a few queries over several blocks
MIN_HOPPER_QUERIES: Final = 160  # queries from which Hopper's kernel fills its tiles


def implementations(problem: Attention, device: Device) -> list[Implementation]:
    """Return the implementations of all kernels, the expected fastest first; none if no kernel takes the problem."""
    if math.isinf(problem.masked_score):
        problem = replace(problem, add_masked_score=False)  # adding -inf is the same as putting it in place
    split_keys = decode.implementations(problem, device)
    wgmma = [] if problem.out_dtype else hopper.implementations(problem, device)
    general = mma.implementations(problem, device)
    rows = problem.queries * problem.gqa_group
    if rows <= MAX_DECODE_ROWS and problem.keys >= MIN_DECODE_KEYS:
        ordered = [*split_keys, *general[:2], *wgmma[:1]]
    elif problem.queries >= MIN_HOPPER_QUERIES and wgmma and _skips_tiles(problem):
        return wgmma[:1]
    elif problem.queries >= MIN_HOPPER_QUERIES:
        ordered = [*wgmma[:4], *general[:2], *split_keys[:1]]
    else:
        ordered = [*general[:3], *wgmma[:2], *split_keys[:1]]
    return ordered[:MAX_IMPLEMENTATIONS]


def _skips_tiles(problem: Attention) -> bool:
    """Return whether models' masks of this shape skip whole tiles, which random masks never do: timing is no guide.

    A mask that differs between heads is a bias in effect, so that timing with random values is fair.
    """
    mask = problem.mask
    return bool(mask and mask.query_stride and mask.key_stride and not mask.head_stride)
