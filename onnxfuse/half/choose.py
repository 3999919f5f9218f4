"""Choose which nodes of a graph stay in float32, and say why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxfuse.algebra.operators import MOVES, PRODUCTS, REARRANGING
from onnxfuse.analysis.shape_info import constant_dtype
from onnxfuse.half.masks import bound_inputs, score_nodes
from onnxfuse.half.operators import (
    EXACT_INPUTS,
    FILLS,
    READS_ANY,
    STAY,
    combines,
    half_inputs,
    half_outputs,
)
from onnxfuse.half.precision import Precision
from onnxfuse.half.ranges import Range
from onnxfuse.half.scope import Scope, elements, is_arithmetic, is_index_product
from onnxfuse.half.variances import variance_nodes
from onnxfuse.half.weights import Weights
from onnxfuse.ir.attributes import tensor_attribute
from onnxfuse.ir.dtypes import EXACT_INTEGERS
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, consumers, is_constant, op_of, producer
from onnxfuse.passes.folded import node_label
from onnxfuse.region_operators import ELEMENTWISE

LARGE_MASK: Final = 1e4  # a constant this large that is added to scores is a mask: no score is near it
LARGE_ANGLE: Final = 64.0  # radians; float16 can round an angle from this one on by 0.03 or more
BITS_LEFT: Final = 3  # a sum with fewer correct bits than this after cancellation stays in float32

CANNOT: Final = "{precision} is not a dtype of this operator in opset {opset}"
UNTYPED: Final = "the dtype of '{name}' is not known"
COUNTS: Final = "it is computed from integers: positions and lengths"
QUANTIZED: Final = ("quantized_conv", "quantized_gemm", "quantized_matmul")  # fusions of products of integers
JOINING: Final = ELEMENTWISE | REARRANGING  # operators that an epilogue takes
COMBINES: Final = "onnxruntime's CPU provider combines what is scattered in float32 alone"
ANGLE: Final = "it is an angle, or its sine or cosine"
EXACT: Final = "other nodes select values or places to read by its result"
VARIANCE: Final = "it is a variance, the difference of a mean of squares and a squared mean"
INTEGERS: Final = "it is inside a fused node, which multiplies integers"
QUANTIZED_NEXT: Final = "it follows a product of integers, and its results are quantized next"
INSIDE: Final = "it is inside a fused node, which computes it in float32"


@dataclass(frozen=True)
class Unit:
    """The nodes that one fused node of the float32 model replaces."""

    fusion: str
    nodes: frozenset[str]  # the nodes' names, or the names of their first outputs
    in_float32: bool  # whether the fused node's body computes all but matrix products in float32


@dataclass(frozen=True)
class Known:
    """The facts about a model, other than its graph, by which the nodes that stay in float32 are chosen."""

    weights: Weights
    units: Sequence[Unit] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)  # node requested to stay in float32 -> reason

    @property
    def precision(self) -> Precision:
        """The dtype that the model is converted to."""
        return self.weights.precision


@dataclass(frozen=True)
class Choice:
    """The nodes of a graph that stay in float32, each with the reason, and the constants that are masks or bounds."""

    by_rule: Mapping[Node, str]
    kept: Mapping[Node, str]  # nodes that stay because of their values
    clamped: frozenset[str]  # the constants that are masks or bounds: their numbers beyond the range stay finite
    scores: frozenset[Node]  # nodes that compute attention scores or their addends; see `score_nodes`

    def is_wide(self, node: Node) -> bool:
        """Return whether a node computes in float32."""
        return node in self.by_rule or node in self.kept


def choose(scope: Scope, known: Known) -> Choice:
    """Return which nodes of a graph stay in float32."""
    scores, nodes = score_nodes(scope), scope.graph.nodes
    clamped = frozenset(each.name for node in scores for each in node.inputs if is_constant(each))
    clamped |= frozenset(each.name for node in nodes for each in bound_inputs(node))
    rules = _by_rule(scope, known, scores)
    inside = _inside(scope, known)
    rules |= {node: INSIDE for node in _norms(scope, known) if node not in rules}
    rules |= {node: INTEGERS for node in _of_integers(scope, known) if node not in rules}
    rules |= dict.fromkeys(_before_quantizers(scope, rules), QUANTIZED_NEXT)
    fused = {node for unit in known.units if unit.in_float32 for node in _members(scope, unit)}
    rules |= {node: VARIANCE for node in variance_nodes(scope) if node not in rules and node not in fused}
    kept: dict[Node, str] = {}
    for node, reason in (*_by_range(scope, known, scores, inside), *_by_weight(scope, known, clamped, inside)):
        if node not in rules:
            kept.setdefault(node, reason)
    asked = {node: known.asked[name] for node in nodes if (name := node_label(node)) in known.asked}
    kept |= {
        node: why for node, why in asked.items() if scope.computes(node) and node not in rules and node not in kept
    }
    return Choice(rules, {node: kept[node] for node in nodes if node in kept}, clamped, scores)


# --- by the operator ---------------------------------------------------------------------------------------------


def _by_rule(scope: Scope, known: Known, scores: frozenset[Node]) -> dict[Node, str]:
    nodes, opset = scope.graph.nodes, scope.graph.opset
    found: dict[Node, str] = {}
    for node in filter(scope.computes, nodes):
        op = op_of(node)
        if op in STAY:
            found[node] = STAY[op]
        elif (name := scope.untyped(node)) and op not in READS_ANY:
            found[node] = UNTYPED.format(name=name)
        elif combines(node):
            found[node] = COMBINES
        elif "::" not in op and not scope.real_inputs(node) and op not in FILLS:
            found[node] = COUNTS
        elif not _can(scope, known, node):
            found[node] = CANNOT.format(precision=known.precision.name, opset=opset)
    for node in nodes:
        starts = [node.inputs[k] for k in EXACT_INPUTS.get(op_of(node), ()) if k < len(node.inputs)]
        found |= {each: EXACT for each in scope.behind(starts, is_arithmetic) if each not in found}
        if op_of(node) in ("Sin", "Cos"):
            found |= {each: ANGLE for each in _angle(scope, known, node) if each not in found}
    masks = _mask_chain(scope, scores)
    found |= {node: COUNTS for node in nodes if node in scope.counted and node not in found and node not in masks}
    # Views that follow the last arithmetic in float32 run in half precision: the Cast to half precision precedes them.
    for node in reversed(nodes):
        if found.get(node) in (COUNTS, ANGLE) and op_of(node) in (*MOVES, "Cast"):
            readers = [each for tensor in node.outputs for each in consumers(tensor)]
            is_read_wide = any(each in found or each.op in READS_ANY for each in readers)
            is_cast = op_of(node) == "Cast" and not scope.real_inputs(node)
            if readers and not is_read_wide and (not is_cast or _is_small(known, node.outputs[0])):
                del found[node]
    return found


def _is_small(known: Known, tensor: Tensor) -> bool:
    """Return whether half precision represents exactly all integers that a Cast has read in the observed runs."""
    seen = known.ranges.get(tensor.name)
    return seen is not None and seen.magnitude <= EXACT_INTEGERS[known.precision.number]


def _can(scope: Scope, known: Known, node: Node) -> bool:
    """Return whether a node can run in half precision, by the dtypes that its operator accepts.

    If the conversion can change the dtypes of some inputs, the operator must accept half precision at one of these
    inputs, and at input 0 if it is one of them.  If the conversion can change the dtypes of some outputs, the operator
    must accept half precision at one of these outputs.
    """
    inputs = half_inputs(op_of(node), len(node.inputs), scope.graph.opset, known.precision)
    outputs = half_outputs(node, scope.graph.opset, known.precision)
    reads = [k for k, tensor in enumerate(node.inputs) if scope.is_real(tensor)]
    writes = [k for k, tensor in enumerate(node.outputs) if scope.is_real(tensor)]
    return (not reads or 0 not in reads or 0 in inputs) and (not reads or any(k in inputs for k in reads)) and (
        not writes or any(k in outputs for k in writes)
    )  # fmt: skip


def _angle(scope: Scope, known: Known, node: Node) -> Iterator[Node]:
    """Yield a Sin or Cos and the arithmetic before it, if their inputs are positions, times or large angles."""
    source = node.inputs[0]
    members = {node: None} | dict.fromkeys(
        scope.behind([source], lambda each: is_arithmetic(each) or is_index_product(each))
    )
    reads = [tensor for each in members for tensor in scope.real_inputs(each) if not is_constant(tensor)]
    makers = [producer(tensor) for tensor in reads]
    seen = known.ranges.get(source.name)
    if all(each is None or each in members for each in makers) or seen is None or seen.magnitude > LARGE_ANGLE:
        yield from members


def _mask_chain(scope: Scope, scores: frozenset[Node]) -> set[Node]:
    """Return the nodes that make additive masks from integers or booleans; half precision holds such masks exactly."""
    members = {node for node in scores if node in scope.counted or not scope.real_outputs(node)}
    masks: list[Tensor] = []
    large: set[Node | None] = set()
    for node in scope.graph.nodes:
        if node in members and (
            _fills_mask(scope, node) or any(_is_mask(scope, each) or producer(each) in large for each in node.inputs)
        ):
            large.add(node)
            masks += node.outputs
    return set(scope.behind(masks, lambda node: node in members))


def _is_mask(scope: Scope, tensor: Tensor) -> bool:
    number = scope.graph.number(tensor) if scope.is_real(tensor) else None
    return number is not None and number < -LARGE_MASK


def _fills_mask(scope: Scope, node: Node) -> bool:
    value = tensor_attribute(node, "value") if node.op == "ConstantOfShape" else None
    number = None if value is None else scope.graph.number(value)
    return number is not None and number < -LARGE_MASK


# --- by fused nodes ----------------------------------------------------------------------------------------------


def _members(scope: Scope, unit: Unit) -> dict[Node, None]:
    """Return, in execution order, the nodes of a unit: those that one fused node replaces."""
    found = {node for name in unit.nodes for node in scope.labeled.get(name, ())}
    return dict.fromkeys(sorted(found, key=scope.graph.position.__getitem__))


def _inside(scope: Scope, known: Known) -> dict[str, Unit]:
    """Return the tensors that only nodes of one unit compute and read, by name, each with that unit.

    A unit is the nodes that one fused node replaces.  The fused node keeps such a tensor in float32, or does not round
    it.
    """
    found: dict[str, Unit] = {}
    for unit in known.units:
        members = _members(scope, unit)
        for tensor in (each for node in members for each in node.outputs):
            if tensor.outputs and tensor.name not in scope.graph.outputs and members.keys() >= set(tensor.outputs):
                found[tensor.name] = unit
    return found


def _of_integers(scope: Scope, known: Known) -> Iterator[Node]:
    """Yield the nodes of products and convolutions of integers, and each node whose result only such nodes read."""
    units = [unit for unit in known.units if unit.fusion in QUANTIZED]
    members = {node: None for unit in units for node in _members(scope, unit)}
    yield from members
    makers = {producer(tensor) for node in members for tensor in node.inputs}
    yield from (node for node in makers if node and members.keys() >= {*consumers(node.outputs[0])})


def _before_quantizers(scope: Scope, rules: Mapping[Node, str]) -> list[Node]:
    """Return the nodes from products of integers to the quantizers that alone read what follows from them.

    They run in the epilogue of the product, on numbers in float32. Their other operands are constants or dequantized,
    so that no tensor between fused nodes becomes float32.
    """
    found: dict[Node, None] = {}
    for node in scope.graph.nodes:
        makers = [producer(each) for each in scope.real_inputs(node) if not is_constant(each)]
        computed = [each for each in makers if each is None or each.op != "DequantizeLinear"]
        if node not in rules and op_of(node) in JOINING and len(computed) == 1:
            (maker,) = computed
            if maker is not None and (maker in found or rules.get(maker) == INTEGERS):
                found[node] = None
    for node in reversed(list(found)):
        readers, is_output = consumers(node.outputs[0]), node.outputs[0].name in scope.graph.outputs
        if is_output or not readers or any(each.op != "QuantizeLinear" and each not in found for each in readers):
            del found[node]
    return list(found)


def _norms(scope: Scope, known: Known) -> Iterator[Node]:
    """Yield, for each norm that one fused node computes in float32, the nodes from the squares to the quotient.

    Half-precision models are exported with these nodes in float32, between Casts from and to half precision.  The scale
    and the shift after the quotient, and an addition before the norm, are in half precision.
    """
    for unit in known.units:
        if not unit.in_float32 or "norm" not in unit.fusion or len(unit.nodes) == 1:
            continue
        members = _members(scope, unit)
        reduces = [node for node in members if node.op.startswith("Reduce")]
        below: set[Node | None] = {*reduces}
        for node in members:
            has_weight = any(elements(each) > 1 for each in node.inputs)
            if not has_weight and below.intersection(map(producer, node.inputs)):
                below.add(node)
        yield from (node for node in members if node in below)
        squares = [producer(each) for node in reduces for each in node.inputs]
        yield from (node for node in squares if node in members and _is_square(node))


def _is_square(node: Node) -> bool:
    return node.op == "Pow" or (node.op == "Mul" and node.inputs[0] is node.inputs[1])


# --- by values ---------------------------------------------------------------------------------------------------


def _by_range(
    scope: Scope, known: Known, scores: frozenset[Node], inside: Mapping[str, Unit]
) -> Iterator[tuple[Node, str]]:
    """Yield the nodes around tensors that half precision cannot hold."""
    precision = known.precision
    for name, seen in known.ranges.items():
        tensor = scope.tensors.get(name)
        if tensor is None or not scope.is_real(tensor):
            continue
        node = producer(tensor)
        is_score = node in scores or any(each in scores for each in tensor.outputs)
        reason = describe_range(name, seen, precision, is_score)
        if not reason and seen.smallest < precision.smallest and _is_divided_by(tensor):
            reason = f"'{name}' goes down to {seen.smallest:.2g}, and a node divides by it or takes its logarithm"
        unit = inside.get(name)
        if not reason:
            yield from () if unit else _by_cancelling(known, tensor)
            continue
        if unit is None:
            yield from ((each, reason) for each in _around(tensor))
        elif node is not None and node.op in PRODUCTS and seen.magnitude > precision.limit:
            yield from ((each, reason) for each in _members(scope, unit))


def describe_range(name: str, seen: Range, precision: Precision, is_score: bool) -> str:
    """Return why half precision cannot hold a tensor; "" if it can.

    If the lowest score is below -LARGE_MASK, a mask lowered it, so only the highest score is checked.
    """
    magnitude = seen.highest if is_score and seen.lowest < -LARGE_MASK else seen.magnitude
    if magnitude > precision.limit:
        return f"'{name}' reaches {magnitude:.3g}"
    if 0 < magnitude < precision.smallest:
        return f"'{name}' is at most {magnitude:.2g}, where half precision has few digits"
    return ""


def _is_divided_by(tensor: Tensor) -> bool:
    """Return whether a consumer divides by a tensor or takes its log, so that small values become large."""
    ops = [(op_of(node), node) for node in tensor.outputs]
    return any(op in ("Log", "Reciprocal") or (op == "Div" and node.inputs[1] is tensor) for op, node in ops)


def _by_cancelling(known: Known, tensor: Tensor) -> Iterator[tuple[Node, str]]:
    """Yield, with reasons, a node whose result is much smaller than its terms, and the producers of these terms."""
    node = producer(tensor)
    if node is None or node.op not in ("Sub", "Add"):
        return
    terms = {each.name: each for each in node.inputs if each.name in known.ranges}
    seen = known.ranges[tensor.name].magnitude
    largest = max((known.ranges[name].magnitude for name in terms), default=0.0)
    if len(terms) < 2 or not 0 < seen < known.precision.rounding * 2**BITS_LEFT * largest:
        return
    reason = f"'{tensor.name}' is at most {seen:.2g}, a difference of numbers up to {largest:.3g}"
    yield from ((each, reason) for each in (node, *map(producer, terms.values())) if each is not None)


def _around(tensor: Tensor) -> Iterator[Node]:
    """Yield the nodes that must stay in float32 for a tensor to be in float32."""
    yield from tensor.inputs
    yield from (node for node in consumers(tensor) if op_of(node) not in READS_ANY)


def _by_weight(
    scope: Scope, known: Known, clamped: Collection[str], inside: Mapping[str, Unit]
) -> Iterator[tuple[Node, str]]:
    """Yield the nodes whose weights half precision cannot hold."""
    for node in scope.graph.nodes:
        op = op_of(node)
        if op in READS_ANY:
            continue
        allowed = half_inputs(op, len(node.inputs), scope.graph.opset, known.precision)
        for k, tensor in enumerate(node.inputs):
            if not is_constant(tensor) or k not in allowed or not scope.is_real(tensor):
                continue
            if node.op == "Pow" and k == 1 and (why := _other_exponent(scope, known, tensor)):
                yield node, f"its exponent '{tensor.name}', {why}"
                continue
            if elements(tensor) == 1 and any(each.name in inside for each in node.outputs):
                continue
            if why := known.weights.loss(scope.graph, tensor, clamp=tensor.name in clamped):
                yield node, f"its constant '{tensor.name}' {why}"


def _other_exponent(scope: Scope, known: Known, tensor: Constant) -> str:
    """Describe an exponent of a Pow that half precision would round to an integer; "" if there is none.

    The rounding would change results: a negative base raised to the original exponent is NaN, but raised to an integer,
    it is a number.
    """
    if constant_dtype(tensor) != TensorProto.FLOAT:
        return ""
    values = constant_value(scope.graph, tensor).reshape(-1)
    rounded = known.precision.rounded(values).astype(np.float32)
    changed = np.flatnonzero((rounded == np.round(rounded)) & (values != rounded))
    if not changed.size:
        return ""
    return f"{values[changed[0]]:g}, would become {rounded[changed[0]]:g} in {known.precision.name}"
