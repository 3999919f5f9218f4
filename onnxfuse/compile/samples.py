"""Choose sample sizes within the sizes that a user gives for a model's inputs.

At these sizes, the variants of a template are made.  A template has the launches of a node's kernels for all sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from onnxfuse.algebra.size_parser import parse_size
from onnxfuse.algebra.sizes import Size, evaluate, symbols
from onnxfuse.runtime.sample_sizes import LARGEST_SIZE, MAX_SAMPLES, is_unusual, sizes_between
from onnxfuse.verify.shape_ranges import Range


def samples_within(dims: Sequence[str], ranges: Mapping[str, Range]) -> list[tuple[int, ...]]:
    """Return combinations of sizes of a node's dynamic dims, common sizes first; an empty list if no dim has a range.

    dims    the names of the dims, or expressions over names such as "past + sequence"
    ranges  the smallest and the largest size of dims of the model's inputs, by name
    """
    sizes = [parse_size(dim) for dim in dims]
    names = list(dict.fromkeys(name for size in sizes for name in symbols(size)))
    if not any(name in ranges for name in names):
        return []
    within = [ranges.get(name, (1, LARGEST_SIZE)) for name in names]
    per_octave = next((n for n in (8, 4, 2, 1) if _count(within, n) <= MAX_SAMPLES), 1)
    spreads = [sizes_between(low, high, per_octave) for low, high in within]
    while math.prod(map(len, spreads)) > 4 * MAX_SAMPLES:
        spreads = [[*each[:-1:2], each[-1]] for each in spreads]
    usual = [sorted(each, key=is_unusual) for each in spreads]
    points = itertools.product(*usual)
    found = [_at(sizes, dict(zip(names, values, strict=True))) for values in points]
    return [each for each in dict.fromkeys(found) if min(each) >= 0]


def _count(within: Sequence[Range], per_octave: int) -> int:
    return math.prod(len(sizes_between(low, high, per_octave)) for low, high in within)


def _at(sizes: Sequence[Size], values: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(evaluate(size, values) for size in sizes)
