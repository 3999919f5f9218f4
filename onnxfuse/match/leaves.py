"""Operands, numbers and constants: where a pattern's terms end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxfuse.language.terms import Absent, Capture, Causal, Constant, Filled
from onnxfuse.match.names import unify
from onnxfuse.match.state import State
from onnxfuse.match.views import unscaled
from onnxfuse.match.words import origin, shape_text, spec_text
from onnxfuse.model.graph import Tensor, constant_value, is_constant, op_of, producer
from onnxfuse.shapes.bounds import unclamped
from onnxfuse.shapes.indices import Value, triangle, up_to_diagonal
from onnxfuse.shapes.places import LARGEST_MASK

if TYPE_CHECKING:
    from onnxfuse.match.matcher import Matcher


def match_capture(m: Matcher, term: Capture, tensor: Tensor, state: State) -> Iterator[State]:
    """The tensor as a parameter of the fused operator."""
    if term.kind == "scalar":
        value = m.number(tensor)
        if value is None:
            m.fail(term, state, lambda: f"'{tensor.name}' is not a constant number, as {term.name} must be")
        else:
            yield from m.value(term, value, state)
        return
    if not tensor.name:
        return
    if state.factor is not None:
        tensor, state = unscaled(m, tensor, state)
    casts = []
    while m.casts and (node := m.float_cast(tensor)) and m.widens(node):
        casts.append(node)
        tensor = node.inputs[0]
    if term.kind == "weight" and not is_constant(tensor):
        hint = "export with constant folding, so that weights are initializers"
        m.fail(
            term,
            state,
            lambda: f"'{tensor.name}' is {origin(tensor)}; required a constant for {term.name}",
            hint=hint,
        )
        return
    state = state.with_nodes(casts, keep=True)
    for dims in (state.dims,) if term.dims is None else _unified(m, term.dims, term, tensor, state):
        yield state.with_operand(term.name, tensor, dims)


def _unified(m: Matcher, spec: str, term: Capture, tensor: Tensor, state: State) -> Sequence[Mapping[str, Any]]:
    """The ways to bind the names of an operand's dimensions; none where its shape is another.

    What broadcasts may be cut from a table of 64, [:s], which has Min(64, s): beside s that runs only where it is s.
    """
    shape = m.shapes.shape(tensor)
    if shape is None:
        unknown = f"the rank of '{tensor.name}' is unknown; required ({spec})"
        m.fail(term, state, lambda: unknown, hint="give the graph inputs shapes; named dimensions will do")
        return ()
    readings = dict.fromkeys((shape, tuple(map(unclamped, shape)))) if "?" in spec else (shape,)
    found = [dims for sizes in readings if (dims := unify(spec, sizes, state.dims)) is not None]
    if not found:
        wanted = spec_text(spec, state.dims)
        m.fail(term, state, lambda: f"'{tensor.name}' has shape ({shape_text(shape)}); required ({wanted})")
    return found


def match_constant(m: Matcher, term: Constant, tensor: Tensor, state: State) -> Iterator[State]:
    """The tensor as a number."""
    value = m.number(tensor)
    if value is None:
        m.fail(term, state, lambda: f"'{tensor.name}' is not a constant number; required {term.value:g}")
    elif not m.close(value, term.value, tensor):
        m.fail(term, state, lambda: f"'{tensor.name}' is {value:g}; required {term.value:g}")
    else:
        yield state


def match_filled(m: Matcher, term: Filled, tensor: Tensor, state: State) -> Iterator[State]:
    """The tensor as a constant whose elements all are one number."""
    shape = m.shapes.shape(tensor)
    dims = unify(term.dims, shape, state.dims) if shape is not None and is_constant(tensor) else None
    if dims is None:
        wanted = spec_text(term.dims, state.dims)
        m.fail(term, state, lambda: f"'{tensor.name}' is no constant of shape ({wanted})")
        return
    values = constant_value(m.graph, tensor)
    odd = next((v for v in values.flat if not m.close(float(v), term.value, tensor)), None)
    if odd is None:
        yield state._replace(dims=dims)
    else:
        told = f"'{tensor.name}' has an element {odd:g}; required {term.value:g} everywhere"
        m.fail(term, state, lambda: told)


def match_causal(m: Matcher, term: Causal, tensor: Tensor, state: State) -> Iterator[State]:
    """The tensor as one of which it is known that it tells the keys up to a query's place from all others."""
    shape = m.shapes.shape(tensor)
    dims = None if shape is None else unify(term.dims, shape[-2:], state.dims)
    if dims is None or shape is None or any(size != 1 for size in shape[:-2]):
        wanted = spec_text(term.dims, state.dims)
        m.fail(term, state, lambda: f"'{tensor.name}' has shape ({shape_text(shape)}); required ({wanted})")
        return
    where, here, elsewhere = (m.places.of(tensor), 0.0, None) if term.score is None else _numbers(m, tensor)
    if where != up_to_diagonal(*shape[-2:]) or here != 0.0 or (elsewhere is None) != (term.score is None):
        m.fail(term, state, lambda: f"'{tensor.name}' is not known to leave out the keys behind a query, and no others")
        return
    state = state._replace(dims=dims)
    yield from m.value(term.score, elsewhere, state) if term.score else (state,)


def _numbers(m: Matcher, tensor: Tensor) -> tuple[Value | None, float | None, float | None]:
    """Where a tensor has one of two numbers, that number, and the other one."""
    node = producer(tensor)
    if node is not None and op_of(node) == "Where":
        return m.places.of(node.inputs[0]), m.number(node.inputs[1]), m.number(node.inputs[2])
    if not is_constant(tensor) or not 0 < math.prod(tensor.shape) <= LARGEST_MASK:
        return None, None, None
    values = constant_value(m.graph, tensor)
    first, last = values.reshape(-1, values.shape[-1])[[-1, 0], [0, -1]].tolist()
    return triangle(values == first) if np.all((values == first) | (values == last)) else None, first, last


def match_absent(m: Matcher, term: Absent, tensor: Tensor, state: State) -> Iterator[State]:
    """Never: what is there is not left out."""
    m.fail(term, state, lambda: f"'{tensor.name}' is given; required to be left out")
    return iter(())
