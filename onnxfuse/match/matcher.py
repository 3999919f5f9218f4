"""Match a fusion's terms by backtracking: each way to match yields a State; the first that is accepted is the Match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from onnx import TensorProto

from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.terms import (
    Alternatives,
    Capture,
    Product,
    Rearrange,
    Sum,
    Term,
    Wrapper,
)
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS, dtype_name
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor
from onnxfuse.match import operands, operators, scaling
from onnxfuse.match.accept import accept, guard_holds
from onnxfuse.match.context import MatchContext
from onnxfuse.match.diagnostics import origin
from onnxfuse.match.fusion_terms import fusion_terms
from onnxfuse.match.named_dims import unify_first
from onnxfuse.match.side_outputs import computed_from
from onnxfuse.match.state import Dims, Match, Miss, State
from onnxfuse.match.sums_and_products import AssociativeMatcher, Decompositions
from onnxfuse.match.views import ViewSources, match_rearrange
from onnxfuse.region_operators import QUANTIZED
from onnxfuse.steps import raise_of

MAX_SIDE_OUTPUT_COMBINATIONS = 8  # maximum combinations of side outputs that are tried for one State
MAX_STEPS_PER_TENSOR = 20_000  # a bound on backtracking; the patterns need far fewer steps


class Matcher(MatchContext):
    """Matches one fusion against one graph.  It implements the protocol `Matching` of the pattern language."""

    def __init__(self, graph: Graph, shapes: ShapeInfo, fusion: Fusion, joined: bool = False) -> None:
        """Prepare to match a fusion; `joined` says whether operators or a norm will be fused into the match."""
        super().__init__(graph, shapes, fusion, joined)
        known = fusion_terms(fusion)
        self._visible, self._repeated, self._side_outputs = known.visible, known.repeated, known.side_outputs
        self._views_of_operands, self._quantizes = known.views_of_operands, known.quantizes
        self._associative: dict[int, AssociativeMatcher] = {}
        self._decompositions = Decompositions(self)
        self._view_sources = ViewSources(self)
        self._root: Tensor | None = None
        self._steps = 0

    def at(self, tensor: Tensor) -> Match | Miss:
        """Return the first accepted match of `tensor` with the fusion's first output, or the failure nearest to one."""
        try:
            return self._at(tensor)
        except Exception as error:
            raise_of(self.fusion.step, error)

    def _at(self, tensor: Tensor) -> Match | Miss:
        self._root, self._steps = tensor, 0
        self.nearest.forget()
        self._decompositions.forget()
        self._view_sources.forget()
        dtype = self.shapes.dtype(tensor)
        if dtype not in FUSIBLE_FLOATS and not (self._quantizes and dtype_name(dtype) in QUANTIZED):
            name = TensorProto.DataType.Name(dtype).lower() if dtype else "of unknown dtype"
            hint = "convert the model to float32 or float16" if dtype == TensorProto.DOUBLE else ""
            sentence = f"'{tensor.name}' is {name}; required float32, float16 or bfloat16"
            return self.nearest.miss_at_once(sentence, tensor, hint)
        for state in self.match(self.fusion.outputs[0], tensor, self._start(tensor)):
            for whole in islice(self._with_side_outputs(tensor, state), MAX_SIDE_OUTPUT_COMBINATIONS):
                found = accept(self, tensor, whole, bool(self._side_outputs))
                if found is not None:
                    return found
        return self.nearest.miss(tensor)

    def has_shape_of_output(self, tensor: Tensor) -> bool:
        """Return whether the shape of a tensor, if it is known, is one that the fusion declares for its output."""
        return self._dims_of_output(tensor) is not None

    def _dims_of_output(self, tensor: Tensor) -> Dims | None:
        """Return the sizes of the output's named dimensions, if they are known; None if the shape does not fit."""
        shape, spec = self.shapes.shape(tensor), self.fusion.out[0]
        return unify_first(spec, shape) if shape is not None and "(" not in spec else {}

    def _start(self, tensor: Tensor) -> State:
        """Return the initial state: the output's named dimensions are bound, and operands must agree with them."""
        return State(dims=self._dims_of_output(tensor) or {})

    # --- the walk ------------------------------------------------------------------------------------------------

    def match(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        """Yield the state after each way to match `tensor` with `term`, consistent with the captured values."""
        term = self._visible[id(term)]
        if isinstance(term, Wrapper):
            return term.match(self, tensor, state)
        if not term.is_leaf and id(term) not in state.terms:
            if self.casts:
                tensor, casts = self.without_casts(tensor, is_operand=id(term) in self._views_of_operands)
                state = state.with_nodes(casts)
            if not self.fits(term, tensor):
                self.fail(
                    term,
                    state,
                    lambda: f"'{tensor.name}' is {origin(self.graph, tensor)}; required {self.wanted(term)}",
                )
                return iter(())
        return self._match_once(term, tensor, state)

    def match_option(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        """Match an option that `fitting` has selected, without checking its operator again."""
        return self.match(term, tensor, state) if isinstance(term, Wrapper) else self._match_once(term, tensor, state)

    def _match_once(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        """Match a term; if it occurs several times and already has a tensor, only this tensor matches."""
        self._steps += 1
        if self._steps > MAX_STEPS_PER_TENSOR:
            return iter(())
        if id(term) not in self._repeated:
            return term.match(self, tensor, state)
        known = state.terms.get(id(term))
        if known is not None:
            is_operand = isinstance(term, Capture)
            found, casts = self.without_casts(tensor, is_operand=is_operand)
            source, of_known = self.without_casts(known, is_operand=is_operand)
            inside = {*state.nodes, *state.kept, *map(id, casts)}
            # A rounding before an operand of the match is in the operand; the other occurrence must have it, too.
            rounded = any(id(cast) not in inside and not self.is_to_float32(cast) for cast in of_known)
            if source is found and not rounded:
                return iter((state.with_nodes(casts, keep=True),))
            self.fail(
                term,
                state,
                lambda: f"one tensor must be in two places of the pattern; found '{known.name}' and '{tensor.name}'",
            )
            return iter(())
        return self._remembering(term, tensor, state)

    def _remembering(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        for after in term.match(self, tensor, state):
            yield after.with_term(id(term), tensor)

    # --- the protocol that terms call ----------------------------------------------------------------------------

    def fitting(self, term: Alternatives, tensor: Tensor) -> Sequence[int]:
        """Return the indices of the options that can end with the operator that computes the tensor."""
        return self.prefilter.fitting(term, tensor)

    def holds(self, guard: Guard, state: State, term: Term | None = None) -> bool:
        """Return whether a condition is true in the state; if it is false, record a miss of `term`, if given."""
        assert self._root is not None
        return guard_holds(self, guard, self._root, state, term)

    # Rules with files of their own.
    match_absent = operands.match_absent
    match_capture = operands.match_capture
    match_constant = operands.match_constant
    match_full = operands.match_full
    match_causal = operands.match_causal
    match_operator = operators.match_operator
    match_output = operators.match_output
    match_scaled = scaling.match_scaled

    def is_widened(self, term: Term, tensor: Tensor, state: State) -> bool:
        """Return whether a tensor is the result of a Cast to float32; if so, record why the term does not match it."""
        cast = self.float_cast(tensor)
        if cast is None or not self.is_to_float32(cast):
            return False
        self.fail(term, state, lambda: f"'{tensor.name}' is cast to float32; required a value that is not rounded")
        return True

    def match_rearrange(self, term: Rearrange, tensor: Tensor, state: State) -> Iterator[State]:
        """Match the inner term with its axes rearranged, or a slice of it that the fusion's attributes describe."""
        return match_rearrange(self, self._view_sources, term, tensor, state)

    def match_associative(self, term: Sum | Product, tensor: Tensor, state: State) -> Iterator[State]:
        """Match a sum or product in any order and grouping."""
        matcher = self._associative.get(id(term))
        if matcher is None:
            matcher = self._associative[id(term)] = AssociativeMatcher(self, self._decompositions, term)
        if state.factor is None:
            return matcher.match(tensor, state)
        inside = matcher.match(tensor, state._replace(factor=None))  # factors of operands do not scale the whole term
        return (after._replace(factor=state.factor) for after in inside)

    # --- outputs after the first ---------------------------------------------------------------------------------

    def _with_side_outputs(self, root: Tensor, state: State, index: int = 0) -> Iterator[State]:
        """Yield the state with the side outputs that are found: outputs outside of the first output's subgraph.

        Tensors of the first output's dtype are tried first, because models cast either all outputs or none.
        """
        if index == len(self._side_outputs):
            yield state
            return
        output = self._side_outputs[index]
        starts = [state.operands[name] for name in output.operands if name in state.operands]
        dtype = self.shapes.dtype(root)
        for tensor in sorted(computed_from(starts, output.ops), key=lambda found: self.shapes.dtype(found) != dtype):
            taken = id(tensor.inputs[0]) in state.nodes or not self.fits(output.term, tensor)
            after = None if taken else next(self.match(output.term, tensor, state), None)
            if after is not None:
                found = after.with_term(id(output.term.unwrapped), tensor)
                yield from self._with_side_outputs(root, found, index + 1)
        yield from self._with_side_outputs(root, state, index + 1)
