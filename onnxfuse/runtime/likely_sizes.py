"""The sizes at which sessions probably run first, and whose kernels are therefore compiled first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

LIKELY_FIRST: Final = (1, 8)  # of the first dynamic dim, which is the batch in most models
LIKELY: Final = (1, 128)  # of the others, such as the length of a sequence
MAX_OTHERS: Final = 2  # that differ from each other; choosing variants at 8 combinations takes 4 ms a template


def likely_sizes(count: int) -> Iterator[tuple[int, ...]]:
    """Yield likely combinations of `count` sizes; the one without sizes if there are none."""
    if not count:
        yield ()
        return
    others = min(count - 1, MAX_OTHERS)
    for first, *rest in itertools.product(LIKELY_FIRST, *[LIKELY] * others):
        yield (first, *rest, *[LIKELY[-1]] * (count - 1 - others))
