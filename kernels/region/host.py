"""The plan of a region: launches of kernels that are generated from the node's program for its operands' shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnxfuse.algebra.sizes import Shape, product
from onnxfuse.kernels.region.launch_schedule import stages_of
from onnxfuse.kernels.region.launches import plan_of
from onnxfuse.kernels.region.program import parse, refusal
from onnxfuse.kernels.region.region import Region
from onnxfuse.kernels.region.round_trips import without_round_trips
from onnxfuse.kernels.region.shapes import infer, require_elements
from onnxfuse.kernels.region.sizes import Sizes
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec
from onnxfuse.runtime.symint import maximum, without_soft_guards

WORD: Final = 2**31  # number of elements from which on indices have 64 bits
MAX_BEYOND: Final = 2**21  # maximum by which an index in an idle thread exceeds the last element's index
MAX_OPERATIONS: Final = 200  # maximum number of operators per program: longer code takes too long to compile


def supports(node: FusedNode, dtypes: Sequence[str], device: Device) -> str | None:
    """Return why no kernel can be generated for this node; None if one can."""
    try:
        program = parse(node)
    except ValueError as error:
        return str(error)
    if len(program.operations) > MAX_OPERATIONS:
        return f"region: it has {len(program.operations)} operators; a kernel is generated for {MAX_OPERATIONS}"
    return refusal(program, dtypes, node.output_dtypes)


def candidates(node: FusedNode, inputs: Sequence[TensorSpec], device: Device) -> list[Plan]:
    """Return the one plan of a region, in a list.

    Raises ValueError if the operands' shapes do not fit the program, or if a kernel would have too many lines.
    """
    program, sizes = without_round_trips(parse(node)), Sizes()
    shapes = infer(program, {f"x{i}": sizes.read(spec.shape) for i, spec in enumerate(inputs)}, sizes)
    aligned = all(spec.aligned for spec in inputs)
    outputs = tuple(
        TensorSpec(tuple(sizes.value(dim) for dim in shapes.of[name]), program.dtypes[name], aligned)
        for name in program.outputs
    )
    groups: dict[Shape, list[str]] = {}
    for name in dict.fromkeys(program.outputs):
        if not _is_empty(shapes.of[name], sizes):
            groups.setdefault(shapes.of[name], []).append(name)
    if not groups:
        return [Plan(outputs, ())]
    require_elements(program, shapes)
    largest = maximum(*(sizes.value(count) for count in dict.fromkeys(map(product, shapes.of.values()))))
    region = Region(program, shapes, aligned, device, is_wide=not largest < WORD - MAX_BEYOND)
    # A template holds the plans of a node for all sizes.  Tensors with more than 2^31 elements are rare: for them, the
    # template gets only the plans that correctness requires, but no further plans that are only faster.
    with without_soft_guards(*([largest] if region.is_wide else [])):
        return [plan_of(region, stages_of(region, list(groups.values())), inputs, outputs)]


def _is_empty(shape: Shape, sizes: Sizes) -> bool:
    """Return whether a tensor has no elements."""
    return not all(dim != 0 and sizes.at_least(dim, 1) for dim in shape)
