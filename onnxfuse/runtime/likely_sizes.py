"""The sizes at which sessions probably run first; the kernels for them are compiled first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

LIKELY_FIRST: Final = (1, 8)  # sizes of the first dynamic dim, which is the batch in most models
LIKELY: Final = (1, 128)  # sizes of other dynamic dims, such as the length of a sequence
MAX_OTHERS: Final = 2  # dims besides the first that get both LIKELY sizes; 2 ** 3 combinations take 4 ms


def likely_sizes(count: int) -> Iterator[tuple[int, ...]]:
    """Yield likely combinations of `count` sizes; one empty combination if `count` is 0."""
    if not count:
        yield ()
        return
    others = min(count - 1, MAX_OTHERS)
    for first, *rest in itertools.product(LIKELY_FIRST, *[LIKELY] * others):
        yield (first, *rest, *[LIKELY[-1]] * (count - 1 - others))
