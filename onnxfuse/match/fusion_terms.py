"""Facts about a fusion's terms that do not depend on the graph; they are computed once per fusion."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final

from onnxfuse.algebra.operators import VIEWS
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import Apply, Capture, Rearrange, Term, Wrapper, walk
from onnxfuse.dsl.words import Scaled
from onnxfuse.errors import PatternError
from onnxfuse.match.side_outputs import SideOutput, side_outputs

MAX_FUSIONS: Final = 256  # a bound on the cache, because a process can read folders of patterns again and again


@dataclass(frozen=True)
class FusionTerms:
    """Facts about the terms of a fusion, by `id(term)`, which is valid as long as the fusion exists."""

    visible: Mapping[int, Term]  # for each term: the term without the wrappers that matching ignores
    # Terms that occur several times, or are outputs: all occurrences of a term must match one tensor.
    repeated: Set[int]
    root_ops: Mapping[int, frozenset[str] | None]  # the operators that can compute a term; None: any operator
    fusion_root_ops: frozenset[str]  # operators of the first output, and Cast if the fusion absorbs Casts
    side_outputs: tuple[SideOutput, ...]
    views_of_operands: Set[int]  # terms that are an operand, or only views of one
    quantizes: bool  # whether the result can be quantized, and then has 8 bits


@functools.lru_cache(maxsize=MAX_FUSIONS)
def fusion_terms(fusion: Fusion) -> FusionTerms:
    """Return the facts about a fusion.  Raises PatternError if its first output can be an operand itself."""
    terms = list(walk(*fusion.outputs))
    root_ops = {id(term): term.root_ops for term in terms}
    for term in _factors(terms):
        ops = root_ops[id(term)]
        root_ops[id(term)] = None if ops is None else ops | {"Mul", "Div"}
    ends = root_ops[id(fusion.outputs[0])]
    if ends is None:
        raise PatternError(f"{fusion.span}: '{fusion.name}' may be just one of its operands; required an operator")
    if isinstance(root := fusion.outputs[0].unwrapped, Rearrange) and root.changes_rank:
        ends &= VIEWS
    times = Counter(id(part.unwrapped) for term in terms if not isinstance(term, Wrapper) for part in term.parts)
    numbers = {id(term) for term in terms if isinstance(term, Capture) and term.kind == "scalar"}
    return FusionTerms(
        {id(term): _without_remarks(term) for term in terms},
        {term for term, count in times.items() if count > 1 and term not in numbers}
        | {id(term.unwrapped) for term in fusion.outputs},
        root_ops,
        ends | {"Cast"} if fusion.casts else ends,
        side_outputs(fusion),
        {id(term) for term in terms if _is_view_of_operand(term)},
        any("QuantizeLinear" in (term.own_ops or ()) for term in terms),
    )


def _is_view_of_operand(term: Term) -> bool:
    while len(term.parts) == 1 and term.own_ops and term.own_ops <= VIEWS:
        (term,) = term.parts
    return isinstance(term, Capture)


def _without_remarks(term: Term) -> Term:
    while isinstance(term, Wrapper) and type(term).match is Wrapper.match:
        term = term.inner
    return term


def _factors(terms: Sequence[Term]) -> Iterator[Term]:
    """Yield the terms inside scaled() whose constant factors scaled() collects.

    These terms are the operands of the scaled operator, and the parts of these operands up to the next operator.
    """
    work = [part for term in terms if isinstance(term, Scaled) for part in term.inner.unwrapped.parts]
    while work:
        term = work.pop()
        if not isinstance(term, Apply):
            yield term
            work.extend(term.parts)
