"""The part of a report about a conversion to half precision."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from onnxfuse.half.precision import Kept
from onnxfuse.half.weights import ScratchFolder
from onnxfuse.printing import bytes_text, counted, escape, finite
from onnxfuse.verify.accepted import ENDS_COMPARISONS
from onnxfuse.verify.noise import ROUNDINGS

MAX_KEPT_SHOWN: Final = 10
USUAL_FACTOR: Final = 3.0  # errors up to this many times the noise of half precision are usual
ADDED_MASKS: Final = "where all keys of a row are masked, {} weights them by their scores, and float32 equally"


@dataclass(frozen=True)
class HalfError:
    """The error of an output: its difference from the same output in float32, relative to the largest value.

    For the measurement, nodes compute in float32, and each node's output is rounded to half precision, as kernels round
    it: onnxruntime's CPU provider has few half-precision operators, and does not round between most of them.  `noise`
    is the change of the float32 output if each weight and each input is perturbed, up or down at random, by one
    rounding error of half precision; it is the root mean square over several such perturbations.  Error and noise are
    infinite if NaN or infinite values appear.
    """

    name: str
    error: float
    noise: float

    def usual(self, dtype: str) -> float:
        """Return the largest usual error: USUAL_FACTOR times the noise, or one rounding of the output itself."""
        return max(USUAL_FACTOR * self.noise, ROUNDINGS[dtype])

    def is_usual(self, dtype: str) -> bool:
        """Return whether the error is finite, and usual."""
        return math.isfinite(self.error) and self.error <= self.usual(dtype)


@dataclass(frozen=True)
class HalfResult:
    """A model in half precision: the nodes that stayed in float32, and the errors of its outputs.

    `nodes` counts the nodes that compute on floating-point numbers before fusing.  `kept` lists the nodes that stayed
    in float32 because of their values; `by_rule` counts those that stayed because of their operators, by reason.
    """

    dtype: str
    io: str
    nodes: int
    kept: tuple[Kept, ...]
    by_rule: Mapping[str, int]
    bytes_before: int
    bytes_after: int
    errors: tuple[HalfError, ...] = ()
    max_error: float | None = None
    note: str = ""  # how the errors were measured if not as usual, or why they were not measured
    scratch: ScratchFolder | None = None  # the folder of converted external weights
    added_masks: int = 0  # number of softmaxes whose fully masked rows have other weights than in float32

    @property
    def tolerances(self) -> dict[str, float]:
        """The allowed error of each output: `max_error` if given, else the usual limit; at least the measured error."""
        usual = {e.name: e.usual(self.dtype) for e in self.errors}
        allowed = usual if self.max_error is None else dict.fromkeys(usual, self.max_error)
        return {e.name: max(allowed[e.name], e.error) for e in self.errors}

    @property
    def worst(self) -> HalfError | None:
        """The output with the largest error."""
        return max(self.errors, key=lambda each: each.error, default=None)

    @property
    def unusual(self) -> HalfError | None:
        """The output whose error exceeds its noise by the largest factor; None if the noise explains all errors."""
        found = [each for each in self.errors if not each.is_usual(self.dtype)]
        return max(found, key=lambda each: each.error / (each.noise or ROUNDINGS[self.dtype]), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values; an infinite error, which JSON cannot write, becomes None."""
        return {
            "dtype": self.dtype, "io": self.io, "nodes": self.nodes, "kept": [asdict(each) for each in self.kept],
            "by_rule": dict(self.by_rule), "bytes_before": self.bytes_before, "bytes_after": self.bytes_after,
            "max_error": self.max_error, "note": self.note, "added_masks": self.added_masks,
            "errors": [
                {"name": e.name, "error": finite(e.error), "noise": finite(e.noise),
                 "tolerance": finite(self.tolerances[e.name])}
                for e in self.errors
            ],
        }  # fmt: skip


def half_lines(half: HalfResult | None) -> list[str]:
    """Return the lines of a report about half precision; none for a model that was not converted."""
    if half is None:
        return []
    count = half.nodes - len(half.kept) - sum(half.by_rule.values())
    share = f"{count} of {counted(half.nodes, 'floating-point node')}"
    size = f"{bytes_text(half.bytes_before)} -> {bytes_text(half.bytes_after)} of weights"
    return [f"Half precision: {share} in {half.dtype}, {size}", *(f"  {escape(each)}" for each in half_sentences(half))]


def half_sentences(half: HalfResult) -> Iterator[str]:
    """Yield sentences on the nodes that stayed in float32, and on the errors."""
    for each in half.kept[:MAX_KEPT_SHOWN]:
        yield f"{each.op} '{each.node}' stays in float32: {each.reason}"
    if len(half.kept) > MAX_KEPT_SHOWN:
        yield f"{len(half.kept) - MAX_KEPT_SHOWN} more stay because of their values"
    for reason, count in half.by_rule.items():
        yield f"{counted(count, 'node stays', 'nodes stay')} in float32, {'each ' * (count > 1)}because {reason}"
    if half.added_masks:
        yield f"Masks added to scores: {half.added_masks}; {ADDED_MASKS.format(half.dtype)}"
    if (worst := half.worst) is not None:
        told = f"compared with the original, '{worst.name}' is off by {worst.error:.1e} of its largest value"
        noise = f"the noise of {half.dtype} there is {worst.noise:.1e}"
        if not math.isfinite(worst.noise):
            yield f"{told}, and any error is allowed, because rounding weights to {half.dtype} {ENDS_COMPARISONS}"
        elif half.max_error is None and not worst.is_usual(half.dtype):
            yield f"{told}, where {worst.usual(half.dtype):.1e} is usual; {noise}"
        else:
            yield f"{told}, and {half.tolerances[worst.name]:.1e} is allowed; {noise}"
    if half.note:
        yield half.note


def reasons(by_rule: tuple[Kept, ...]) -> dict[str, int]:
    """Return how many nodes stay for each reason, the most frequent first."""
    return dict(Counter(each.reason for each in by_rule).most_common())
