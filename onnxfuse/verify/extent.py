"""The runs that a verification makes: all of them, or one of each model and of each distinct fused node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from onnxfuse.errors import UsageError

Level: TypeAlias = Literal["full", "quick", "off"]

LEFT_OUT_BY_QUICK: Final = (
    "a second combination of sizes, sizes of 0 and 1, inverted flags, fully masked rows, drawn values of fused nodes, "
    "and runs with onnxruntime's own optimizations"
)


@dataclass(frozen=True)
class Extent:
    """Which runs a verification makes; it always makes further runs where all values so far hide errors.

    sizes     the number of combinations of sizes at which whole models run
    repeats   whether whole models run on inverted flags, too, and fused nodes on drawn values
    extremes  whether whole models run at sizes 0 and 1, with fully masked rows, and with onnxruntime's optimizations
    """

    level: Level = "full"
    sizes: int = 2
    repeats: bool = True
    extremes: bool = True

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about the runs that this level leaves out; nothing for "full"."""
        return (f"the verification was quick: it left out {LEFT_OUT_BY_QUICK}",) if self.level == "quick" else ()


FULL: Final = Extent()
WITHOUT_EXTREMES: Final = Extent(extremes=False)
QUICK: Final = Extent("quick", sizes=1, repeats=False, extremes=False)


def extent_of(verify: bool | Level) -> Extent | None:
    """Return the runs for an argument `verify`; None for "off" and False.  Raises UsageError for other values."""
    if verify in (True, "full"):
        return FULL
    if verify in (False, "off"):
        return None
    if verify != "quick":
        raise UsageError(f"verify is 'full', 'quick' or 'off', not '{verify}'")
    return QUICK
