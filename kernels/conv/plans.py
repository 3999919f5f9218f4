"""Choose the plans that the hosts of convolutions and of transposed convolutions offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from onnxfuse.kernels import epilogue_node
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.epilogue_node import Planner
from onnxfuse.kernels.epilogue_program import EpilogueProgram, in_epilogue, plans_in_epilogue
from onnxfuse.kernels.implementation import Implementation
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.symint import for_later_plans

MAX_IMPLEMENTATIONS: Final = 8  # candidates, of which tuning compiles and times each
MAX_LIBRARY: Final = 2  # of these, how many run by cuDNN
MAX_EPILOGUES: Final = MAX_IMPLEMENTATIONS - epilogue_node.MAX_TWO_STEPS  # kernels with a program in their epilogue


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


def joined_plans(
    node: FusedNode,
    inputs: Sequence[TensorSpec],
    device: Device,
    conv_of: Callable[[FusedNode, Sequence[TensorSpec], Device], tuple[Conv, TensorSpec]],
    of_programs: Callable[[Conv, Device], Sequence[Implementation]],
    candidates: Planner,
) -> list[Plan]:
    """Return the plans of a convolution that operators have joined: with these in its epilogue, and then behind it.

    `of_programs` are the ways to run one with a program in its epilogue, and `candidates` the plans of one without.
    Raises ValueError if shapes do not fit.
    """
    both = epilogue_node.joined(node)
    conv, y = conv_of(both.product, inputs[: both.own], device)

    def ways(program: EpilogueProgram) -> Sequence[Implementation]:
        return of_programs(in_epilogue(conv, program), device)[:MAX_EPILOGUES]

    found = plans_in_epilogue(both, y, inputs, conv.residual is None, ways)
    with for_later_plans(conv.pixels if found else 0):
        return [*found, *epilogue_node.in_two_steps(both, inputs, device, candidates)]


def with_library(own: Sequence[Implementation], library: Sequence[Implementation]) -> list[Implementation]:
    """Return the first of our own kernels and, behind them, cuDNN's first engines: MAX_IMPLEMENTATIONS at most."""
    library = library[:MAX_LIBRARY]
    return [*own[: MAX_IMPLEMENTATIONS - len(library)], *library]
