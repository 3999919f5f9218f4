"""What lets a node be skipped before anything is matched: it is not of an operator that the fusion can end with."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import Alternatives, Term, Wrapper
from onnxfuse.ir.node import Node, Tensor, op_of
from onnxfuse.match.fusion_terms import fusion_terms


def may_occur(fusion: Fusion, present: Set[str]) -> bool:
    """Return whether a graph of these operators may have a match: one of each set that a match needs is present."""
    needed = fusion.outputs[0].needed_ops
    return not needed or not needed.isdisjoint(present)


def may_be(term: Term, tensor: Tensor) -> bool:
    """Return whether a tensor may be a term, as far as the operators tell that compute it, and what these read."""
    if term.root_ops is None:
        return True
    if not tensor.inputs or op_of(tensor.inputs[0]) not in term.root_ops:
        return False
    if isinstance(term, Wrapper):
        return may_be(term.inner, tensor)
    if isinstance(term, Alternatives):
        return any(may_be(option, tensor) for option in term.options)
    for part in term.computed_parts:
        for each in tensor.inputs[0].inputs:  # a part of a sum or a view may be deeper
            if may_be(part, each) or (each.inputs and op_of(each.inputs[0]) in term.deeper_ops):
                break
        else:
            return False
    return True


class Prefilter:
    """For each term of a fusion, the operators that can compute it."""

    def __init__(self, fusion: Fusion, float_cast: Callable[[Tensor], Node | None] | None) -> None:
        """Prepare for a fusion; `float_cast` finds the Cast above a tensor, where the fusion absorbs Casts."""
        self._float_cast = float_cast
        known = fusion_terms(fusion)
        self._root_ops, self.fusion_root_ops = known.root_ops, known.fusion_root_ops
        self._fitting: dict[tuple[int, str], Sequence[int]] = {}

    def root_ops(self, term: Term) -> frozenset[str] | None:
        """Return the operators that can compute a term of this fusion; None where any can."""
        return self._root_ops[id(term)]

    def fits(self, term: Term, tensor: Tensor) -> bool:
        """Return whether the operator that computes the tensor can compute the term.  Most attempts end here."""
        ops = self._root_ops[id(term)]
        if ops is None:
            return True
        producers = tensor.inputs
        return bool(producers) and (
            op_of(producers[0]) in ops or (self._float_cast is not None and self._float_cast(tensor) is not None)
        )

    def fitting(self, term: Alternatives, tensor: Tensor) -> Sequence[int]:
        """Return the indices of the options that fit the tensor; equal for all tensors that one operator computes."""
        key = id(term), op_of(tensor.inputs[0]) if tensor.inputs else ""
        if key not in self._fitting or key[1] == "Cast":
            self._fitting[key] = [i for i, option in enumerate(term.options) if self.fits(option, tensor)]
        return self._fitting[key]

    def wanted(self, term: Term) -> str:
        """Return the operators that can compute a term, in words."""
        ops = sorted(self._root_ops[id(term)] or ["any value"])
        return ops[0] if len(ops) == 1 else f"{', '.join(ops[:-1])} or {ops[-1]}"
