"""The implementations that a family of kernels offers for one problem: sequences of launches, which tuning compares."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.runtime.plan import Step


@dataclass(frozen=True)
class Implementation:
    """One way to compute a problem, to be timed against others: the steps of a plan, without its outputs.

    Each implementation numbers its scratch buffers from 0, because only one implementation runs, and has the plan's
    scratch memory to itself.
    """

    name: str  # the kernel and its tile sizes, for reports
    steps: tuple[Step, ...]
    scratch: tuple[int, ...] = ()  # bytes of each scratch buffer
