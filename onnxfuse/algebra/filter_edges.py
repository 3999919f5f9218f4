"""Sums of the weights of a filter, for each set of its taps that can lie inside the image.

If an image of integers has a zero point, a convolution subtracts the zero point times the sum of the weights.  It reads
zeros in the padding, which include no zero point, so the sum must only count the taps inside the image.  Along an axis,
the padding hides some of the first taps and some of the last taps.  Each pair of these two counts is a range; each
combination of ranges along all axes has a row of sums.  Rows are in row-major order: the last axis of the filter varies
fastest, and within an axis the count of hidden last taps.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

MAX_ROWS: Final = 1024  # maximum number of rows of sums; a filter of 11x11 with 5 pads on each side would have 1,296
Beyond: TypeAlias = tuple[tuple[int, int], ...]  # by axis: maximum number of taps before the image, and after it


def most_taps_beyond(
    kernel: Sequence[int], dilations: Sequence[int], pads_begin: Sequence[int], pads_end: Sequence[int]
) -> Beyond:
    """Return, for each axis, how many taps of the filter can lie before the image, and how many after it."""
    axes = zip(kernel, dilations, zip(pads_begin, pads_end, strict=True), strict=True)
    return tuple(
        (min(taps, -(-max(begin, 0) // dilation)), min(taps, -(-max(end, 0) // dilation)))
        for taps, dilation, (begin, end) in axes
    )


def row_count(beyond: Beyond) -> int:
    """Return the number of rows that `sums_inside` returns."""
    return math.prod((before + 1) * (after + 1) for before, after in beyond)


def sums_inside(weights: npt.NDArray[np.int8], beyond: Beyond) -> npt.NDArray[np.int32]:
    """Return sums of integer weights (n, *kernel, channels) over channels and taps inside the image: int32 (rows, n).

    Each combination of ranges of taps has a row; the docstring of this module says in which order.
    """
    of_taps = weights.sum(axis=-1, dtype=np.int32)
    is_inside = (
        np.array([
            [before <= tap < taps - after for tap in range(taps)]
            for before, after in itertools.product(range(most_before + 1), range(most_after + 1))
        ], np.int32)
        for taps, (most_before, most_after) in zip(of_taps.shape[1:], beyond, strict=True)
    )  # fmt: skip
    whole = functools.reduce(np.kron, is_inside, np.ones((1, 1), np.int32))
    return np.asarray(whole @ of_taps.reshape(len(of_taps), math.prod(of_taps.shape[1:])).T, np.int32)
