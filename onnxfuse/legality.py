"""Whether a match may be replaced: nothing outside may need what would vanish, and no cycle may arise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnxfuse.graph import Graph, Node, Tensor, op_of, unique


@dataclass(frozen=True)
class Refusal:
    """Why not, and what the user can change."""

    sentence: str
    hint: str = "let nothing else read the value, or take it off the graph's outputs"


def refusal(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[Tensor], operands: Mapping[str, Tensor]
) -> Refusal | None:
    """The reason not to replace `nodes` by one node that reads `operands` and computes `outputs`; None where it may."""
    inside = {id(n) for n in nodes}
    found = _needed_outside(graph, nodes, inside, outputs) or _read_inside(inside, operands)
    ways_out = [t for n in nodes for t in n.outputs if any(id(reader) not in inside for reader in t.outputs)]
    if found or len(ways_out) <= 1:  # no operand can come from what is fused
        return found
    return _cycle(graph, nodes, operands)


def used(graph: Graph, nodes: Sequence[Node], outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs up to the last one that something outside reads; the first one always is."""
    inside = {id(n) for n in nodes}
    needed = list(outputs)
    while len(needed) > 1 and not _lives(graph, needed[-1], inside):
        needed.pop()
    return needed


def _lives(graph: Graph, tensor: Tensor, inside: set[int], steps: int = 12) -> bool:
    """Whether a value has readers that will stay: views that only lead inside, which others might read, will not."""
    outside = [reader for reader in tensor.outputs if id(reader) not in inside]
    return graph.is_kept(tensor) or any(
        not steps or _lives(graph, made, inside, steps - 1) for reader in outside for made in reader.outputs
    )


def _needed_outside(
    graph: Graph, nodes: Sequence[Node], inside: set[int], outputs: Sequence[Tensor]
) -> Refusal | None:
    allowed = {t.name for t in outputs}
    for node in nodes:
        for tensor in node.outputs:
            if tensor.name in allowed:
                continue
            if graph.is_kept(tensor):
                return Refusal(f"'{tensor.name}' ({_label(node)}) is an output of the graph or read in a subgraph")
            readers = (r for r in unique(tensor.outputs) if id(r) not in inside)
            reader = next((r for r in readers if any(_lives(graph, made, inside) for made in r.outputs)), None)
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
