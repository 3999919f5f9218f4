"""The record of a node that a pass folded away."""

from __future__ import annotations

from dataclasses import dataclass

from onnxfuse.ir.node import Node


@dataclass(frozen=True)
class Folded:
    """A node that vanished, and what its effect was folded into."""

    # constant, shape, batch_norm, scale, bias, cast, half, pad, branch (an If whose condition is known), or carried
    # (what no iteration of a Loop changes)
    kind: str
    node: str  # the label of the node
    into: str  # the name of a tensor, or the label of a node


def node_label(node: Node) -> str:
    """Return what reports call a node: its name, or that of its first output that is not left out if it has none."""
    return node.name or next((each.name for each in node.outputs if each.name), "")
