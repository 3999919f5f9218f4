"""Find variances that are written as mean(x²) - mean(x)²: half precision can lose all bits of such a difference.

Flax writes all its norms that way.  If the mean is large compared with the deviation, the two means agree in most of
their bits.  If it is 45 times as large, none of 11 bits is left, and the difference can become negative.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.half.scope import Scope, elements, is_arithmetic
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer

MEANS: Final = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"})
ON_THE_WAY: Final = REARRANGING | {"Div", "Mul"}  # operators between a mean and the Sub; Div and Mul only by constants


def variance_nodes(scope: Scope) -> frozenset[Node]:
    """Return the nodes of variances written as mean(x²) - mean(x)², and the arithmetic that follows them.

    The arithmetic ends with the first node that also reads other data, or before the first node that reads a weight.
    """
    found: set[Node] = set()
    for node in scope.graph.nodes:
        if op_of(node) == "Sub":
            found |= _variance(scope, node)
    inner = set(found)
    for node in scope.graph.nodes if found else ():
        reads = {producer(each) for each in scope.real_inputs(node) if elements(each) != 1}
        if node in found or not reads & inner or not is_arithmetic(node):
            continue
        if any(elements(each) > 1 for each in scope.real_inputs(node)):
            continue  # the arithmetic in float32 ends before the multiplication by the norm's scale
        found.add(node)
        if reads <= inner:
            inner.add(node)
    return frozenset(found)


def _variance(scope: Scope, node: Node) -> set[Node]:
    """Return the nodes that compute the variance whose last node is `node`; none if `node` computes no variance."""
    of_squares, square = map(producer, node.inputs)
    if of_squares is None or square is None or (mean := _squared(scope, square)) is None:
        return set()
    to_squares, squares = _behind_mean(scope, node.inputs[0])
    to_data, data = _behind_mean(scope, mean)
    first = producer(squares)
    if first is None or not to_squares or not to_data or _squared(scope, first) is not data:
        return set()
    return {node, square, first, *to_squares, *to_data}


def _squared(scope: Scope, node: Node) -> Tensor | None:
    """Return the tensor that a node squares; None if it squares nothing."""
    if op_of(node) == "Mul" and node.inputs[0] is node.inputs[1]:
        return node.inputs[0]
    if op_of(node) == "Pow" and scope.graph.number(node.inputs[1]) == 2:
        return node.inputs[0]
    return None


def _behind_mean(scope: Scope, tensor: Tensor) -> tuple[Sequence[Node], Tensor]:
    """Return the nodes that compute a mean, and the tensor that they average; no nodes if `tensor` is not a mean.

    The mean can be scaled or go through views.
    """
    members = list(_chain(scope, tensor))
    last = max((k for k, node in enumerate(members) if node.op in MEANS), default=-1)
    members = members[: last + 1]
    return members, _data(scope, members[-1])[0] if members else tensor


def _chain(scope: Scope, tensor: Tensor) -> Iterator[Node]:
    while (node := producer(tensor)) is not None:
        others = _data(scope, node)
        if op_of(node) not in MEANS | ON_THE_WAY or len(others) != 1 or _squared(scope, node) is not None:
            return
        if node.op == "Div" and node.inputs[0] is not others[0]:
            return
        yield node
        tensor = others[0]


def _data(scope: Scope, node: Node) -> list[Tensor]:
    return [each for each in scope.real_inputs(node) if not is_constant(each)]
