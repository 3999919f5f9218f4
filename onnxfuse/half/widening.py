"""Search for the fewest nodes that have to stay in float32."""

from __future__ import annotations

from collections.abc import Callable


def fewest(suffices: Callable[[int], bool], limit: int) -> int | None:
    """Return a number up to `limit` that suffices, at most about a quarter above the smallest; None if there is none.

    The number is doubled until it suffices, and then bisected.
    """
    too_few, count = 0, 1
    while not suffices(count):
        if count >= limit:
            return None
        too_few, count = count, min(2 * count, limit)
    while count - too_few > max(1, count // 4):
        middle = (count + too_few) // 2
        if suffices(middle):
            count = middle
        else:
            too_few = middle
    return count
