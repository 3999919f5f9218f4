"""The checks that a complete match must still pass: operands, guards, precision, outside readers, cycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import TensorProto

from onnxfuse.algebra.operators import SLICING, VIEWS
from onnxfuse.dsl.guards import Guard
from onnxfuse.dsl.terms import Term
from onnxfuse.dsl.words import Output
from onnxfuse.ir.dtypes import dtype_name
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.match.context import MatchContext
from onnxfuse.match.diagnostics import node_name
from onnxfuse.match.relations import relations
from onnxfuse.match.side_outputs import may_be_absent
from onnxfuse.match.state import Match, State

MOVING_OPS = VIEWS | SLICING | {"Concat"}  # operators that do not round
BFLOAT16_OPSET = 13  # the first opset whose operators take bfloat16
MAX_VIEWS_FOLLOWED = 12  # nodes outside the match that are followed to find one that will stay


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
    if (lossy := _lossy_precision(m, root, state)) is not None:
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
    """Return the tensor of an output of the fusion; None if the model lacks it."""
    if not isinstance(term, Output):
        return state.terms.get(id(term))
    node = producer(state.terms[id(term.inner)])
    assert node is not None, "the first output is an operator's"
    return next((tensor for tensor in node.outputs[term.index : term.index + 1] if tensor.name), None)


def _bfloat16_too_early(m: MatchContext, nodes: Sequence[Node], state: State) -> str | None:
    """Return why a function cannot contain `nodes` (a tensor is bfloat16 in an opset without bfloat16), or None.

    onnxruntime refuses a bfloat16 node of these opsets in a function, where it checks types against the operators'
    schemas, but may run the same node in a graph.
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

    If the condition is false and `term` is given, the condition's sentence is recorded as a miss of `term`.  If the
    condition cannot be decided because a fact is unknown, a miss is recorded even if no `term` is given.
    """
    known = {**state.dims, **state.values, **state.operands, **state.choices}
    known |= {"dtype": dtype_name(m.shapes.dtype(root)), "rank": m.shapes.rank(root), "opset": m.graph.opset}
    known["joined"] = m.joined
    if "dtypes" in guard.names:
        known["dtypes"] = {name: _dtype_name(m, tensor) for name, tensor in state.operands.items()}
    answer = guard.answer(known, relations(m))
    if isinstance(answer, str):
        m.fail(term or m.fusion.outputs[0], state, lambda: _unknown(answer, root), guard.span, agreed="the term")
    elif not answer and term is not None:
        asked = {name: known.get(name) for name in guard.names}
        shown = {name: getattr(value, "name", value) for name, value in asked.items()}
        m.fail(term, state, lambda: guard.sentence.format(**shown), guard.span, agreed="the term")
    return answer is True


def _unknown(fact: str, root: Tensor) -> str:
    """Return the sentence of a miss which says that a condition needs a fact that is unknown."""
    return f"the {fact} of '{root.name}' is not known" if fact in ("rank", "dtype") else f"{fact} is not known"


def _dtype_name(m: MatchContext, tensor: Tensor) -> str:
    dtype = m.shapes.dtype(tensor)
    return dtype_name(dtype) if dtype else "unknown"


# --- precision ---------------------------------------------------------------------------------------------------


def _lossy_precision(m: MatchContext, root: Tensor, state: State) -> str | None:
    """Return why the fused node would be less precise than the match, or leave out an intended rounding; else None."""
    rounding = _rounding_cast(m, root, state)
    if rounding is not None:
        made = rounding.outputs[0]
        dtype = dtype_name(m.shapes.dtype(made))
        return f"Cast '{node_name(made)}' rounds to {dtype} inside, on purpose: its result is used in another dtype"
    product = _float32_product(m, root, state)
    if product is not None:
        return f"MatMul '{node_name(product.outputs[0])}' multiplies in float32 what is cast for it, on purpose"
    return None


def _rounding_cast(m: MatchContext, root: Tensor, state: State) -> Node | None:
    """Return a Cast to half precision that rounds on purpose, and so must stay; None if there is none."""
    inside = {**state.kept, **state.nodes}
    casts = [node for node in inside.values() if m.float_cast(node.outputs[0]) is node and not m.is_to_float32(node)]
    root_dtype = m.shapes.dtype(root)
    return next((cast for cast in casts if _Rounding(m, cast, state, inside).is_on_purpose(root_dtype)), None)


class _Rounding:
    """A Cast to half precision inside a match, with the dtypes before and after it.

    The fused node does not round where the Cast does.  That is fine if the graph merely computes in the Cast's dtype:
    if the result of the match has this dtype, or if an operand of this dtype is read before the Cast or combined with
    the Cast's result.  If the Cast's result is cast to another dtype again, as from float32 to float16
    and back, the purpose of the Cast is to round.
    """

    def __init__(self, m: MatchContext, cast: Node, state: State, inside: Mapping[int, Node]) -> None:
        self._m, self._cast, self._inside = m, cast, inside
        self._dtype = m.shapes.dtype(cast.outputs[0])
        named = {capture.name: capture for capture in m.fusion.captures if capture.kind == "tensor"}
        self._operands = {id(tensor) for name, tensor in state.operands.items() if name in named}
        self._ends = {id(tensor) for tensor in state.operands.values()}

    def is_on_purpose(self, root_dtype: int) -> bool:
        """Return whether the graph rounds here although neither operands nor the result have the Cast's dtype."""
        made = self._cast.outputs[0]
        if not self._is_cast_on(made, computed=True):
            return False
        if self._is_cast_on(made, computed=False):
            return True
        before = self._operand_dtypes(self._cast.inputs[0])
        if self._dtype in before and (before == {self._dtype} or root_dtype == self._dtype):
            return False
        return root_dtype != self._dtype and not self._meets_operand(made)

    def _is_cast_on(self, tensor: Tensor, *, computed: bool) -> bool:
        """Return whether another Cast inside the match changes the dtype of the tensor again.

        Only views may be between the tensor and that Cast; with `computed`, any operators may be.
        """
        seen, work = set[int](), [tensor]
        while work:
            for reader in work.pop().outputs:
                if id(reader) not in self._inside or id(reader) in seen:
                    continue
                seen.add(id(reader))
                if self._m.float_cast(reader.outputs[0]) is reader:
                    if self._m.shapes.dtype(reader.outputs[0]) != self._dtype:
                        return True
                    work.extend(reader.outputs)
                elif computed or op_of(reader) in MOVING_OPS:
                    work.extend(reader.outputs)
        return False

    def _meets_operand(self, tensor: Tensor) -> bool:
        """Return whether an operator combines the tensor, or a view of it, with an operand in the Cast's dtype."""
        for reader in tensor.outputs:
            if id(reader) not in self._inside:
                continue
            if op_of(reader) in MOVING_OPS:
                if self._meets_operand(reader.outputs[0]):
                    return True
            elif any(self._dtype in self._operand_dtypes(t) for t in reader.inputs if t is not tensor):
                return True
        return False

    def _operand_dtypes(self, tensor: Tensor) -> set[int]:
        """Return the dtypes of the operands (without weights) that a tensor is computed from."""
        found, seen, work = set[int](), set[int](), [tensor]
        while work:
            each = work.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if id(each) in self._operands:
                found.add(self._m.shapes.dtype(each))
            if id(each) not in self._ends:
                work.extend(t for node in each.inputs if id(node) in self._inside for t in node.inputs)
        return found


