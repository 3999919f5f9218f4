"""Nodes that a norm has joined: the attribute `prologue` says which norm gives the product its rows of x.

The node's first operands are those of the norm: x, and the norm's others by the names `norm_residual` and `norm_scale`.
Its last result is the norm's sum, if the norm has one.  A kernel normalizes the rows itself, or the plan of the norm
runs first.
"""

from __future__ import annotations

import json

from onnxfuse.ir.domain import PROLOGUE
from onnxfuse.runtime.plan import FusedNode


def norm_of(node: FusedNode) -> FusedNode | None:
    """Return the norm that has joined a node; None without one.  Raises ValueError if its attribute is malformed."""
    if PROLOGUE not in node.attributes:
        return None
    try:
        said = json.loads(node.text(PROLOGUE))
        fusion, operands, attributes = str(said["fusion"]), tuple(said["operands"]), dict(said["attributes"])
        dtypes = tuple(map(str, said["dtypes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{node.fusion}: its norm cannot be read: {type(error).__name__}: {error}") from error
    return FusedNode(fusion, node.name, operands, attributes, dtypes)
