"""The checks that a complete match must still pass: operands, guards, precision, outside readers, cycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import Output
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, is_tensor, op_of, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.precision import computing_dtype, lossy_precision
from onnxfuse.match.relations import relations
from onnxfuse.match.side_outputs import may_be_absent
from onnxfuse.match.state import Match, State

BFLOAT16_OPSET = 13  # the first opset whose operators take bfloat16
MAX_VIEWS_FOLLOWED = 12  # longest chain of nodes outside the match that is searched for one that will stay


def accept(m: MatchContext, root: Tensor, state: State, has_side_outputs: bool) -> Match | None:
    """Return the match that ends at `root`; if a check fails, record the reason as a miss and return None."""
    first = m.fusion.outputs[0]
    values = {name: value for name, value in state.values.items() if value is not None}
    for capture in m.fusion.captures:
        if capture.is_operand:
            if capture.name not in state.operands and not capture.optional:
                m.fail(capture, state, lambda c=capture: f"nothing was found for {c.name}")  # type: ignore[misc]
                return None
        elif capture.if_absent is not None:
            values.setdefault(capture.name, capture.if_absent)
    state = state._replace(values=values)
    if not all(guard_holds(m, guard, root, state, first) for guard in m.fusion.guards):
        return None
    outputs = _outputs(m, root, state)
    if outputs is None:
        m.fail(first, state, lambda: f"'{root.name}' stands alone; required another output beside it")
        return None
    if len({id(t) for t in outputs}) < len(outputs):
        m.fail(first, state, lambda: "two outputs are one value; required one for each", agreed="the term")
        return None
    if (lossy := lossy_precision(m, root, state)) is not None:
        m.fail(first, state, lambda: lossy, agreed="the term")
        return None
    nodes = tuple(state.nodes.values())
    if (bfloat16 := _bfloat16_too_early(m, nodes, state)) is not None:
        m.fail(first, state, lambda: bfloat16, agreed="the term")
        return None
    refused = refusal(m.graph, nodes, outputs, state.operands)
    if refused:
        m.fail(first, state, lambda: refused.sentence, hint=refused.hint, agreed="the pattern")
        return None
    return Match(m.fusion, outputs, state.operands, values, state.dims, state.choices, nodes, has_side_outputs)


def _outputs(m: MatchContext, root: Tensor, state: State) -> tuple[Tensor, ...] | None:
    """Return the fusion's outputs, without absent optional ones at the end; None if a required output is missing."""
    others = [_found(term.unwrapped, state) for term in m.fusion.outputs[1:]]
    while others and others[-1] is None and may_be_absent(m.fusion, len(others)):
        others.pop()
    present = [tensor for tensor in others if tensor is not None]
    return (root, *present) if len(present) == len(others) else None


def _found(term: Term, state: State) -> Tensor | None:
    """Return the tensor that matched an output of the fusion; None if the model has no such tensor."""
    if not isinstance(term, Output):
        return state.terms.get(id(term))
    node = producer(state.terms[id(term.inner)])
    assert node is not None, "the first output is an operator's"
    return next((tensor for tensor in node.outputs[term.index : term.index + 1] if tensor.name), None)


def _bfloat16_too_early(m: MatchContext, nodes: Sequence[Node], state: State) -> str | None:
    """Return why a function cannot contain `nodes`, or None: some older opsets do not have bfloat16 operators.

    In a function, onnxruntime checks types against the operators' schemas, and so refuses a bfloat16 node of these
    opsets.  In a graph, it can run the same node.
    """
    if m.graph.opset >= BFLOAT16_OPSET:
        return None
    tensors = (*state.operands.values(), *(tensor for node in nodes for tensor in node.outputs))
    found = next((tensor for tensor in tensors if m.shapes.dtype(tensor) == TensorProto.BFLOAT16), None)
    if found is None:
        return None
    return f"'{found.name}' is bfloat16 in opset {m.graph.opset}; required opset {BFLOAT16_OPSET} or newer"


# --- guards ------------------------------------------------------------------------------------------------------


def guard_holds(m: MatchContext, guard: Guard, root: Tensor, state: State, term: Term | None) -> bool:
    """Return whether a condition on the captured values is true.

    If the condition is false and `term` is given, the condition's sentence is recorded as the reason why `term` did not
    match.  If the condition cannot be decided because a fact is unknown, this is recorded even if no `term` is given.
    """
    known = {**state.dims, **state.values, **state.operands, **state.choices}
    known |= {"rank": m.shapes.rank(root), "opset": m.graph.opset}
    if "dtype" in guard.names:
        known["dtype"] = dtype_name(computing_dtype(m.shapes, state.nodes.values(), m.shapes.dtype(root)))
    known["joined"] = m.joined
    if "dtypes" in guard.names:
        known["dtypes"] = {name: _dtype_name(m, tensor) for name, tensor in state.operands.items()}
    answer = guard.answer(known, relations(m) if guard.relations else {})
    if isinstance(answer, str):
        m.fail(term or m.fusion.outputs[0], state, lambda: _unknown(answer, root), guard.span, agreed="the term")
    elif not answer and term is not None:
        asked = {name: known.get(name) for name in guard.names}
        shown = {name: f"'{value.name}'" if is_tensor(value) else value for name, value in asked.items()}
        m.fail(term, state, lambda: guard.reason(shown), guard.span, agreed="the term")
    return answer is True


