"""Replace operators by their spellings, and find the spellings that were not fully fused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

import onnx
from onnx import TensorProto

from onnxfuse.algebra.operators import SLICING, VIEWS
from onnxfuse.analysis.rules import RuleTable
from onnxfuse.analysis.shape_inference import infer_node
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import PatternError
from onnxfuse.ir.dtypes import FLOATS, FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph
from onnxfuse.ir.node import Tensor, op_of
from onnxfuse.ir.quantizers import QUANTIZERS
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
    group_query_attention,
    linear_attention,
    losses,
    norms,
    onnx_attention,
    products,
    quantized,
    rotary,
)
from onnxfuse.spell_out.call import Call, NoSpelling, Rule, input_name, stay_if

CONTRIB: Final = "com.microsoft::"
SPELLED_DTYPES: Final = FUSIBLE_FLOATS | {TensorProto.INT8, TensorProto.UINT8}
RULES: Final = RuleTable[Rule]()
for _family in (
    activations, attention, group_query_attention, linear_attention, losses, norms, onnx_attention, products,
    quantized, rotary,
):  # fmt: skip
    RULES.update(_family.RULES)

# Operators of a spelling that need not be fused, because they only move or mask elements.  Operators on integers and
# booleans need not be fused either.
MAY_REMAIN: Final = VIEWS | SLICING | {"Cast", "Concat", "Where"}
# Many fusions contain these operators.  So a fusion that does not match at one of them does not explain why the nodes
# that replace an operator (its spelling) were not fused.
SUMS_AND_FACTORS: Final = frozenset({"Add", "Div", "Mul", "Sub"})


@dataclass(frozen=True)
class Spelled:
    """An operator that was spelled out: its name, its first output, and the nodes that replace it."""

    op: str
    node: str
    output: str
    made: frozenset[str]  # names of the nodes that replace the operator
    may_remain: frozenset[str] = frozenset()  # operators of these nodes that need not be fused
    of_regions: bool = False  # whether regions, not patterns, are to fuse these nodes


@dataclass(frozen=True)
class Stays:
    """An operator that has a rule but is not spelled out, with the reason."""

    op: str
    node: str
    reason: str


@dataclass(frozen=True)
class SpelledOut:
    """The operators that were spelled out, and the operators that have a rule but were not spelled out."""

    spelled: tuple[Spelled, ...] = ()
    stays: tuple[Stays, ...] = ()

    @property
    def contrib(self) -> frozenset[str]:
        """The names of nodes that replace operators of com.microsoft."""
        return frozenset(name for one in self.spelled if one.op.startswith(CONTRIB) for name in one.made)

    @property
    def of_patterns(self) -> tuple[Spelled, ...]:
        """The operators that were spelled out (written in basic operators) for patterns, not for regions."""
        return tuple(one for one in self.spelled if not one.of_regions)


def spell_out(graph: Graph, shapes: ShapeInfo, keep: Collection[str] = frozenset()) -> SpelledOut:
    """Replace every operator that has a rule by its spelling, unless `keep` names the operator's first output.

    If a rule raises, its operator is not replaced, and `shapes.raised` records the error.
    """
    spelled: list[Spelled] = []
    stays: list[Stays] = []
    for node in list(graph.nodes):
        rule = RULES.get(op_of(node))
        if spelled and node.outputs and not shapes.dtype(node.outputs[0]):
            infer_node(shapes, node)  # the types of this node's inputs can be known only since an earlier spelling
        if rule is None or not node.outputs or node.outputs[0].name in keep:
            continue
        call, label, output = Call(graph, shapes, node), node_label(node), node.outputs[0].name
        try:
            written = _written(call, rule)
        except NoSpelling as error:
            stays.append(Stays(op_of(node), label, str(error)))
        except Exception as error:
            shapes.note(f"spelling {op_of(node)} out", error)
            stays.append(Stays(op_of(node), label, f"its rule raised {type(error).__name__}"))
        else:
            if written is not None:
                made = _replace(call, *written)
                found = Spelled(op_of(node), label, output, made, frozenset(call.may_remain), call.of_regions)
                spelled.append(found)
    if spelled:
        graph.remove_dead()
        graph.sort()
    return SpelledOut(tuple(spelled), tuple(stays))


def left_over(graph: Graph, shapes: ShapeInfo, spelled_out: SpelledOut, fusing: FusionResult) -> dict[str, Stays]:
    """Return the spelled-out operators that were not fully fused, by first output, with the reasons.

    Nodes that need not be fused (see `MAY_REMAIN`) do not count.  Operators that were spelled out for regions, not for
    patterns, are left out.
    """
    computing = (node for node in graph.nodes if op_of(node) not in MAY_REMAIN)
    remaining = {
        node.name: op_of(node) for node in computing if any(shapes.dtype(tensor) in FLOATS for tensor in node.outputs)
    }
    replaced = {name for one in fusing.fused for name in one.replaces}
    left = {}
    for one in spelled_out.of_patterns:
        ops = {name: op for name, op in remaining.items() if name in one.made and op not in one.may_remain}
        if ops:
            nearest = _nearest_miss({name for name, op in ops.items() if op not in SUMS_AND_FACTORS}, fusing.missed)
            counted = ", ".join(f"{count} {op}" for op, count in Counter(ops.values()).items())
            in_part = f"{counted} would be left of it beside what is fused" if replaced & one.made else ""
            reason = ": ".join(filter(None, (in_part, nearest))) or "no fusion takes it"
            left[one.output] = Stays(one.op, one.node, reason)
    return left


def left_by_regions(graph: Graph, spelled_out: SpelledOut, reasons: Mapping[str, str]) -> dict[str, Stays]:
    """Return the operators that were spelled out for regions but not fused, by first output, with the reasons.

    `reasons` says why nodes are in no region, by their labels.
    """
    waiting = {name: one for one in spelled_out.spelled if one.of_regions for name in one.made}
    remaining = [node for node in graph.nodes if node.name in waiting and op_of(node) not in QUANTIZERS]
    return {
        (one := waiting[node.name]).output: Stays(one.op, one.node, reasons.get(node_label(node), "no fusion takes it"))
        for node in remaining
    }


def _nearest_miss(names: Set[str], missed: Iterable[Miss]) -> str:
    """Return why the nearest fusion did not match at nodes of these names; "" if no fusion came near.

    The nearest fusion is the one with the most matched nodes.
    """
    near = [m for m in missed if m.matched and not names.isdisjoint((m.node, *m.around))]
    best = max(near, key=lambda m: (m.matched, m.matched / m.of), default=None)
    return f"{best.fusion.name}: {best.reason}" if best else ""


def in_terms_of_model(fused: Iterable[Fused], spelled: Iterable[Spelled]) -> tuple[Fused, ...]:
    """Return fused nodes with records that name operators of the model, not the simpler nodes that replaced them."""
    operators = {name: one.node for one in spelled for name in one.made}

    def of_model(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(operators.get(name, name) for name in names))

    return tuple(replace(one, replaces=of_model(one.replaces), joined=of_model(one.joined)) for one in fused)


# --- writing -------------------------------------------------------------------------------------------------------


def _written(call: Call, rule: Rule) -> tuple[Sequence[onnx.NodeProto], Mapping[int, str]] | None:
    """Return the nodes of an operator's spelling, and the names of their results by output index.

    Returns None if patterns match the operator itself.  Raises NoSpelling if it is not replaced for another reason.
    """
    node, graph, found = call.node, call.graph, rule(call)
    if found is None:
        return None
    for tensor in node.inputs:
        stay_if(tensor.name and not call.shapes.dtype(tensor), f"the dtype of '{tensor.name}' is not known")
    outputs = {i: each for i, each in enumerate(node.outputs) if each.name and (each.outputs or graph.is_kept(each))}
    for i, tensor in outputs.items():
        stay_if(i not in found, f"its output '{tensor.name}' is read, and the output has no spelling")
    dtype = call.shapes.dtype(node.outputs[0])
    stay_if(dtype not in SPELLED_DTYPES, "no fusion takes its dtype")
    dtypes = {input_name(i): call.dtype(i) for i in range(len(node.inputs)) if call.has(i)}
    builder = BodyBuilder(Variant(graph.opset, dtypes, (dtype,), call.rank(0) or 0, call.values, call.dims))
    no_way = not all(builder.can_write(found[i]) for i in outputs)
    stay_if(no_way, f"opset {graph.opset} has no operators that compute it")
    try:
        names = {i: builder.cast(builder.value(found[i]), dtype).name for i in outputs}
    except PatternError as error:
        raise NoSpelling(str(error)) from error
    return builder.nodes, names


def _replace(call: Call, nodes: Sequence[onnx.NodeProto], results: Mapping[int, str]) -> frozenset[str]:
    """Replace an operator by the nodes of its spelling; return their names."""
    graph, node = call.graph, call.node
    label, outputs = node_label(node), list(node.outputs)
    operands: dict[str, Tensor] = {input_name(i): tensor for i, tensor in enumerate(node.inputs)}
    node.inputs.clear()
    node.outputs.clear()
    ends = [(name, outputs[index]) for index, name in results.items()]
    made = insert_nodes(call.shapes, nodes, operands, ends, label)
    graph.linked.nodes.remove(node)
    return frozenset(each.name for each in made)
