"""Let regions of few elements take the ways of many: thresholds of the planner that are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from onnxfuse.kernels.region import launch_schedule, tilings

SMALL: Final[tuple[tuple[Any, str, int], ...]] = (
    (tilings, "ROW_THREADS", 32), (tilings, "FEW_ROWS_WARP_ELEMENTS", 4), (tilings, "MAX_WARP_ELEMENTS", 4),
    (tilings, "MIN_ROUNDS", 1), (tilings, "MIN_SHARES", 2), (tilings, "MIN_DIVIDED_ROUNDS", 2),
    (tilings, "MIN_SHARED_ELEMENTS", 4), (tilings, "MIN_SHIFTED", 9), (launch_schedule, "MIN_STORED_ELEMENTS", 2),
)  # fmt: skip


@contextmanager
def small_tilings() -> Iterator[None]:
    """Set the thresholds while the body runs."""
    before = [(module, name, getattr(module, name)) for module, name, _ in SMALL]
    try:
        for module, name, value in SMALL:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
