"""Match the leaves of a pattern: operands, numbers and constant tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxfuse.algebra.bounds import without_min_constants
from onnxfuse.analysis.index_formulas import causal_mask_value
from onnxfuse.analysis.two_numbers import two_numbers
from onnxfuse.dsl.terms import Absent, Capture, Constant, Number, Term
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Tensor, is_constant, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.diagnostics import origin, shape_text, spec_text
from onnxfuse.match.named_dims import unify
from onnxfuse.match.scaling import unscaled
from onnxfuse.match.state import Dims, State

MAX_NODES_OF_A_WEIGHT = 16  # a miss advises constant folding if at most this many nodes compute a weight


def match_capture(m: MatchContext, term: Capture, tensor: Tensor, state: State) -> Iterator[State]:
    """Yield the state with the tensor bound to a parameter of the fused operator."""
    if term.kind == "scalar":
        value = m.number(tensor)
        if value is None:
            m.fail(term, state, lambda: f"'{tensor.name}' is not a constant number, as {term.name} must be")
        else:
            yield from m.bind_value(term, value, state)
        return
    if not tensor.name:
        return
    if state.factor is not None:
        tensor, state = unscaled(m, tensor, state)
    casts = []
    while m.casts and (node := m.float_cast(tensor)) and m.is_to_float32(node):
        casts.append(node)
        tensor = node.inputs[0]
    if term.kind == "weight" and not is_constant(tensor):
        foldable = "export with constant folding, so that weights are initializers"
        hint = foldable if _is_of_constants(tensor) else ""
        sentence = f"'{tensor.name}' is {origin(m.graph, tensor)}; required a constant for {term.name}"
        m.fail(term, state, lambda: sentence, hint=hint)
        return
    state = state.with_nodes(casts, keep=True)
    for dims in (state.dims,) if term.dims is None else _unified(m, term.dims, term, tensor, state):
        yield state.with_operand(term.name, tensor, dims)


def _unified(m: MatchContext, spec: str, term: Capture, tensor: Tensor, state: State) -> Sequence[Dims]:
    """Return the ways to bind the names of an operand's dimensions; empty if its shape does not agree.

    An operand that broadcasts can be a slice [:s] of a table of 64 rows, whose size is Min(64, s).  If this size must
    agree with an axis of size s, the model only runs where Min(64, s) is s, so s itself is tried as well.
    """
    shape = m.shapes.shape(tensor)
    if shape is None:
        unknown = f"the rank of '{tensor.name}' is unknown; required ({spec})"
        m.fail(term, state, lambda: unknown, hint="give the graph inputs shapes; named dimensions will do")
        return ()
    readings = dict.fromkeys((shape, tuple(map(without_min_constants, shape)))) if "?" in spec else (shape,)
    found = [dims for sizes in readings if (dims := unify(spec, sizes, state.dims, m.shapes.is_part)) is not None]
    if not found:
        m.fail(
            term,
            state,
            lambda: f"'{tensor.name}' has shape ({shape_text(shape)}); required ({spec_text(spec, state.dims)})",
        )
    return found


def match_absent(m: MatchContext, term: Absent, tensor: Tensor, state: State) -> Iterator[State]:
    """Yield nothing: the pattern requires that the input is omitted, but it is present."""
    m.fail(term, state, lambda: f"'{tensor.name}' is given; required to be left out")
    return iter(())


def match_constant(m: MatchContext, term: Constant, tensor: Tensor, state: State) -> Iterator[State]:
    """Yield the state if the tensor is the required number."""
    value = m.number(tensor)
    if value is None:
        m.fail(term, state, lambda: f"'{tensor.name}' is not a constant number; required {term.value:g}")
    elif not m.close(value, term.value, tensor):
        m.fail(term, state, lambda: f"'{tensor.name}' is {value:g}; required {term.value:g}")
    else:
        yield state


def match_full(m: MatchContext, term: Term, value: Number, spec: str, tensor: Tensor, state: State) -> Iterator[State]:
    """Yield the state if the tensor is a constant of the dimensions `spec` in which all elements are `value`."""
    shape = m.shapes.shape(tensor)
    dims = unify(spec, shape, state.dims) if shape is not None else None
    if dims is None or not is_constant(tensor):
        wanted = spec_text(spec, state.dims)
        m.fail(term, state, lambda: f"'{tensor.name}' is not a constant of shape ({wanted})")
        return
    elements = constant_value(m.graph, tensor)
    odd = next((v for v in elements.flat if not m.close(float(v), value, tensor)), None)
    if odd is None:
        yield state._replace(dims=dims)
    else:
        sentence = f"'{tensor.name}' has an element {odd:g}; required {value:g} everywhere"
        m.fail(term, state, lambda: sentence)


def match_causal(
    m: MatchContext, term: Term, spec: str, score: Capture | None, tensor: Tensor, state: State
) -> Iterator[State]:
    """Yield the state if the tensor is known to hide exactly the keys after each query.

    Without `score`, the tensor is true where a key is kept.  With `score`, it is 0 where a key is kept, else `score`.
    """
    shape = m.shapes.shape(tensor)
    dims = None if shape is None else unify(spec, shape[-2:], state.dims)
    if dims is None or shape is None or any(size != 1 for size in shape[:-2]):
        wanted = spec_text(spec, state.dims)
        m.fail(term, state, lambda: f"'{tensor.name}' has shape ({shape_text(shape)}); required ({wanted})")
        return
    numbers = None if score is None else two_numbers(m.index_analysis, tensor)
    where = m.index_analysis.value(tensor) if score is None else None if numbers is None else numbers.where
    if where != causal_mask_value(*shape[-2:]) or (numbers is not None and numbers.here != 0.0):
        m.fail(term, state, lambda: f"'{tensor.name}' is not known to leave out the keys after a query, and no others")
        return
    state = state._replace(dims=dims)
    yield from m.bind_value(score, numbers.elsewhere, state) if score and numbers else (state,)


def _is_of_constants(tensor: Tensor) -> bool:
    """Return whether a tensor is computed by a few nodes from constants only."""
    work, nodes = [tensor], 0
    while work:
        node = producer(each := work.pop())
        nodes += node is not None
        if nodes > MAX_NODES_OF_A_WEIGHT or (node is None and not is_constant(each)):
            return False
        work.extend(t for t in (node.inputs if node is not None else ()) if t.name)
    return True
