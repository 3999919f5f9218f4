"""The one form in which Loops, Scans and unrolled steps are described: what a step reads, computes and hands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.ir.node import Node, Tensor


class NoScan(Exception):
    """A Loop, a Scan or unrolled steps cannot become a scan; the message says why, as a sentence."""


@dataclass(frozen=True)
class State:
    """A value that each step computes for the next one.

    It has the shape of `like`; `initial` may be smaller, and is then broadcast to this shape.
    """

    initial: Tensor  # of the graph
    like: Tensor  # of the graph
    begin: str  # the step's name of the present value
    end: str  # the step's name of the next value
    final: Tensor | None  # the tensor of the graph that holds the value after the last step; None if nothing reads it


@dataclass(frozen=True)
class Sliced:
    """A tensor of the graph, and the step's name of its slice at the step's place along an axis.

    As an output, the tensor has the slices that the steps compute.  `keeps_axis` says whether the slice has the axis,
    with size 1.
    """

    tensor: Tensor
    axis: int  # not negative
    name: str
    keeps_axis: bool = False


@dataclass(frozen=True)
class Recurrence:
    """A recurrence in a graph.  A step may also read constants and tensors of the graph, by their names there.

    `replaced` are nodes of the graph.  `body` are the nodes of one step in execution order, in the graph of `shapes`.
    """

    replaced: Sequence[Node]
    shapes: ShapeInfo
    body: Sequence[Node]
    states: Sequence[State]
    inputs: Sequence[Sliced]
    outputs: Sequence[Sliced]
    begins: Sequence[Node] = ()  # nodes of empty sequences, which others may read
    backwards: bool = False  # whether the first step takes and computes the last slices


def needed(nodes: Sequence[Node], names: Sequence[str], known: Sequence[str]) -> list[Node]:
    """Return those nodes, in their order, that compute `names` from `known` names and from what no node computes."""
    made = {tensor.name: node for node in nodes for tensor in node.outputs if tensor.name}
    found, work = set[Node](), [name for name in names if name not in known]
    while work:
        node = made.get(work.pop())
        if node is not None and node not in found:
            found.add(node)
            work += [tensor.name for tensor in node.inputs if tensor.name not in known]
    return [node for node in nodes if node in found]
