"""What is asked of a reading that agrees everywhere: operands, conditions, precision, legality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import helper

from onnxfuse.language.terms import Guard, Term, bare
from onnxfuse.match.legality import refusal
from onnxfuse.match.siblings import may_be_absent
from onnxfuse.match.state import FLOATS, Match, State
from onnxfuse.match.words import VIEWS, node_name
from onnxfuse.model.graph import Node, Tensor, is_constant, op_of, producer

if TYPE_CHECKING:
    from onnxfuse.match.matcher import Matcher


def complete(m: Matcher, state: State) -> Match | None:
    """The match, if nothing required is missing, all conditions hold, and what matched may be replaced."""
    values = dict(state.values)
    for capture in m.fusion.captures:
        if capture.kind in ("tensor", "weight"):
            if capture.name not in state.operands and not capture.optional:
                m.fail(capture, state, lambda c=capture: f"nothing was found for {c.name}")  # type: ignore[misc]
                return None
        elif capture.default is not None:
            values.setdefault(capture.name, capture.default)
    state = state._replace(values=values)
    if not all(holds(m, guard, state, m.fusion.outputs[0]) for guard in m.fusion.guards):
        return None
    others = [state.terms.get(id(bare(term))) for term in m.fusion.outputs[1:]]
    while others and others[-1] is None and may_be_absent(m.fusion, len(others)):
        others.pop()
    if any(t is None for t in others):
        alone = f"'{m.root.name}' stands alone; required another output beside it"
        m.fail(m.fusion.outputs[0], state, lambda: alone)
        return None
    nodes, outputs = tuple(state.nodes.values()), (m.root, *others)
    if len({id(t) for t in outputs}) < len(outputs):
        m.fail(m.fusion.outputs[0], state, lambda: "two outputs are one value; required one for each", whole=True)
        return None
    if (rounding := _rounding(m, state)) is not None:
        narrow = FLOATS[m.shapes.dtype(rounding.outputs[0])]
        told = f"Cast '{node_name(rounding.outputs[0])}' rounds to {narrow} inside, which no operand or output is"
        m.fail(m.fusion.outputs[0], state, lambda: told, whole=True)
        return None
    if (product := _wide_product(m, state)) is not None:
        kept = f"MatMul '{node_name(product.outputs[0])}' multiplies in float32 what is cast for it, on purpose"
        m.fail(m.fusion.outputs[0], state, lambda: kept, whole=True)
        return None
    refused = refusal(m.graph, nodes, outputs, state.operands)
    if refused:
        m.nearest.refused = True
        m.fail(m.fusion.outputs[0], state, lambda: refused.sentence, hint=refused.hint, whole=True)
        return None
    return Match(m.fusion, outputs, state.operands, values, state.dims, state.choices, nodes, bool(m.siblings))


def _rounding(m: Matcher, state: State) -> Node | None:
    """A Cast to a narrower dtype than the values outside have: on purpose, so that not to round would be wrong."""
    outside = {m.shapes.dtype(t) for t in (m.root, *state.operands.values())}
    for node in state.nodes.values():
        if op_of(node) == "Cast" and not m.widens(node) and m.shapes.dtype(node.outputs[0]) not in outside:
            return node
    return None


def _wide_product(m: Matcher, state: State) -> Node | None:
    """A matrix product in a wider dtype than the result, of two operands cast to it: it may leave the narrower one."""
    for node in state.nodes.values():
        wider = op_of(node) == "MatMul" and m.shapes.dtype(node.outputs[0]) != m.shapes.dtype(m.root)
        if wider and all(_is_widened(m, tensor) for tensor in node.inputs):
            return node
    return None


def _is_widened(m: Matcher, tensor: Tensor) -> bool:
    """Whether the tensor is a view or a multiple of what a Cast has widened."""
    while (node := producer(tensor)) is not None and op_of(node) in {*VIEWS, "Mul", "Div"}:
        tensor = next((t for t in node.inputs if not is_constant(t)), node.inputs[0])
    return node is not None and op_of(node) == "Cast" and m.widens(node)


def holds(m: Matcher, guard: Guard, state: State, term: Term | None) -> bool:
    """Whether a condition is true of what was captured; its sentence is a miss of `term` where it is not."""
    known = {**state.dims, **state.values, **state.operands, **state.choices}
    dtype, rank = FLOATS[m.shapes.dtype(m.root)], m.shapes.rank(m.root)
    known |= {"dtype": dtype, "rank": rank, "opset": m.graph.opset}
    if "dtypes" in guard.names:
        known["dtypes"] = {name: _dtype_name(m, t) for name, t in state.operands.items()}
    asked = {name: known.get(name) for name in guard.names}
    if guard.holds(**asked):
        return True
    if term is not None:
        shown = {name: getattr(value, "name", value) for name, value in asked.items()}
        m.fail(term, state, lambda: guard.sentence.format(**shown), guard.span, whole=True)
    return False


def _dtype_name(m: Matcher, tensor: Tensor) -> str:
    dtype = m.shapes.dtype(tensor)
    return helper.tensor_dtype_to_np_dtype(dtype).name if dtype else "unknown"
