"""The record of a node that a pass folded away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from onnxfuse.ir.node import Node

STORED: Final = "stored"  # the kind of Constants that became initializers; reports do not count Constants


@dataclass(frozen=True)
class Folded:
    """A node that vanished, and the node or tensor that its effect was folded into."""

    # The kind of folding: constant, shape, batch_norm, scale, bias, cast, pad, branch (an If whose condition is known),
    # carried (a tensor that no iteration of a Loop changes), or STORED.
    kind: str
    node: str  # the label of the node
    into: str  # the name of a tensor, or the label of a node


def node_label(node: Node) -> str:
    """Return the label of a node in reports: its name, or the name of its first present output."""
    return node.name or next((each.name for each in node.outputs if each.name), "")