def _float32_product(m: MatchContext, root: Tensor, state: State) -> Node | None:
    """Return a product of two operands that were cast to float32, if its result is cast to a narrower dtype; else None.

    The model multiplies in float32 on purpose: the product may exceed the range of the narrower dtype.
    """
    for node in state.nodes.values():
        wider = op_of(node) == "MatMul" and m.shapes.dtype(node.outputs[0]) != m.shapes.dtype(root)
        if wider and all(_is_cast_to_float32(m, tensor) for tensor in node.inputs):
            return node
    return None


def _is_cast_to_float32(m: MatchContext, tensor: Tensor) -> bool:
    """Return whether the tensor is a view or a multiple of a tensor that was cast to float32."""
    while (node := producer(tensor)) is not None and op_of(node) in {*VIEWS, "Mul", "Div"}:
        tensor = next((t for t in node.inputs if not is_constant(t)), node.inputs[0])
    return node is not None and op_of(node) == "Cast" and m.is_to_float32(node)


# --- outside readers and cycles ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Why a match may not be replaced, and a hint for the user."""

    sentence: str
    hint: str = "let nothing else read the value, or take it off the graph's outputs"


def refusal(
    graph: Graph, nodes: Sequence[Node], outputs: Sequence[Tensor], operands: Mapping[str, Tensor]
) -> Refusal | None:
    """Return why `nodes` may not become one node that reads `operands` and computes `outputs`; None if they may."""
    inside, read = {id(n) for n in nodes}, {id(t) for t in operands.values()}
    found = (
        _read_outside(graph, nodes, inside, outputs, read)
        or _operand_inside(inside, operands)
        or _output_of_output(inside, outputs[0])
    )
    interior = (t for n in nodes for t in n.outputs if t is not outputs[0])
    if found or all(id(reader) in inside for t in interior for reader in t.outputs):  # no operand depends on the nodes
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
    """Return whether a node that will stay reads the tensor, or the graph needs it by name."""
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
    """Refuse if a node outside the match reads an interior value of it, because the fused node does not compute it."""
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
