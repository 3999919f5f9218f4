"""Skip nodes that cannot match: the operator of a node must be one that can compute the fusion's term."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Final

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import Alternatives, Ending, Term
from onnxfuse.ir.node import Node, Tensor, op_of
from onnxfuse.match.fusion_terms import fusion_terms

MAX_DEPTH: Final = 4  # maximum operators of a sum, a product or a chain of views that are searched


def may_occur(fusion: Fusion, present: Set[str]) -> bool:
    """Return whether a graph with the operators `present` can have a match.

    At least one operator of each set in the `needed_ops` of the fusion's first output must be present.
    """
    return not any(map(present.isdisjoint, fusion.outputs[0].needed_ops))


def may_be(endings: Sequence[Ending], tensor: Tensor) -> bool:
    """Return whether a tensor can be computed in one of the ways `endings`, judged by operators alone."""
    if not tensor.inputs:
        return False
    node = tensor.inputs[0]
    op = op_of(node) if node.domain else node.op  # this is asked more often than anything else
    for ending in endings:
        if op in ending.ops:
            for part, place in ending.parts:
                if not _reads(node.inputs[place], part, ending.between, MAX_DEPTH):
                    break
            else:
                return True
    return False


def _reads(inputs: Sequence[Tensor], part: Sequence[Ending], between: Set[str], depth: int) -> bool:
    """Return whether one of `inputs` can be computed in one of the ways `part`.

    Operators in `between` are allowed after them.  If there are more than `depth`, the result is True without a check.
    """
    for tensor in inputs:
        if may_be(part, tensor):
            return True
        maker = tensor.inputs[0] if between and tensor.inputs else None
        if maker is None or op_of(maker) not in between:
            continue
        if not depth or _reads(maker.inputs, part, between, depth - 1):
            return True
    return False


class Prefilter:
    """The operators that can compute each term of a fusion."""

    def __init__(self, fusion: Fusion, float_cast: Callable[[Tensor], Node | None] | None) -> None:
        """Prepare for a fusion; `float_cast` returns the Cast that computes a tensor, if the fusion absorbs Casts."""
        self._float_cast = float_cast
        known = fusion_terms(fusion)
        self._root_ops, self.fusion_root_ops = known.root_ops, known.fusion_root_ops
        self._fitting: dict[tuple[int, str], Sequence[int]] = {}

    def root_ops(self, term: Term) -> frozenset[str] | None:
        """Return the operators that can compute a term of this fusion; None if any operator can compute it."""
        return self._root_ops[id(term)]

    def fits(self, term: Term, tensor: Tensor) -> bool:
        """Return whether the operator that computes the tensor can compute the term.  Most attempts end here."""
        ops = self._root_ops[id(term)]
        if ops is None:
            return True
        if not tensor.inputs:
            return False
        node = tensor.inputs[0]
        op = op_of(node) if node.domain else node.op  # this is asked more often than anything else
        return op in ops or (op == "Cast" and self._float_cast is not None and self._float_cast(tensor) is not None)

    def fitting(self, term: Alternatives, tensor: Tensor) -> Sequence[int]:
        """Return the indices of the options that `fits` accepts.

        The indices are cached by the operator that computes the tensor, unless this operator is a Cast.
        """
        key = id(term), op_of(tensor.inputs[0]) if tensor.inputs else ""
        if key not in self._fitting or key[1] == "Cast":
            self._fitting[key] = [i for i, option in enumerate(term.options) if self.fits(option, tensor)]
        return self._fitting[key]

    def wanted(self, term: Term) -> str:
        """Return the operators that can compute a term, in words."""
        ops = sorted(self._root_ops[id(term)] or ["any value"])
        return ops[0] if len(ops) == 1 else f"{', '.join(ops[:-1])} or {ops[-1]}"
