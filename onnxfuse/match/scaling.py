"""Match scaled(): collect the constant factors of Mul and Div nodes around a value and on its operands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from onnxfuse.dsl.terms import Capture, Term
from onnxfuse.ir.node import Node, Tensor, op_of, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.state import State


def match_scaled(
    m: MatchContext, term: Term, inner: Term, scale: Capture, tensor: Tensor, state: State
) -> Iterator[State]:
    """Yield the state after each way to match a tensor with `inner` times a number, the product of all factors."""
    factor = 1.0
    nodes: list[Node] = []
    while (node := producer(tensor)) is not None:
        if (step := scale_step(m, node)) is not None:
            tensor, factor = step[0], factor * step[1]
        elif m.casts and m.float_cast(tensor):
            tensor = node.inputs[0]
        elif op_of(node) in ("Mul", "Div"):
            m.fail(term, state.with_nodes([*nodes, node]), partial(_no_number, node, tuple(node.inputs)))
            return
        else:
            break
        nodes.append(node)
    inside = state.with_nodes(nodes)._replace(factor=factor)
    for after in m.match(inner, tensor, inside):
        yield from m.bind_value(scale, after.factor, after._replace(factor=state.factor))


def unscaled(m: MatchContext, tensor: Tensor, state: State) -> tuple[Tensor, State]:
    """Return an operand inside scaled() without its constant factors, and the state with its factor times these."""
    factor = state.factor
    nodes: list[Node] = []
    while factor is not None and (node := producer(tensor)) is not None and (step := scale_step(m, node)) is not None:
        tensor, factor = step[0], factor * step[1]
        nodes.append(node)
    return tensor, state.with_nodes(nodes, keep=True)._replace(factor=factor)


def scale_step(m: MatchContext, node: Node) -> tuple[Tensor, float] | None:
    """Return (x, c) if the node computes x * c, or x / (1/c), for a constant number c; None for other nodes."""
    if op_of(node) not in ("Mul", "Div") or m.rank_raising_constant(node) is not None:
        return None
    left, right = node.inputs
    value = m.number(right)
    if value is not None:
        if op_of(node) == "Mul":
            return left, value
        return (left, 1 / value) if value else None
    value = m.number(left)
    return (right, value) if value is not None and op_of(node) == "Mul" else None


def _no_number(node: Node, inputs: Sequence[Tensor]) -> str:
    """Return the sentence of a miss: the pattern needs a product with a number, but the node has no constant number.

    `inputs` are the node's inputs at the time of the match, because a later rewrite can have removed them.
    """
    left, right = (t.name for t in inputs)
    return f"{op_of(node)} '{node.name}' takes '{left}' and '{right}'; required a constant number as one of them"
