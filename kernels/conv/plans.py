"""Select the plans to offer for convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import FusedNode, Plan, TensorSpec

MAX_IMPLEMENTATIONS: Final = 8  # candidates; tuning compiles and times each of them
MAX_LIBRARY: Final = 2  # maximum number of candidates that use cuDNN


def plans(
    node: FusedNode, conv: Conv, y: TensorSpec, implementations: Callable[[], Sequence[Implementation]]
) -> list[Plan]:
    """Return the plans of a node; one plan without steps if y is empty.  Raises ValueError if no kernel supports it."""
    if not conv.pixels * conv.m:
        return [Plan((y,), ())]
    found = implementations()
    if not found:
        raise ValueError(f"{node.label}: no kernel takes {conv}")
    return [Plan((y,), each.steps, each.scratch) for each in found]


def with_library(own: Sequence[Implementation], library: Sequence[Implementation]) -> list[Implementation]:
    """Return the first of our own kernels, then cuDNN's first engines: MAX_IMPLEMENTATIONS at most."""
    library = library[:MAX_LIBRARY]
    return [*own[: MAX_IMPLEMENTATIONS - len(library)], *library]
