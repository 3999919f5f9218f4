"""The walk: every way of reading a term yields a State, and the first complete and legal one wins."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from onnx import TensorProto

from onnxfuse.errors import PatternError
from onnxfuse.language.terms import (
    Absent,
    Apply,
    Capture,
    Causal,
    Choose,
    Constant,
    Either,
    Filled,
    Fusion,
    Given,
    Part,
    Precision,
    Product,
    Rearrange,
    Scaled,
    Shared,
    Stored,
    Sum,
    Term,
    bare,
    parts,
    walk,
)
from onnxfuse.match.chains import Chain, Way
from onnxfuse.match.ending import complete, holds
from onnxfuse.match.leaves import match_absent, match_capture, match_causal, match_constant, match_filled
from onnxfuse.match.names import unify_first
from onnxfuse.match.nearest import Nearest
from onnxfuse.match.operators import match_operator
from onnxfuse.match.reader import Reader
from onnxfuse.match.siblings import computed_from, siblings
from onnxfuse.match.state import FLOATS, Match, Miss, State
from onnxfuse.match.views import Source, match_rearrange, match_scaled
from onnxfuse.match.words import number_text, origin, root_ops
from onnxfuse.model.graph import Graph, Tensor, op_of
from onnxfuse.shapes.inference import Shapes
from onnxfuse.shapes.places import Places

LEAVES = {Absent, Capture, Causal, Constant, Filled}
PASSED = {Part, Precision, Stored, Given, Shared}  # words that matching looks under
FIXED = {"rank", "dtype", "opset"}  # what a condition may ask for and no reading changes
SIBLINGS = 8  # ways to choose the other outputs that are tried
STEPS = 20_000  # per anchor: a bound on backtracking, far above what the patterns need


def passed(term: Term) -> Term:
    """The term without the words that say nothing to matching."""
    while isinstance(term, Part | Precision | Stored):
        term = term.inner
    return term


def _repeated(fusion: Fusion) -> set[int]:
    """The terms that stand in several places, or are outputs: only they must be the same value again."""
    terms = [term for term in walk(*fusion.outputs) if type(term) not in PASSED]
    times = Counter(id(bare(part)) for term in terms for part in parts(term))
    return {term for term, count in times.items() if count > 1} | {id(bare(term)) for term in fusion.outputs}


def _scalable(terms: Sequence[Term]) -> Iterator[Term]:
    """The terms inside scaled() that may be multiplied there: the factors of its product, down to operators."""
    work = [part for term in terms if isinstance(term, Scaled) for part in parts(bare(term.inner))]
    while work:
        term = work.pop()
        if not isinstance(term, Apply):
            yield term
            work.extend(parts(term))


class Matcher(Reader):
    """Matches one fusion against one graph."""

    def __init__(self, graph: Graph, shapes: Shapes, fusion: Fusion) -> None:
        super().__init__(graph, shapes, fusion.casts)
        self.fusion = fusion
        self._rules: dict[type[Term], Callable[..., Iterator[State]]] = {
            Capture: functools.partial(match_capture, self),
            Constant: functools.partial(match_constant, self),
            Filled: functools.partial(match_filled, self),
            Absent: functools.partial(match_absent, self),
            Causal: functools.partial(match_causal, self),
            Apply: functools.partial(match_operator, self),
            Sum: self._chain,
            Product: self._chain,
            Either: self._either,
            Choose: self._choose,
            Rearrange: functools.partial(match_rearrange, self),
            Scaled: functools.partial(match_scaled, self),
        }
        self._options: dict[tuple[int, str], list[tuple[Any, Term]]] = {}
        self._chains: dict[int, Chain] = {}
        self.splits: dict[tuple[int, bool], Sequence[Way]] = {}  # of the tensors met since `at` was called
        self.sources: dict[tuple[int, bool, bool], Sequence[Source]] = {}
        terms = list(walk(*fusion.outputs))
        self._ops = {id(term): root_ops(term) for term in terms}
        for term in _scalable(terms):
            ops = self._ops[id(term)]
            self._ops[id(term)] = None if ops is None else ops | {"Mul", "Div"}
        self._passed = {id(term): passed(term) for term in terms}
        self._repeated = _repeated(fusion)
        self.siblings = siblings(fusion)
        ends = self._ops[id(fusion.outputs[0])]
        if ends is None:
            raise PatternError(f"{fusion.span}: '{fusion.name}' may be just one of its operands; required an operator")
        self.roots = ends | {"Cast"} if fusion.casts else ends
        self.nearest = Nearest(fusion)
        self.fail = self.nearest.fail
        self.root: Tensor = None
        self._steps = 0

    @functools.cached_property
    def places(self) -> Places:
        """What integer and boolean tensors hold; what is fused meanwhile changes no values."""
        return Places(self.graph, self.shapes)

    def at(self, tensor: Tensor) -> Match | Miss:
        """The first complete way to read `tensor` as the fusion's first output, or the nearest miss."""
        self.root, self._steps = tensor, 0
        self.nearest.forget()
        self.splits.clear()
        self.sources.clear()
        dtype = self.shapes.dtype(tensor)
        if dtype not in FLOATS:
            name = TensorProto.DataType.Name(dtype).lower() if dtype else "of unknown dtype"
            hint = "convert the model to float32 or float16" if dtype == TensorProto.DOUBLE else ""
            said = f"'{tensor.name}' is {name}; required float32, float16 or bfloat16"
            return self.nearest.at_once(said, tensor, hint)
        for state in self.match(self.fusion.outputs[0], tensor, self._start(tensor)):
            for whole in islice(self._with_siblings(state), SIBLINGS):
                found = complete(self, whole)
                if found is not None:
                    return found
        return self.nearest.miss(tensor)

    def _start(self, tensor: Tensor) -> State:
        """Names of the output's dimensions are bound first, so that operands are held against them."""
        shape, spec = self.shapes.shape(tensor), self.fusion.out[0]
        return State(dims=unify_first(spec, shape) if shape is not None and "(" not in spec else {})

    # --- the walk ------------------------------------------------------------------------------------------------

    def match(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        """Every way to read `tensor` as `term`, given what is captured already."""
        term = self._passed[id(term)]
        kind = type(term)
        if kind is Given:
            return self._given(term, tensor, state)  # type: ignore[arg-type]
        if kind is Shared:
            return self._shared(term, tensor, state)  # type: ignore[arg-type]
        if kind not in LEAVES and id(term) not in state.terms:
            if self.casts:
                tensor, state = self.through_casts(tensor, state)
            if not self.fits(term, tensor):
                self.fail(term, state, lambda: f"'{tensor.name}' is {origin(tensor)}; required {self.wanted(term)}")
                return iter(())
        return self._read(term, tensor, state)

    def _option(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        """As `match`, for a term that is known to fit."""
        return self.match(term, tensor, state) if type(term) in PASSED else self._read(term, tensor, state)

    def _read(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        self._steps += 1
        if self._steps > STEPS:
            return iter(())
        if id(term) not in self._repeated:
            return self._rules[type(term)](term, tensor, state)
        known = state.terms.get(id(term))
        if known is not None:
            if self.stem(known, term) is self.stem(tensor, term):
                return iter((state,))
            self.fail(term, state, lambda: f"'{tensor.name}' stands where '{known.name}' is required again")
            return iter(())
        return self._named(term, tensor, state)

    def _named(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        for after in self._rules[type(term)](term, tensor, state):
            yield after.with_term(id(term), tensor)

    def _given(self, term: Given, tensor: Tensor, state: State) -> Iterator[State]:
        if FIXED.issuperset(term.guard.names) and not holds(self, term.guard, state, None):
            return
        for after in self.match(term.inner, tensor, state):
            if holds(self, term.guard, after, term):
                yield after

    def _shared(self, term: Shared, tensor: Tensor, state: State) -> Iterator[State]:
        for after in self.match(term.inner, tensor, state):
            seen = [n for i, n in after.nodes.items() if i not in state.nodes]
            yield after._replace(nodes=state.nodes).with_nodes(seen, keep=True)

    def _chain(self, term: Sum | Product, tensor: Tensor, state: State) -> Iterator[State]:
        chain = self._chains.get(id(term))
        if chain is None:
            chain = self._chains[id(term)] = Chain(self, term)
        if state.factor is None:
            return chain.match(tensor, state)
        inside = chain.match(tensor, state._replace(factor=None))  # factors of a part are not those of the whole
        return (after._replace(factor=state.factor) for after in inside)

    def _either(self, term: Either, tensor: Tensor, state: State) -> Iterator[State]:
        for _, option in self._fitting(term, enumerate(term.options), tensor):
            yield from self._option(option, tensor, state)

    def is_output(self, term: Term) -> bool:
        """Whether a term is an output of the fusion."""
        return any(bare(output) is bare(term) for output in self.fusion.outputs)

    def ending(self, term: Term) -> frozenset[str] | None:
        """The operators that a term may end with; None where any may."""
        return self._ops[id(term)]

    def fits(self, term: Term, tensor: Tensor) -> bool:
        """Whether the operator that computes the tensor can be the last one of the term: most cannot, and end here."""
        ops = self._ops[id(term)]
        if ops is None:
            return True
        made_by = tensor.inputs
        return bool(made_by) and (
            op_of(made_by[0]) in ops or (self.casts and self.float_cast(tensor) is not None)
        )

    def _fitting(self, term: Term, options: Iterable[tuple[Any, Term]], tensor: Tensor) -> Sequence[tuple[Any, Term]]:
        """The options that the operator which computes the tensor can end; the same for all tensors of an operator."""
        key = id(term), op_of(tensor.inputs[0]) if tensor.inputs else ""
        if key not in self._options or key[1] == "Cast":
            self._options[key] = [(label, option) for label, option in options if self.fits(option, tensor)]
        return self._options[key]

    def wanted(self, term: Term) -> str:
        """The operators that a term may end with, in words."""
        ops = sorted(self._ops[id(term)] or ["any value"])
        return ops[0] if len(ops) == 1 else f"{', '.join(ops[:-1])} or {ops[-1]}"

    def _choose(self, term: Choose, tensor: Tensor, state: State) -> Iterator[State]:
        """Variants exclude each other, so the first that fits is not taken back."""
        name = term.name
        for label, option in self._fitting(term, term.options.items(), tensor):
            known = state.choices.get(name)
            if known is not None and known != label:
                continue
            fits = False
            chosen = state if known else state.with_choice(name, label)
            for after in self._option(option, tensor, chosen):
                fits = True
                yield after
            if fits:
                return

    # --- outputs beside the first ---------------------------------------------------------------------------------

    def _with_siblings(self, state: State, place: int = 0) -> Iterator[State]:
        """The state with the outputs that are no interior values of the first, as far as they are found.

        Those of the first one's dtype are tried first: with or without a last Cast, as there.
        """
        if place == len(self.siblings):
            yield state
            return
        term, anchors, ops = self.siblings[place]
        starts = [state.operands[name] for name in anchors if name in state.operands]
        dtype = self.shapes.dtype(self.root)
        for tensor in sorted(computed_from(starts, ops), key=lambda found: self.shapes.dtype(found) != dtype):
            taken = id(tensor.inputs[0]) in state.nodes or not self.fits(term, tensor)
            after = None if taken else next(self.match(term, tensor, state), None)
            if after is not None:
                yield from self._with_siblings(after.with_term(id(bare(term)), tensor), place + 1)
        yield from self._with_siblings(state, place + 1)

    def value(self, term: Capture, value: Any, state: State) -> Iterator[State]:
        """The state with a scalar or attribute bound; none where it has another value elsewhere."""
        if term.name in state.values and state.values[term.name] != value:
            here, elsewhere = number_text(value), number_text(state.values[term.name])
            self.fail(term, state, lambda: f"{term.name} is {here} here; it is {elsewhere} elsewhere")
            return
        yield state._replace(values={**state.values, term.name: value})
