"""The record of a node that a pass folded away."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.node import Node


@dataclass(frozen=True)
class Folded:
    """A node that vanished, and the node or tensor that its effect was folded into."""

    # The kind of folding: constant, shape, batch_norm, scale, bias, cast, pad, branch (an If whose condition is known),
    # or carried (a tensor that no iteration of a Loop changes).
    kind: str
    node: str  # the label of the node
    into: str  # the name of a tensor, or the label of a node


def node_label(node: Node) -> str:
    """Return the label of a node in reports: its name, or the name of its first present output."""
    return node.name or next((each.name for each in node.outputs if each.name), "")
