"""Find the inputs of the first iteration of a Loop or Scan body, or of an If branch, in a run of the outer graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnxfuse.control_flow.body import Body
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.node import op_of


def values_needed(body: Body) -> set[str]:
    """Return the names of the outer graph's tensors that the first iteration of a body reads."""
    return {name for name, _ in body.begins.values()} | body.captured


def first_feeds(body: Body, values: Mapping[str, Array]) -> dict[str, Array] | None:
    """Return the inputs of a body's first iteration, or of an If's branch, taken or not; None if a value is unknown.

    `values` holds tensors of the outer graph by name.
    """
    feeds = {name: values[name] for name in body.captured if name in values}
    for name, (source, axis) in body.begins.items():
        value = values.get(source)
        if value is None or (axis is not None and not value.shape[axis]):
            return None
        feeds[name] = value if axis is None else np.take(value, 0, axis)
    if op_of(body.node) == "Loop":
        inputs = body.graph.model.graph.input[:2]
        for value, first in zip(inputs, (np.int64(0), np.bool_(True)), strict=False):
            feeds[value.name] = np.full([1] * len(value.type.tensor_type.shape.dim), first)
    return feeds if body.captured <= feeds.keys() else None
