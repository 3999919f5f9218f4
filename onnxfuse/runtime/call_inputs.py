"""Convert the inputs of a model's fused nodes to the form of plan templates, in which dynamic dims are numbered."""

from __future__ import annotations

from collections.abc import Sequence

from onnxfuse.runtime.fused_calls import Call, NamedShape
from onnxfuse.runtime.plan import TensorSpec
from onnxfuse.runtime.planner import Dims


def inputs_of(call: Call) -> tuple[TensorSpec, ...] | None:
    """Return a node's inputs, with dynamic dim number k written as -1 - k; None if a rank or a dtype is unknown."""
    dims = dims_of(call.shapes)
    if dims is None or None in call.dtypes:
        return None
    rows = zip(dims, call.dtypes, call.constants, strict=True)
    return tuple(TensorSpec(shape, str(dtype), constant=constant) for shape, dtype, constant in rows)


def dims_of(shapes: Sequence[NamedShape | None]) -> Dims | None:
    """Return the shapes with -1 - k in place of the name of dynamic dim number k; None if a rank is unknown.

    Dynamic dims are numbered in order of first use.
    """
    numbers = {name: -1 - number for number, name in enumerate(dim_names(shapes))}
    known = [
        tuple(dim if isinstance(dim, int) else numbers[dim] for dim in shape) for shape in shapes if shape is not None
    ]
    return tuple(known) if len(known) == len(shapes) else None


def dim_names(shapes: Sequence[NamedShape | None]) -> list[str]:
    """Return the names of the dynamic dims, in order of first use."""
    return list(dict.fromkeys(dim for shape in shapes for dim in shape or () if isinstance(dim, str)))
