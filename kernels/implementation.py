"""The implementations that a family of kernels offers for one problem: sequences of launches, which tuning compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

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


def one_after_the_other(lists: Sequence[Sequence[Implementation]]) -> list[Implementation]:
    """Return implementations that compute several problems in turn; `lists` has the implementations of each problem.

    Result number i runs implementation i of each problem, or its last one if it has fewer.  The problems share scratch
    memory.  If `lists` is empty, the only result has no steps.
    """
    sequences = []
    for i in range(max(map(len, lists), default=1)):
        chosen = [found[min(i, len(found) - 1)] for found in lists]
        steps = tuple(step for each in chosen for step in each.steps)
        scratch = tuple(max(sizes) for sizes in zip_longest(*(each.scratch for each in chosen), fillvalue=0))
        sequences.append(Implementation(", ".join(dict.fromkeys(each.name for each in chosen)), steps, scratch))
    return sequences
