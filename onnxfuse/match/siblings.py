"""Outputs of a fusion that are no interior values of the first one: they share only operands with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxfuse.language.terms import Apply, Capture, Fusion, Product, Rearrange, Sum, Term, bare, walk
from onnxfuse.match.words import VIEWS
from onnxfuse.model.graph import Tensor, op_of

DEEPEST = 7  # nodes from a shared operand to an output: widen, multiply, turn, repeat, take the sine, scale, narrow
MOST = 64  # readers looked at

Sibling = tuple[Term, tuple[str, ...], frozenset[str]]


def siblings(fusion: Fusion) -> tuple[Sibling, ...]:
    """Each such output with the operands that it shares with the first, and the operators that it is made of."""
    inside = {id(term) for term in walk(fusion.outputs[0])}
    shared = {term.name for term in walk(fusion.outputs[0]) if isinstance(term, Capture) and term.kind == "tensor"}
    found = []
    for term in fusion.outputs[1:]:
        if id(bare(term)) not in inside:
            below = list(walk(term))
            anchors = tuple(t.name for t in below if isinstance(t, Capture) and t.name in shared)
            found.append((term, anchors, _ops(below)))
    return tuple(found)


def may_be_absent(fusion: Fusion, place: int) -> bool:
    """Whether an output may be left out: all its own operands may."""
    known = {term for output in fusion.outputs[:place] for term in walk(output) if isinstance(term, Capture)}
    own = {term for term in walk(fusion.outputs[place]) if isinstance(term, Capture)} - known
    return bool(own) and all(capture.optional for capture in own)


def computed_from(starts: Sequence[Tensor], ops: frozenset[str]) -> Iterator[Tensor]:
    """What these operators compute from the tensors in a few steps, the farthest first, in the order of the graph."""
    levels = [list(starts)]
    seen = {id(tensor) for tensor in starts}
    for _ in range(DEEPEST):
        readers = [node for tensor in levels[-1] for node in tensor.outputs if op_of(node) in ops]
        made = {id(node.outputs[0]): node.outputs[0] for node in readers if len(node.outputs) == 1}
        levels.append([tensor for key, tensor in made.items() if key not in seen][:MOST])
        seen |= made.keys()
    for level in reversed(levels[1:]):
        yield from level


def _ops(terms: Sequence[Term]) -> frozenset[str]:
    found: set[str] = set()
    for term in terms:
        match term:
            case Apply(op=op):
                found.add(op)
            case Sum():
                found |= {"Add", "Sub"}
            case Product():
                found |= {"Mul", "Div"}
            case Rearrange():
                found |= VIEWS
    return frozenset(found)
