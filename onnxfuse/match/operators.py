"""Match an operator with a node: its inputs and its attributes.  In some opsets, an attribute is an input instead."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onnxfuse.algebra.operators import COMMUTATIVE
from onnxfuse.algebra.sizes import Dim, name_of, symbols
from onnxfuse.analysis.shape_info import CannotInfer
from onnxfuse.analysis.slice_ranges import slice_ranges
from onnxfuse.dsl.terms import Apply, Capture, Term, sizes_in
from onnxfuse.ir.attributes import AtRunTime, attribute_default, attribute_or_input, schema
from onnxfuse.ir.node import Node, Tensor, is_tensor, op_of, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.diagnostics import origin, value_text
from onnxfuse.match.named_dims import with_sizes
from onnxfuse.match.state import CapturedValue, Dims, State

LINEAR = {"MatMul"}  # linear in each input, so that factors of any input scale the result


def match_operator(m: MatchContext, term: Apply, tensor: Tensor, state: State) -> Iterator[State]:
    """Yield the state after each way to match a tensor with the output of an operator."""
    node = producer(tensor)
    if node is not None and op_of(node) == "Split" and term.op == "Slice":
        yield from _match_split(m, term, tensor, node, state)
        return
    if node is None or op_of(node) != term.op:
        m.fail(term, state, lambda: f"'{tensor.name}' is {origin(m.graph, tensor)}; required {term.op}")
        return
    if node.outputs[0] is not tensor:
        m.fail(term, state, lambda: f"'{tensor.name}' is not the first output of its {term.op}")
        return
    constant = m.rank_raising_constant(node)
    if constant is not None:
        m.fail(term, state, lambda: f"'{constant.name}' has {len(constant.shape)} axes, more than what it meets")
        return
    state, factor = state.with_nodes([node]), state.factor
    if term.op not in LINEAR:  # factors of its inputs do not scale the result
        state = state._replace(factor=None)
    named = term.attributes
    inputs = [t for i, t in enumerate(node.inputs) if not named or _input_name(m, term.op, i) not in named]
    orders = [inputs]
    if term.op in COMMUTATIVE and len(inputs) == 2:
        orders.append(inputs[::-1])
    for order in orders:
        for after in _inputs(m, term, order, 0, state):
            yield from _attributes(m, term, node, after._replace(factor=after.factor if term.op in LINEAR else factor))


def match_output(m: MatchContext, term: Term, index: int, tensor: Tensor, state: State) -> Iterator[State]:
    """Yield the state after each way to match a tensor with the output `index` of an operator."""
    node = producer(tensor)
    if node is None or not any(made is tensor for made in node.outputs[index : index + 1]):
        m.fail(term, state, lambda: f"'{tensor.name}' is not output {index} of {m.wanted(term)}")
        return iter(())
    return m.match(term, node.outputs[0], state)


def _match_split(m: MatchContext, term: Apply, tensor: Tensor, node: Node, state: State) -> Iterator[State]:
    """Yield the state after each way to match an output of a Split with a Slice along one axis."""
    try:
        ((axis, (start, count)),) = slice_ranges(m.shapes, node, tensor).items()
    except CannotInfer:
        m.fail(term, state, lambda: f"the sizes of Split '{node.name}' are not known")
        return
    shape = m.shapes.shape(node.inputs[0])
    assert shape is not None
    found = {"starts": [start], "ends": [start + count], "axes": [axis], "steps": [1]}
    for after in _inputs(m, term, node.inputs[:1], 0, state.with_nodes([node])._replace(factor=None)):
        for name, value in found.items():
            after = _with_size(term.attributes.get(name, value), value, after)
        required = {name: _evaluated(term.attributes.get(name, value), after.dims) for name, value in found.items()}
        if isinstance(whole := shape[axis], int):
            required["ends"] = [min(end, whole) if isinstance(end, int) else end for end in required["ends"]]
        required["axes"] = [number % len(shape) for number in required["axes"]]
        if required == found:
            yield after._replace(factor=state.factor)
        else:
            told = ", ".join(f"{name}={value_text(value)}" for name, value in required.items() if value != found[name])
            m.fail(term, after, lambda told=told: f"Split '{node.name}' takes {found}; required {told}")  # type: ignore[misc]


def _with_size(wanted: object, value: object, state: State) -> State:
    """Return the state; if `wanted` is [size("d")] and d is not bound yet, d is bound to the number in `value`."""
    if not isinstance(wanted, list) or not isinstance(value, list) or len(wanted) != 1 or len(value) != 1:
        return state
    (item,) = wanted
    name = name_of(item)
    if name is not None and name not in state.dims:
        return state._replace(dims={**state.dims, name: value[0]})
    return state


def _inputs(m: MatchContext, term: Apply, tensors: Sequence[Tensor], i: int, state: State) -> Iterator[State]:
    """Yield the state after each way to match the inputs from index `i` on with the inputs of the term."""
    if i == len(term.inputs):
        extra = next((t for t in tensors[i:] if t.name), None)
        if extra is None:
            yield state
        else:
            m.fail(term, state, lambda: f"{term.op} reads '{extra.name}' besides what is required")
        return
    wanted = term.inputs[i]
    present = i < len(tensors) and bool(tensors[i].name)
    if present:
        for after in m.match(wanted, tensors[i], state):
            yield from _inputs(m, term, tensors, i + 1, after)
    elif wanted.is_optional:
        yield from _inputs(m, term, tensors, i + 1, state)
    else:
        m.fail(wanted, state, lambda: f"{term.op} has no input {i}; required one")


def _input_name(m: MatchContext, op: str, index: int) -> str | None:
    found = schema(op, m.graph.opset)
    return found.inputs[index].name if found and index < len(found.inputs) else None


def _attributes(m: MatchContext, term: Apply, node: Node, state: State) -> Iterator[State]:
    """Yield the states in which the attributes are as the pattern requires; those it omits must have their defaults."""
    for name in node.attrs:
        if name not in term.attributes and not _is_default(m, node, name):
            value = node.attrs[name]
            m.fail(
                term,
                state,
                lambda name=name, value=value: (  # type: ignore[misc]
                    f"{term.op} has {name}={value_text(value)}; required its default"
                ),
            )
            return
    states = [state]
    for name, wanted in term.attributes.items():
        states = [after for s in states for after in _attribute(m, term, node, name, wanted, s)]
    yield from states


def _is_default(m: MatchContext, node: Node, name: str) -> bool:
    value, usual = node.attrs[name], attribute_default(op_of(node), name, m.graph.opset)
    if is_tensor(value):  # no attribute has a tensor as its default
        return False
    return bool(value == usual) or (usual is not None and _same_axis(m, node, name, value, usual))


def _attribute(m: MatchContext, term: Apply, node: Node, name: str, wanted: object, state: State) -> Iterator[State]:
    """Yield the state, with captured values bound, if an attribute has the value that the pattern requires."""
    value = attribute_or_input(m.graph, node, name)
    if isinstance(wanted, Capture):
        if value is None and wanted.optional:
            yield from m.bind_value(wanted, wanted.if_absent, state)
        elif wanted.kind == "scalar" and not isinstance(value, int | float):
            m.fail(term, state, lambda: f"{name} of {term.op} is not a constant number")
        elif isinstance(value, AtRunTime):
            m.fail(term, state, lambda: f"{name} of {term.op}, '{value.tensor.name}', is known in a run only")
        else:
            yield from m.bind_value(wanted, value, state)
        return
    dim = name_of(wanted)
    if dim is not None and dim not in state.dims:
        yield state._replace(dims={**state.dims, dim: value})
        return
    state = _with_size(wanted, value, state)
    shown = f"'{value.tensor.name}'" if isinstance(value, AtRunTime) else value_text(value)
    unknown = next((each for each in sizes_in(wanted) if not state.dims.keys() >= {*symbols(each)}), None)
    if unknown is not None:
        m.fail(term, state, lambda: f"{term.op} has {name}={shown}; required the size '{unknown}' as a number")
        return
    required = _evaluated(wanted, state.dims)
    if _same(m, node, name, value, required):
        yield state
    else:
        m.fail(term, state, lambda: f"{term.op} has {name}={shown}; required {value_text(required)}")


def _same(m: MatchContext, node: Node, name: str, found: CapturedValue | AtRunTime, required: Any) -> bool:
    """Return whether an attribute, or the input that replaces it, has the required value."""
    if name == "steps" and found is None:
        found = [1] * len(required)
    if isinstance(found, float) and isinstance(required, int | float):
        return math.isclose(found, required, rel_tol=1e-6)
    if op_of(node) == "Slice" and name == "ends" and isinstance(found, list):
        return _ends(m, node, found) == _ends(m, node, required)
    return bool(found == required) or _same_axis(m, node, name, found, required)


def _ends(m: MatchContext, node: Node, ends: Sequence[object]) -> list[object]:
    """Return the ends of a Slice, clamped to the sizes of their axes."""
    shape, axes = m.shapes.shape(node.inputs[0]), attribute_or_input(m.graph, node, "axes")
    if shape is None or not isinstance(axes, list):
        return list(ends)
    sizes = [shape[axis] for axis in axes if isinstance(axis, int) and -len(shape) <= axis < len(shape)]
    if len(sizes) != len(ends):
        return list(ends)  # the model is invalid
    return [
        n if isinstance(end, int) and end > (n if isinstance(n, int) else 2**62) else end
        for end, n in zip(ends, sizes, strict=True)
    ]


def _same_axis(m: MatchContext, node: Node, name: str, found: Any, required: Any) -> bool:
    """Return whether two values of `axis` or `axes` are equal after negative axes are resolved."""
    if name not in ("axis", "axes") or not node.inputs:
        return False
    rank = m.shapes.rank(node.outputs[0] if op_of(node) == "Unsqueeze" else node.inputs[0])
    if rank is None or isinstance(found, bool) or found is None or required is None:
        return False
    try:
        return bool(np.array_equal(np.mod(found, rank), np.mod(required, rank)))
    except TypeError:
        return False


def _evaluated(wanted: object, dims: Dims) -> Any:
    """Return an attribute's value with the sizes of named dimensions substituted."""
    if isinstance(wanted, list):
        return [_evaluated(item, dims) for item in wanted]
    return with_sizes(wanted, dims) if isinstance(wanted, Dim) else wanted