def _unknown(fact: str, root: Tensor) -> str:
    """Return the sentence of a miss for a condition that cannot be decided, because `fact` is unknown."""
    return f"the {fact} of '{root.name}' is not known" if fact in ("rank", "dtype") else f"{fact} is not known"


def _dtype_name(m: MatchContext, tensor: Tensor) -> str:
    dtype = m.shapes.dtype(tensor)
    return dtype_name(dtype) if dtype else "unknown"


# --- outside readers and cycles ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Why a match must not be replaced, and a hint for the user."""

    sentence: str
    hint: str = "let nothing else read the value, or take it off the graph's outputs"


def refusal(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[Tensor], operands: Mapping[str, Tensor]
) -> Refusal | None:
    """Return why `nodes` must not become one node that reads `operands` and computes `outputs`; None if they can."""
    inside, read = {id(n) for n in nodes}, {id(t) for t in operands.values()}
    found = (
        _read_outside(graph, nodes, inside, outputs, read)
        or _operand_inside(inside, operands)
        or _output_of_output(inside, outputs[0])
    )
    interior = (t for n in nodes for t in n.outputs if t is not outputs[0])
    # If `nodes` alone read the interior values, no operand depends on `nodes`, so that no cycle is possible.
    if found or all(id(reader) in inside for t in interior for reader in t.outputs):
        return found
    return _cycle(graph, nodes, operands)


def needed_outputs(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[Tensor], operands: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return `outputs` up to the last one that nodes other than `nodes` read; the first output is always returned."""
    inside, read = {id(n) for n in nodes}, {id(t) for t in operands.values()}
    needed = list(outputs)
    while len(needed) > 1 and not _is_needed(graph, needed[-1], inside, read):
        needed.pop()
    return needed


def _is_needed(graph: Graph, tensor: Tensor, inside: set[int], read: set[int]) -> bool:
    """Return whether a tensor must be computed: a node that will stay reads it, or it must keep its name."""
    return graph.is_kept(tensor) or any(_stays(graph, r, inside, read) for r in tensor.outputs if id(r) not in inside)


def _stays(graph: Graph, reader: Node, inside: set[int], read: set[int], steps: int = MAX_VIEWS_FOLLOWED) -> bool:
    """Return whether a node outside the match will stay after the match is replaced.

    The node is removed if its results are not operands of the match, and all nodes that read them belong to the match
    or are removed as well.
    """
    if not steps:
        return True
    return any(
        id(made) in read
        or graph.is_kept(made)
        or any(_stays(graph, after, inside, read, steps - 1) for after in made.outputs if id(after) not in inside)
        for made in reader.outputs
    )


def _read_outside(
    graph: Graph, nodes: Sequence[Node], inside: set[int], outputs: Sequence[Tensor], read: set[int]
) -> Refusal | None:
    """Refuse if a node outside the match reads an interior value, which the fused node does not compute."""
    allowed = {t.name for t in outputs}
    for node in nodes:
        for tensor in node.outputs:
            if tensor.name in allowed:
                continue
            if graph.is_kept(tensor):
                return Refusal(f"'{tensor.name}' ({_label(node)}) is an output of the graph or read in a subgraph")
            readers = (r for r in consumers(tensor) if id(r) not in inside)
            reader = next((r for r in readers if _stays(graph, r, inside, read)), None)
            if reader is not None:
                return Refusal(
                    f"'{tensor.name}' ({_label(node)}) is also read by {_label(reader)}; required no reader outside"
                )
    return None


def _operand_inside(inside: set[int], operands: Mapping[str, Tensor]) -> Refusal | None:
    """Refuse if an operand is an interior value, as in `relu(a) + a` with `a` as the residual."""
    for name, operand in operands.items():
        if any(id(n) in inside for n in operand.inputs):
            return Refusal(
                f"{name} ('{operand.name}') is itself computed inside; required a value from outside",
                "compute the operand from something else",
            )
    return None


def _output_of_output(inside: set[int], first: Tensor) -> Refusal | None:
    """Refuse if another output is computed from the first one, as for `a` and `a + b`: `a` would be computed twice."""
    reader = next((r for r in first.outputs if id(r) in inside), None)
    if reader is None:
        return None
    return Refusal(f"{_label(reader)} goes on from '{first.name}'; required outputs computed beside each other")


def _cycle(graph: Graph, nodes: Sequence[Node], operands: Mapping[str, Tensor]) -> Refusal | None:
    """Refuse if an operand is computed from a matched node; nodes before the first matched one are not searched."""
    inside, first = set(nodes), min(graph.position[n] for n in nodes)
    seen: set[Node] = set()
    for name, operand in operands.items():
        work: list[Node] = list(operand.inputs)
        while work:
            node = work.pop()
            if node in inside:
                return Refusal(
                    f"{name} ('{operand.name}') is computed from a value inside; fusing would make a cycle",
                    "compute the operand from something else",
                )
            if node not in seen and graph.position[node] >= first:
                seen.add(node)
                work.extend(p for t in node.inputs for p in t.inputs)
    return None


def _label(node: Node) -> str:
    return f"{op_of(node)} '{node.name or node.outputs[0].name}'"
