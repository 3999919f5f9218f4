"""Replace operators by their spellings, and find the spellings that were not fully fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import onnx

from onnxfuse.algebra.operators import SLICING, VIEWS
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import PatternError
from onnxfuse.ir.dtypes import FLOATS, FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor, op_of
from onnxfuse.match import Miss
from onnxfuse.passes.folded import node_label
from onnxfuse.rewrite.function_body import BodyBuilder
from onnxfuse.rewrite.insert_nodes import insert_nodes
from onnxfuse.rewrite.replace import Fused
from onnxfuse.rewrite.select import FusionResult
from onnxfuse.rewrite.variant import Variant
from onnxfuse.spell_out import (
    activations,
    attention,
    convolutions,
    embeddings,
    group_query_attention,
    losses,
    norms,
    onnx_attention,
    products,
    rotary,
)
from onnxfuse.spell_out.call import Call, Rule, input_name

CONTRIB: Final = "com.microsoft::"
RULES: Final = RuleTable[Rule]()
for _family in (
    activations, attention, convolutions, embeddings, group_query_attention, losses, norms, onnx_attention, products,
    rotary,
):  # fmt: skip
    RULES.update(_family.RULES)

# Operators of a spelling that need not be fused, because they only move or mask elements.  Operators on integers and
# booleans need not be fused either.
MAY_REMAIN: Final = VIEWS | SLICING | {"Cast", "Concat", "Where"}
SUMS_AND_FACTORS: Final = frozenset({"Add", "Div", "Mul", "Sub"})  # in so many fusions that misses explain nothing


@dataclass(frozen=True)
class Spelled:
    """An operator that was spelled out: its name, its first output, and the nodes that replace it."""

    op: str
    node: str
    output: str
    made: frozenset[str]  # names of the nodes that replace it
    may_remain: frozenset[str] = frozenset()  # operators of these nodes that need not be fused


@dataclass(frozen=True)
class Stays:
    """An operator that has a rule but is not spelled out, with the reason."""

    op: str
    node: str
    reason: str


@dataclass(frozen=True)
class SpelledOut:
    """The operators that were spelled out, and those that have a rule but were not."""

    spelled: tuple[Spelled, ...] = ()
    stays: tuple[Stays, ...] = ()

    @property
    def contrib(self) -> frozenset[str]:
        """The names of nodes that replace operators of com.microsoft."""
        return frozenset(name for one in self.spelled if one.op.startswith(CONTRIB) for name in one.made)


def spell_out(graph: Graph, shapes: ShapeInfo, keep: Collection[str] = frozenset()) -> SpelledOut:
    """Replace every operator that has a rule by its spelling, except those whose first outputs `keep` names.

    An operator whose rule raises stays, and `shapes.raised` records the error.
    """
    spelled: list[Spelled] = []
    stays: list[Stays] = []
    for node in list(graph.nodes):
        rule = RULES.get(op_of(node))
        if spelled and node.outputs and not shapes.dtype(node.outputs[0]):
            infer_node(shapes, node)  # a spelling may make the types of its inputs known
        if rule is None or not node.outputs or node.outputs[0].name in keep:
            continue
        call, label, output = Call(graph, shapes, node), node_label(node), node.outputs[0].name
        try:
            found = _written(call, rule)
        except Exception as error:
            shapes.note(f"spelling {op_of(node)} out", error)
            found = f"its rule raised {type(error).__name__}"
        if isinstance(found, str):
            stays.append(Stays(op_of(node), label, found))
        elif found is not None:
            spelled.append(Spelled(op_of(node), label, output, _replace(call, found), frozenset(call.may_remain)))
    if spelled:
        graph.remove_dead()
        graph.sort()
    return SpelledOut(tuple(spelled), tuple(stays))


def left_over(graph: Graph, shapes: ShapeInfo, spelled_out: SpelledOut, fusing: FusionResult) -> dict[str, Stays]:
    """Return the operators with unfused nodes that compute in their spelling, by first output, with the reason."""
    computing = (node for node in graph.nodes if op_of(node) not in MAY_REMAIN)
    remaining = {
        node.name: op_of(node) for node in computing if any(shapes.dtype(tensor) in FLOATS for tensor in node.outputs)
    }
    replaced = {name for one in fusing.fused for name in one.replaces}
    left = {}
    for one in spelled_out.spelled:
        ops = {name: op for name, op in remaining.items() if name in one.made and op not in one.may_remain}
        if ops:
            nearest = _nearest_miss({name for name, op in ops.items() if op not in SUMS_AND_FACTORS}, fusing.missed)
            counted = ", ".join(f"{count} {op}" for op, count in Counter(ops.values()).items())
            in_part = f"{counted} would be left of it beside what is fused" if replaced & one.made else ""
            reason = ": ".join(filter(None, (in_part, nearest))) or "no fusion takes it"
            left[one.output] = Stays(one.op, one.node, reason)
    return left


def _nearest_miss(names: Set[str], missed: Iterable[Miss]) -> str:
    """Return the reason of the nearest miss at nodes of these names; "" where there is none."""
    near = [m for m in missed if m.matched and not names.isdisjoint((m.node, *m.around))]
    best = max(near, key=lambda m: (m.matched, m.matched / m.of), default=None)
    return f"{best.fusion.name}: {best.reason}" if best else ""


def in_terms_of_model(fused: Iterable[Fused], spelled: Iterable[Spelled]) -> tuple[Fused, ...]:
    """Return the fused nodes with the names of the spelled-out operators instead of the nodes that replaced these."""
    operators = {name: one.node for one in spelled for name in one.made}
    return tuple(
        replace(one, replaces=tuple(dict.fromkeys(operators.get(name, name) for name in one.replaces))) for one in fused
    )


# --- writing -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Written:
    """The nodes of a spelling, and by output index of the operator, the names of their results."""

    nodes: Sequence[onnx.NodeProto]
    outputs: Mapping[int, str]


def _written(call: Call, rule: Rule) -> _Written | str | None:
    """Return the nodes of an operator's spelling; the reason, or None, if it stays as it is."""
    node, shapes = call.node, call.shapes
    found = rule(call)
    if not isinstance(found, dict):
        return found
    unknown = [t.name for t in node.inputs if t.name and not shapes.dtype(t)]
    if unknown:
        return f"the dtype of '{unknown[0]}' is not known"
    outputs = {i: term for i, term in found.items() if call.is_read(i)}
    lacking = [t.name for i, t in enumerate(node.outputs) if call.is_read(i) and i not in found]
    if lacking:
        return f"its output '{lacking[0]}' is read, which has no spelling"
    dtype = shapes.dtype(node.outputs[0])
    if dtype not in FUSIBLE_FLOATS:
        return "its dtype is none that is fused"
    builder = BodyBuilder(_variant(call, dtype))
    if not all(map(builder.can_write, outputs.values())):
        return f"opset {call.graph.opset} has no operators that compute it"
    try:
        names = {i: builder.cast(builder.value(term), dtype).name for i, term in outputs.items()}
    except PatternError as error:
        return str(error)
    return _Written(builder.nodes, names)


def _variant(call: Call, dtype: int) -> Variant:
    tensors = enumerate(call.node.inputs)
    dtypes = {input_name(i): call.shapes.dtype(tensor) for i, tensor in tensors if tensor.name}
    rank = call.rank(0) or 0
    return Variant(call.graph.opset, dtypes, (dtype,), rank, call.values, call.dims, call.choices)


def _replace(call: Call, written: _Written) -> frozenset[str]:
    """Replace an operator by the nodes of its spelling; return their names."""
    graph, node = call.graph, call.node
    label, outputs = node_label(node), list(node.outputs)
    operands: dict[str, Tensor] = {input_name(i): tensor for i, tensor in enumerate(node.inputs)}
    node.inputs.clear()
    node.outputs.clear()
    ends = [(name, outputs[index]) for index, name in written.outputs.items()]
    made = insert_nodes(graph, call.shapes, written.nodes, operands, ends, label)
    graph.linked.nodes.remove(node)
    return frozenset(each.name for each in made)
