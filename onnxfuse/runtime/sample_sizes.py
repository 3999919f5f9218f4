"""Sample sizes of dynamic dims, at which a template's plans are made: powers of two, numbers between, and zero."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Final

import numpy as np

MAX_SAMPLES: Final = 1024  # about the largest number of samples, which are combinations of sizes
LARGEST_SIZE: Final = 1 << 16  # the largest sample of a dim
HALVED_ONCE: Final = {26, 194, 1538}  # sizes divisible by 2 but not by 4, which affect the width of memory accesses
USUAL: Final = 128  # the usual size of a dim
# If there are more sizes, a sample has at most one 0, because each set of sizes that are 0 may need its own kernel.
MAX_SIZES_WITH_ZEROS: Final = 4


def usual_samples(count: int) -> Iterator[tuple[int, ...]]:
    """Yield combinations of `count` sizes, common sizes first: powers of two, and even and odd numbers between them."""
    if not count:
        yield ()
        return
    per_octave = next((n for n in (8, 4, 2, 1) if len(_spread(n)) ** count <= MAX_SAMPLES), 1)
    spread = coarse = _spread(per_octave)
    # If there are too many combinations, keep only powers of two.  If these are still too many, leave out the largest
    # size again and again, or every second size if `count` is 4 or more.
    while len(coarse) ** count > 4 * MAX_SAMPLES:
        powers = [size for size in coarse if not size & (size - 1)]
        coarse = powers if len(powers) < len(coarse) else coarse[:-1] if count < 4 else coarse[::2]
    yield from itertools.product(sorted(coarse, key=is_unusual), repeat=count)
    # `coarse` has hardly any odd sizes, and the product of a combination of its sizes is rarely small.  Add random
    # combinations of all sizes, and combinations in which all sizes but one are 1.
    if len(coarse) < len(spread):
        chance = random.Random(0)
        yield from (tuple(chance.choices(spread, k=count)) for _ in range(MAX_SAMPLES))
        for axis, size in itertools.product(range(count), spread):
            yield tuple(size if i == axis else 1 for i in range(count))


def samples_with_zeros(count: int) -> Iterator[tuple[int, ...]]:
    """Yield combinations of `count` sizes with one 0; if `count` is small, also combinations with several zeros."""
    for axis in range(count):
        yield tuple(0 if i == axis else USUAL for i in range(count))
    if 0 < count <= MAX_SIZES_WITH_ZEROS:
        sizes = [0, *sorted(_spread(1), key=is_unusual)][: int(MAX_SAMPLES ** (1 / count))]
        yield from (each for each in itertools.product(sizes, repeat=count) if 0 in each)


def sizes_between(low: int, high: int, per_octave: int) -> list[int]:
    """Return `low`, `high`, and the sizes between them for which templates are usually made (see `_spread`)."""
    return sorted({low, high, *(size for size in _spread(per_octave) if low <= size <= high)})


def is_unusual(size: int) -> tuple[bool, float]:
    """Return a sort key that puts common sizes first: powers of two before others, and then by distance from USUAL."""
    return size & (size - 1) != 0, abs(float(np.log2(max(1, size))) - np.log2(USUAL))


def _spread(per_octave: int) -> list[int]:
    """Return sizes from 1 on: in each octave, `per_octave` equally spaced sizes and an odd one; also HALVED_ONCE."""
    found = {1, 2, 3}
    octave = 4
    while octave <= LARGEST_SIZE:
        found |= {octave + octave * i // per_octave for i in range(per_octave)} | {octave + octave // 3 | 1}
        octave *= 2
    return sorted(found | HALVED_ONCE)
