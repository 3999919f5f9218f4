"""Count the calls of functions that something takes: they depend on no machine, and on nothing else that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def counted_calls(run: Callable[[], object]) -> int:
    """Return how many functions, of Python and of C, are called."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
