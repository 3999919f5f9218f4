"""Side outputs: outputs of a fusion that are not interior values of its first output, but share operands with it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import Capture, Term, walk
from onnxfuse.dsl.words import Output
from onnxfuse.ir.node import Tensor, op_of

MAX_DEPTH = 7  # maximum nodes from a shared operand to an output, as in rotary_table: Cast, MatMul, Transpose, Concat …
MAX_TENSORS_PER_DEPTH = 64  # maximum number of tensors that are visited per depth


class SideOutput(NamedTuple):
    """An output of a fusion that is not computed on the way to the fusion's first output."""

    term: Term
    operands: tuple[str, ...]  # operands from which the first output is computed, too
    ops: frozenset[str]  # the operators of the side output's terms


def side_outputs(fusion: Fusion) -> tuple[SideOutput, ...]:
    """Return the outputs of a fusion that are not interior values of its first output."""
    inside = {id(term) for term in walk(fusion.outputs[0])}
    shared = {term.name for term in walk(fusion.outputs[0]) if isinstance(term, Capture) and term.kind == "tensor"}
    found = []
    for term in fusion.outputs[1:]:
        if id(term.unwrapped) not in inside and not (isinstance(term, Output) and id(term.inner) in inside):
            below = list(walk(term))
            operands = tuple(t.name for t in below if isinstance(t, Capture) and t.name in shared)
            found.append(SideOutput(term, operands, frozenset().union(*(t.own_ops for t in below))))
    return tuple(found)


@functools.cache
def may_be_absent(fusion: Fusion, index: int) -> bool:
    """Return whether an output can be absent: it has operands that no earlier output has, and these are optional."""
    known = {term for output in fusion.outputs[:index] for term in walk(output) if isinstance(term, Capture)}
    own = {term for term in walk(fusion.outputs[index]) if isinstance(term, Capture)} - known
    return bool(own) and all(capture.optional for capture in own)


def computed_from(starts: Sequence[Tensor], ops: frozenset[str]) -> Iterator[Tensor]:
    """Yield tensors that `ops` compute from `starts` in at most MAX_DEPTH nodes, the farthest first."""
    levels = [list(starts)]
    seen = {id(tensor) for tensor in starts}
    for _ in range(MAX_DEPTH):
        levels.append(_computed_next(levels[-1], ops, seen))
    for level in reversed(levels[1:]):
        yield from level


def _computed_next(tensors: Sequence[Tensor], ops: frozenset[str], seen: set[int]) -> list[Tensor]:
    """Return at most MAX_TENSORS_PER_DEPTH tensors that one node computes from `tensors`, and add them to `seen`."""
    found: list[Tensor] = []
    for tensor in tensors:
        for node in tensor.outputs:
            if op_of(node) in ops and len(node.outputs) == 1 and id(node.outputs[0]) not in seen:
                seen.add(id(node.outputs[0]))
                found.append(node.outputs[0])
                if len(found) == MAX_TENSORS_PER_DEPTH:
                    return found
    return found
