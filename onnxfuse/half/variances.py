"""Find variances that are written as mean(x²) - mean(x)²: half precision loses such a difference wholly.

Flax writes all its norms that way.  The two means agree in most of their bits where the mean is large beside the
deviation: of 11 bits none is left where it is 45 times as large, and the difference may become negative.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import onnx.numpy_helper

from onnxfuse.algebra.operators import REARRANGING
from onnxfuse.half.operators import is_onnx
from onnxfuse.half.scope import Scope

MEANS: Final = frozenset({"AveragePool", "GlobalAveragePool", "ReduceMean", "ReduceSum"})
ON_THE_WAY: Final = REARRANGING | {"Div", "Mul"}  # by constants


def variance_nodes(scope: Scope) -> frozenset[int]:
    """Return the nodes of such variances, from the squares to where their results meet other data."""
    found: set[int] = set()
    for i, node in enumerate(scope.nodes):
        if is_onnx(node) and node.op_type == "Sub":
            found |= _variance(scope, i)
    inner = set(found)
    for i in range(min(found, default=len(scope.nodes)), len(scope.nodes)):
        reads = {scope.producers.get(name) for name in scope.real_inputs(i) if scope.elements(name) != 1}
        if i in found or not reads & inner or not scope.is_arithmetic(i):
            continue
        if any(scope.elements(name) > 1 for name in scope.real_inputs(i)):
            continue  # a scale: the quotient ends here
        found.add(i)
        if reads <= inner:
            inner.add(i)
    return frozenset(found)


def _variance(scope: Scope, i: int) -> set[int]:
    """Return the nodes that compute a difference, if it is a variance."""
    of_squares, square = (scope.producers.get(name) for name in scope.nodes[i].input)
    if of_squares is None or square is None or (mean := _squared(scope, square)) is None:
        return set()
    to_squares, squares = _behind_mean(scope, scope.nodes[i].input[0])
    to_data, data = _behind_mean(scope, mean)
    first = scope.producers.get(squares)
    if first is None or not to_squares or not to_data or _squared(scope, first) != data:
        return set()
    return {i, square, first, *to_squares, *to_data}


def _squared(scope: Scope, i: int) -> str | None:
    """Return what a node squares."""
    node = scope.nodes[i]
    if not is_onnx(node) or len(node.input) != 2:
        return None
    if node.op_type == "Mul" and node.input[0] == node.input[1]:
        return str(node.input[0])
    if node.op_type == "Pow" and scope.elements(node.input[1]) == 1:
        exponent = onnx.numpy_helper.to_array(scope.constants[node.input[1]])
        return str(node.input[0]) if (exponent == 2).all() else None
    return None


def _behind_mean(scope: Scope, name: str) -> tuple[Collection[int], str]:
    """Return the nodes of a mean, scaled and viewed, and what it is the mean of; no nodes if it is none."""
    members = list(_chain(scope, name))
    last = max((k for k, i in enumerate(members) if scope.nodes[i].op_type in MEANS), default=-1)
    members = members[: last + 1]
    return members, _data(scope, members[-1]) if members else name


def _chain(scope: Scope, name: str) -> Iterator[int]:
    while (i := scope.producers.get(name)) is not None and is_onnx(scope.nodes[i]):
        others = [each for each in scope.real_inputs(i) if each not in scope.constants]
        if scope.nodes[i].op_type not in MEANS | ON_THE_WAY or len(others) != 1 or _squared(scope, i) is not None:
            return
        if scope.nodes[i].op_type == "Div" and scope.nodes[i].input[0] != others[0]:
            return
        yield i
        name = others[0]


def _data(scope: Scope, i: int) -> str:
    return next(name for name in scope.real_inputs(i) if name not in scope.constants)
