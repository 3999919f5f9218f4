"""Find what masks scores: numbers such as -1e9 or -3.4e38, which half precision has no place for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from onnxfuse.algebra.operators import MOVES
from onnxfuse.half.operators import is_onnx
from onnxfuse.half.scope import Scope

# Between a mask and the softmax that it is for.
ON_THE_WAY: Final = MOVES | {
    "Add", "And", "Cast", "Clip", "ConstantOfShape", "Max", "Min", "Mul", "Neg", "Not", "Or", "Sub", "Sum", "Where",
}  # fmt: skip
MASKED_INPUTS: Final = {  # operators that read scores, or what is added to them, at these inputs
    "Softmax": (0,), "LogSoftmax": (0,), "ReduceLogSumExp": (0,), "Attention": (3, 5), "MultiHeadAttention": (4, 5),
    "GroupQueryAttention": (10,), "ReduceMax": (0,),
}  # fmt: skip
BOUNDS: Final = {"Clip": (1, 2), "Max": (0, 1), "Min": (0, 1)}  # inputs that are bounds, where they are constants


def score_nodes(scope: Scope) -> frozenset[int]:
    """Return the nodes between products and softmax, and those that compute what is added to scores there."""
    starts = [
        node.input[k]
        for node in scope.nodes
        for k in MASKED_INPUTS.get(node.op_type, ())
        if k < len(node.input) and node.input[k]
    ]
    return frozenset(scope.behind(starts, lambda i: _leads_on(scope, i)))


def adding_masks(scope: Scope, is_lowest: Callable[[str], bool], is_wide: Callable[[int], bool]) -> Iterator[int]:
    """Yield the softmaxes and attentions in half precision whose masks are added to scores, not put in their place.

    Where all keys of a row are masked, float16 keeps the scores in such a sum, and float32 has the mask's number alone.

    is_lowest  whether a tensor holds numbers below the range of half precision
    is_wide    whether a node stays in float32
    """
    for i, node in enumerate(scope.nodes):
        masked = [node.input[k] for k in MASKED_INPUTS.get(node.op_type, ()) if k < len(node.input)]
        if not node.op_type.endswith("Attention"):  # which adds the mask that it reads
            chain = scope.behind(masked, lambda j: _leads_on(scope, j))
            sums = [scope.nodes[j] for j in chain if not is_wide(j) and _adds_to_scores(scope, j)]
            masked = [name for each in sums for name in each.input]
        if not is_wide(i) and _reaches(scope, masked, is_lowest):
            yield i


def _adds_to_scores(scope: Scope, i: int) -> bool:
    is_sum = scope.nodes[i].op_type in ("Add", "Sub", "Sum")
    return is_sum and not all(name in scope.counted for name in scope.real_outputs(i))


def _reaches(scope: Scope, names: Sequence[str], is_lowest: Callable[[str], bool]) -> bool:
    """Return whether tensors, or what they are computed from by the operators of masks, hold the lowest numbers."""
    read = (name for i in scope.behind(names, lambda i: _leads_on(scope, i)) for name in scope.nodes[i].input)
    return any(is_lowest(name) for name in (*names, *read))


def _leads_on(scope: Scope, i: int) -> bool:
    node = scope.nodes[i]
    return is_onnx(node) and node.op_type in ON_THE_WAY


def bound_inputs(scope: Scope, i: int) -> frozenset[str]:
    """Return the constants that a node reads as bounds: beyond the range of half precision they bound nothing."""
    node = scope.nodes[i]
    positions = BOUNDS.get(node.op_type, ()) if is_onnx(node) else ()
    return frozenset(node.input[k] for k in positions if k < len(node.input) and node.input[k] in scope.constants)
