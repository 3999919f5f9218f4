"""Whether a match may be replaced: nothing outside may need what would vanish, and no cycle may arise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.model.graph import Graph, Node, Tensor, op_of, unique


@dataclass(frozen=True)
class Refusal:
    """Why not, and what the user can change."""

    sentence: str
    hint: str = "let nothing else read the value, or take it off the graph's outputs"


def refusal(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[Tensor], operands: Mapping[str, Tensor]
) -> Refusal | None:
    """The reason not to replace `nodes` by one node that reads `operands` and computes `outputs`; None where it may."""
    inside, read = {id(n) for n in nodes}, {id(t) for t in operands.values()}
    found = (
        _needed_outside(graph, nodes, inside, outputs, read)
        or _read_inside(inside, operands)
        or _continued(inside, outputs[0])
    )
    interior = (t for n in nodes for t in n.outputs if t is not outputs[0])
    if found or all(id(reader) in inside for t in interior for reader in t.outputs):  # no operand can come from there
        return found
    return _cycle(graph, nodes, operands)


def used(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[Tensor], operands: Mapping[str, Tensor]
) -> list[Tensor]:
    """The outputs up to the last one that something outside reads; the first one always is."""
    inside, read = {id(n) for n in nodes}, {id(t) for t in operands.values()}
    needed = list(outputs)
    while len(needed) > 1 and not _lives(graph, needed[-1], inside, read):
        needed.pop()
    return needed


def _lives(graph: Graph, tensor: Tensor, inside: set[int], read: set[int]) -> bool:
    """Whether something that will stay reads a value."""
    return graph.is_kept(tensor) or any(_stays(graph, r, inside, read) for r in tensor.outputs if id(r) not in inside)


def _stays(graph: Graph, reader: Node, inside: set[int], read: set[int], steps: int = 12) -> bool:
    """Whether a node outside will stay: one of views that only lead inside, and not to operands (`read`), will not."""
    if not steps:
        return True
    return any(
        id(made) in read
        or graph.is_kept(made)
        or any(_stays(graph, after, inside, read, steps - 1) for after in made.outputs if id(after) not in inside)
        for made in reader.outputs
    )


def _needed_outside(
    graph: Graph, nodes: Sequence[Node], inside: set[int], outputs: Sequence[Tensor], read: set[int]
) -> Refusal | None:
    allowed = {t.name for t in outputs}
    for node in nodes:
        for tensor in node.outputs:
            if tensor.name in allowed:
                continue
            if graph.is_kept(tensor):
                return Refusal(f"'{tensor.name}' ({_label(node)}) is an output of the graph or read in a subgraph")
            readers = (r for r in unique(tensor.outputs) if id(r) not in inside)
            reader = next((r for r in readers if _stays(graph, r, inside, read)), None)
            if reader is not None:
                return Refusal(
                    f"'{tensor.name}' ({_label(node)}) is also read by {_label(reader)}; required no reader outside"
                )
    return None


def _read_inside(inside: set[int], operands: Mapping[str, Tensor]) -> Refusal | None:
    """Whether an operand is a value that would vanish, as in `relu(a) + a` with `a` as the residual."""
    for name, operand in operands.items():
        if any(id(n) in inside for n in operand.inputs):
            return Refusal(
                f"{name} ('{operand.name}') is itself computed inside; required a value from outside",
                "compute the operand from something else",
            )
    return None


def _continued(inside: set[int], first: Tensor) -> Refusal | None:
    """Whether another output is computed from the first one, as `a` and `a + b`: then it would be computed twice."""
    reader = next((r for r in first.outputs if id(r) in inside), None)
    if reader is None:
        return None
    return Refusal(f"{_label(reader)} goes on from '{first.name}'; required outputs computed beside each other")


def _cycle(graph: Graph, nodes: Sequence[Node], operands: Mapping[str, Tensor]) -> Refusal | None:
    """Whether an operand is computed from one of several outputs; nothing that runs before the nodes can be."""
    inside, first = set(nodes), min(graph.place[n] for n in nodes)
    seen: set[Node] = set()
    for name, operand in operands.items():
        work: list[Node] = list(operand.inputs)
        while work:
            node = work.pop()
            if node in inside:
                return Refusal(
                    f"{name} ('{operand.name}') is computed from a value inside; fusing would make a cycle",
                    "compute the operand from something else",
                )
            if node not in seen and graph.place[node] >= first:
                seen.add(node)
                work.extend(p for t in node.inputs for p in t.inputs)
    return None


def _label(node: Node) -> str:
    return f"{op_of(node)} '{node.name or node.outputs[0].name}'"
