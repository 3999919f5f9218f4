"""Choose the plans that the hosts of convolutions and of transposed convolutions offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import FusedNode, Plan, TensorSpec

MAX_IMPLEMENTATIONS: Final = 8  # candidates, of which tuning compiles and times each
MAX_LIBRARY: Final = 2  # of these, how many run by cuDNN


def plans(
    node: FusedNode, conv: Conv, y: TensorSpec, implementations: Callable[[], Sequence[Implementation]]
) -> list[Plan]:
    """Return the plans of a node; if y has no elements, one without steps.  Raises ValueError if no kernel takes it."""
    if not conv.pixels * conv.m:
        return [Plan((y,), ())]
    found = implementations()
    if not found:
        raise ValueError(f"{node.fusion} '{node.name}': no kernel takes {conv}")
    return [Plan((y,), each.steps, each.scratch) for each in found]


def with_library(own: Sequence[Implementation], library: Sequence[Implementation]) -> list[Implementation]:
    """Return the first of our own kernels and, behind them, cuDNN's first engines: MAX_IMPLEMENTATIONS at most."""
    library = library[:MAX_LIBRARY]
    return [*own[: MAX_IMPLEMENTATIONS - len(library)], *library]
