"""Find masks of scores: numbers such as -1e9 or -3.4e38, which are beyond half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from onnxfuse.algebra.operators import MOVES
from onnxfuse.half.scope import Scope
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of

# Operators that can lie between a mask and its softmax.
ON_THE_WAY: Final = MOVES | {
    "Add", "And", "Cast", "Clip", "ConstantOfShape", "Max", "Min", "Mul", "Neg", "Not", "Or", "Sub", "Sum", "Where",
}  # fmt: skip
MASKED_INPUTS: Final = {  # operators that read scores or their addends at these inputs
    "Softmax": (0,), "LogSoftmax": (0,), "ReduceLogSumExp": (0,), "Attention": (3, 5), "MultiHeadAttention": (4, 5),
    "GroupQueryAttention": (10,), "ReduceMax": (0,),
}  # fmt: skip
BOUNDS: Final = {"Clip": (1, 2), "Max": (0, 1), "Min": (0, 1)}  # inputs that are bounds if constant


def score_nodes(scope: Scope) -> frozenset[Node]:
    """Return the nodes between the product q k^T and the softmax, and the nodes that compute addends of the scores."""
    starts = [each for node in scope.graph.nodes for each in masked_inputs(node)]
    return frozenset(scope.behind(starts, _leads_on))


def masked_inputs(node: Node) -> list[Tensor]:
    """Return the inputs of a node that are attention scores, or are added to attention scores, such as masks."""
    return [node.inputs[k] for k in MASKED_INPUTS.get(node.op, ()) if k < len(node.inputs)]


def adding_masks(scope: Scope, is_lowest: Callable[[Tensor], bool], is_wide: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield the softmaxes and attentions in half precision that add masks to scores, instead of replacing the scores.

    In a fully masked row, the sum of score and mask still depends on the score in float16; in float32, the sum is the
    mask's number.

    is_lowest  whether a tensor holds numbers below the range of half precision
    is_wide    whether a node stays in float32
    """
    for node in scope.graph.nodes:
        masked = masked_inputs(node)
        if not node.op.endswith("Attention"):  # an Attention adds its mask itself; a softmax does not
            chain = scope.behind(masked, _leads_on)
            masked = [t for each in chain if not is_wide(each) and _adds_to_scores(scope, each) for t in each.inputs]
        if not is_wide(node) and _reaches(scope, masked, is_lowest):
            yield node


def _adds_to_scores(scope: Scope, node: Node) -> bool:
    return node.op in ("Add", "Sub", "Sum") and bool(scope.real_outputs(node)) and node not in scope.counted


def _reaches(scope: Scope, tensors: Sequence[Tensor], is_lowest: Callable[[Tensor], bool]) -> bool:
    """Return whether `is_lowest` holds for a tensor, or for a tensor from which operators of ON_THE_WAY compute it."""
    read = (each for node in scope.behind(tensors, _leads_on) for each in node.inputs)
    return any(map(is_lowest, (*tensors, *read)))


def _leads_on(node: Node) -> bool:
    return op_of(node) in ON_THE_WAY


def bound_inputs(node: Node) -> list[Constant]:
    """Return the constants that a node reads as bounds; a bound beyond the range of half precision has no effect."""
    places = BOUNDS.get(op_of(node), ())
    return [each for k, each in enumerate(node.inputs) if k in places and is_constant(each)]
