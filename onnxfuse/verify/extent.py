"""The runs that a verification makes: all of them, or one of each model and of each distinct fused node."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from onnxfuse.errors import UsageError

Level: TypeAlias = Literal["full", "quick", "off"]

OTHER_SIZES: Final = "a second combination of sizes"
EDGES: Final = "sizes of 0 and 1"
FLAGS: Final = "inverted flags"
MASK_ROWS: Final = "fully masked rows"
DRAWN: Final = "drawn values of fused nodes"
OPTIMIZED: Final = "runs with onnxruntime's own optimizations"
LEFT_OUT_BY_QUICK: Final = f"{', '.join((OTHER_SIZES, EDGES, FLAGS, MASK_ROWS, DRAWN))}, and {OPTIMIZED}"

CUT: Final = "the verification left out"  # begins the sentence about the runs for which there was no time
MIN_SECONDS: Final = 30.0  # before this time, a full verification leaves nothing out for lack of time
MAX_OWN_RUNS: Final = 10.0  # times the original's own run, after which a full verification goes on as a quick one
# The shares of this time after which the original, and then fused nodes, get no further runs.  The optimized model then
# takes as long as the original took.
OF_ORIGINAL, OF_PARTS = 0.4, 0.6


@dataclass
class Budget:
    """The time for the runs that a full verification makes beyond those of a quick one, and which it leaves out.

    The time is MAX_OWN_RUNS times the seconds until onnxruntime has opened the original and run it once, and at least
    MIN_SECONDS.  It begins when the original is opened, and has no limit until `own` is known.
    """

    own: float = math.inf
    began: float = math.inf  # by time.monotonic
    left_out: dict[str, None] = field(default_factory=dict)  # names of runs, in order

    @property
    def seconds(self) -> float:
        """The time; infinite as long as `own` is not known."""
        return max(MIN_SECONDS, MAX_OWN_RUNS * self.own)

    def begin(self, began: float) -> None:
        """Note that the original was opened at this time, by time.monotonic, and has run; later calls do nothing."""
        if math.isinf(self.own):
            self.began, self.own = began, time.monotonic() - began

    def allows(self, what: str, share: float) -> bool:
        """Return whether a share of the time is not over; else record that a run, named `what`, is left out."""
        if time.monotonic() - self.began <= share * self.seconds:
            return True
        self.left_out[what] = None
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about what was left out; nothing if all was done."""
        if not self.left_out:
            return ()
        *first, last = self.left_out
        named = f"{', '.join(first)} and {last}" if first else last
        limit = f"{MAX_OWN_RUNS:g} times the original's own run of {self.own:.1f} s, and at least {MIN_SECONDS:g} s"
        return (f"{CUT} {named}, for which the limit of {self.seconds:.0f} s left no time ({limit})",)


@dataclass(frozen=True)
class Extent:
    """Which runs a verification makes; it always makes further runs where all values so far hide errors.

    sizes     the number of combinations of sizes at which whole models run
    repeats   whether whole models run on inverted flags, too, and fused nodes on drawn values
    extremes  whether whole models run at sizes 0 and 1, with fully masked rows, and with onnxruntime's optimizations
    budget    the time for what `sizes`, `repeats` and `extremes` add to a quick verification; None means no limit
    """

    level: Level = "full"
    sizes: int = 2
    repeats: bool = True
    extremes: bool = True
    budget: Budget | None = field(default=None, compare=False)

    def allows(self, what: str, share: float = OF_ORIGINAL) -> bool:
        """Return whether there is time for a run that a quick verification leaves out, named `what` in the report."""
        return self.budget is None or self.budget.allows(what, share)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence about the runs that this level, or its budget, leaves out; nothing if it leaves out none."""
        if self.level == "quick":
            return (f"the verification was quick: it left out {LEFT_OUT_BY_QUICK}",)
        return self.budget.notes if self.budget else ()


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
