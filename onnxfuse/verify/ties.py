"""Find out whether indices differ only because two scores differ by rounding, as in a tie of an ArgMax."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

import numpy as np
import onnx

from onnxfuse.algebra.operators import REGROUPING
from onnxfuse.ir.dtypes import Array
from onnxfuse.verify.difference import TOLERANCES

INDEX_OPS: Final = {("ArgMax", 0): 0, ("ArgMin", 0): 0, ("TopK", 1): -1}  # (op, output): default of `axis`
FOLLOWED_OPS: Final = REGROUPING | {"Cast", "Identity"}  # operators that the search for an ArgMax or TopK passes


def source_of(model: onnx.ModelProto, output: str, through: Set[str]) -> tuple[onnx.NodeProto | None, int]:
    """Go back from a tensor past operators in `through`; return the node that computes it, and which of its outputs.

    The node is None if the search ends at an input or an initializer.
    """
    producers = {name: (node, index) for node in model.graph.node for index, name in enumerate(node.output)}
    node, index = producers.get(output, (None, 0))
    while node is not None and node.op_type in through:
        node, index = producers.get(node.input[0], (None, 0))
    return node, index


def source_of_indices(model: onnx.ModelProto, output: str) -> onnx.NodeProto | None:
    """Return the ArgMax, ArgMin or TopK whose indices an output holds; None if another operator computes it."""
    node, index = source_of(model, output, FOLLOWED_OPS)
    return node if node is not None and (node.op_type, index) in INDEX_OPS else None


def are_ties(
    node: onnx.NodeProto, scores: Sequence[object], old: Sequence[object], new: Sequence[object], half: str = ""
) -> bool:
    """Return whether the scores at the old and the new indices of every run differ by no more than rounding.

    `half` is the half precision that scores are computed in or from, "" for none.
    """
    default = next(axis for (op_type, _), axis in INDEX_OPS.items() if op_type == node.op_type)
    axis = next((a.i for a in node.attribute if a.name == "axis"), default)
    return all(_is_tie(axis, half, *run) for run in zip(scores, old, new, strict=True))


def _is_tie(axis: int, half: str, scores: object, old: object, new: object) -> bool:
    if not (isinstance(scores, np.ndarray) and isinstance(old, np.ndarray) and isinstance(new, np.ndarray)):
        return False
    rows = scores.size // max(1, scores.shape[axis])
    if old.shape != new.shape or old.dtype != new.dtype or not rows or old.size % rows:
        return False
    shape = list(scores.shape)
    shape[axis] = old.size // rows
    if ((new < 0) | (new >= scores.shape[axis])).any():
        return False
    at = [_scores_at(scores, indices.reshape(shape), axis) for indices in (old, new)]
    tolerance = max(TOLERANCES.get(scores.dtype.name, 0.0), TOLERANCES.get(half, 0.0))
    allowed = tolerance * float(np.abs(scores.astype(np.float64)).max(initial=0.0))
    return bool((np.abs(at[0] - at[1]) <= allowed).all())


def _scores_at(scores: Array, indices: Array, axis: int) -> Array:
    return np.take_along_axis(scores, indices.astype(np.int64), axis).astype(np.float64)
