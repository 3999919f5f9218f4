"""Products into which a norm of x was fused: the attribute `prologue` describes the norm, which is computed first.

The node's first operands are those of the norm: x, `norm_residual` if the norm adds a residual, and `norm_scale`.  If
the norm outputs its sum, the sum is the node's last output.  Either the product's kernel normalizes the rows of x, or
the plan of the norm runs first.
"""

from __future__ import annotations

import json

from onnxfuse.ir.domain import PROLOGUE
from onnxfuse.runtime.plan import FusedNode


def norm_of(node: FusedNode) -> FusedNode | None:
    """Return the norm that was fused into a node, or None.  Raises ValueError if the attribute is malformed."""
    if PROLOGUE not in node.attributes:
        return None
    try:
        said = json.loads(node.text(PROLOGUE))
        fusion, operands, attributes = str(said["fusion"]), tuple(said["operands"]), dict(said["attributes"])
        dtypes = tuple(map(str, said["dtypes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{node.fusion}: its norm cannot be read: {type(error).__name__}: {error}") from error
    return FusedNode(fusion, node.name, operands, attributes, dtypes)
