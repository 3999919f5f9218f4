"""Choose which nodes of a graph stay in float32, and say why."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx

from onnxfuse.algebra.operators import MOVES, PRODUCTS
from onnxfuse.half.masks import bound_inputs, score_nodes
from onnxfuse.half.operators import (
    EXACT_INPUTS,
    FILLS,
    READS_ANY,
    STAY,
    combines,
    half_inputs,
    half_outputs,
    is_onnx,
    label,
)
from onnxfuse.half.precision import FLOAT16, Kept, Precision
from onnxfuse.half.ranges import Range
from onnxfuse.half.scope import Scope
from onnxfuse.half.variances import variance_nodes
from onnxfuse.half.weights import Weights

LARGE_MASK: Final = 1e4  # no score comes near it: a constant of this size beside scores is a mask
LARGE_ANGLE: Final = 64.0  # from here on, float16 knows an angle to 0.03 or worse
BITS_LEFT: Final = 3  # of a sum that is much smaller than its terms: one that keeps fewer has lost too many

CANNOT: Final = "{precision} is no dtype of this operator in opset {opset}"
UNTYPED: Final = "the dtype of '{name}' is not known"
COUNTS: Final = "it is computed from integers: positions and lengths"
COMBINES: Final = "onnxruntime's CPU provider combines what is scattered in float32 alone"
ANGLE: Final = "it is an angle, or its sine or cosine"
EXACT: Final = "what is selected, or where is read, follows from it"
VARIANCE: Final = "it is a variance, the difference of a mean of squares and a squared mean"
INSIDE: Final = "it is inside of a fused node, which computes it in float32"


@dataclass(frozen=True)
class Unit:
    """What one fused node of the float32 model replaces."""

    fusion: str
    nodes: frozenset[str]  # by their names, or first outputs
    in_float32: bool  # its body computes in float32 what is not a product


@dataclass(frozen=True)
class Known:
    """What is known of a model besides its graph."""

    opset: int
    precision: Precision
    weights: Weights
    units: Sequence[Unit] = ()
    ranges: Mapping[str, Range] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)  # nodes that are to stay, by name, and why


@dataclass(frozen=True)
class Choice:
    """The nodes that stay in float32, by position, and why; and which constants are masks or bounds."""

    by_rule: Mapping[int, str]
    kept: Mapping[int, str]  # because of their values
    clamped: frozenset[str]
    scores: frozenset[int]

    def is_wide(self, i: int) -> bool:
        """Return whether a node computes in float32."""
        return i in self.by_rule or i in self.kept


def choose(scope: Scope, known: Known) -> Choice:
    """Return which nodes of a graph stay in float32."""
    scores = score_nodes(scope)
    clamped = frozenset(name for i in scores for name in scope.nodes[i].input if name in scope.constants)
    clamped |= frozenset(name for i in range(len(scope.nodes)) for name in bound_inputs(scope, i))
    rules = _by_rule(scope, known, scores)
    inside = _inside(scope, known)
    rules |= {i: INSIDE for i in _norms(scope, known) if i not in rules}
    fused = {i for unit in known.units if unit.in_float32 for i in _positions(scope, unit)}
    rules |= {i: VARIANCE for i in variance_nodes(scope) if i not in rules and i not in fused}
    kept: dict[int, str] = {}
    for i, reason in (*_by_range(scope, known, scores, inside), *_by_weight(scope, known, clamped, inside)):
        if i not in rules:
            kept.setdefault(i, reason)
    asked = {i: known.asked[label(node)] for i, node in enumerate(scope.nodes) if label(node) in known.asked}
    computes = {i for i in asked if scope.real_inputs(i) or scope.real_outputs(i)}
    kept |= {i: reason for i, reason in asked.items() if i in computes and i not in rules and i not in kept}
    return Choice(rules, kept, clamped, scores)


def kept_nodes(scope: Scope, choice: Choice) -> Iterator[Kept]:
    """Yield the nodes that stay in float32 because of their values."""
    for i, reason in sorted(choice.kept.items()):
        node = scope.nodes[i]
        yield Kept(label(node), node.op_type, reason)


# --- by what an operator is --------------------------------------------------------------------------------------


def _by_rule(scope: Scope, known: Known, scores: frozenset[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    for i, node in enumerate(scope.nodes):
        if not (scope.real_inputs(i) or scope.real_outputs(i)):
            continue
        if is_onnx(node) and node.op_type in STAY:
            found[i] = STAY[node.op_type]
        elif (name := scope.untyped(i)) and not (is_onnx(node) and node.op_type in READS_ANY):
            found[i] = UNTYPED.format(name=name)
        elif combines(node):
            found[i] = COMBINES
        elif is_onnx(node) and not scope.real_inputs(i) and node.op_type not in FILLS:
            found[i] = COUNTS
        elif not _can(scope, known, i):
            found[i] = CANNOT.format(precision=known.precision.name, opset=known.opset)
    for i, node in enumerate(scope.nodes):
        if is_onnx(node) and node.op_type in EXACT_INPUTS:
            starts = [node.input[k] for k in EXACT_INPUTS[node.op_type] if k < len(node.input)]
            found |= {j: EXACT for j in scope.behind(starts, scope.is_arithmetic) if j not in found}
        if is_onnx(node) and node.op_type in ("Sin", "Cos"):
            found |= {j: ANGLE for j in _angle(scope, known, i) if j not in found}
    masks = _mask_chain(scope, scores)
    for i in range(len(scope.nodes)):
        outputs = scope.real_outputs(i)
        if outputs and i not in found and i not in masks and all(name in scope.counted for name in outputs):
            found[i] = COUNTS
    for i in reversed(range(len(scope.nodes))):  # a Cast stands where arithmetic ends, in front of views
        node = scope.nodes[i]
        if found.get(i) in (COUNTS, ANGLE) and is_onnx(node) and node.op_type in (*MOVES, "Cast"):
            readers = [j for name in node.output for j in scope.readers.get(name, ())]
            reads = scope.real_inputs(i)
            if readers and all(j not in found and scope.nodes[j].op_type not in READS_ANY for j in readers) and (
                node.op_type != "Cast" or reads or _is_small(known, node.output[0])
            ):  # fmt: skip
                del found[i]
    return found


def _is_small(known: Known, name: str) -> bool:
    """Return whether integers that a Cast reads are seen to be exact in half precision."""
    exact = 2.0**11 if known.precision is FLOAT16 else 2.0**8
    return name in known.ranges and known.ranges[name].magnitude <= exact


def _can(scope: Scope, known: Known, i: int) -> bool:
    """Return whether an operator takes half precision wherever its dtype may change, but for inputs that stay."""
    node = scope.nodes[i]
    if is_onnx(node) and node.op_type in READS_ANY:
        return True
    inputs = half_inputs(node, known.opset, known.precision)
    outputs = half_outputs(node, known.opset, known.precision)
    reads = [k for k, name in enumerate(node.input) if scope.is_real(name)]
    writes = [k for k, name in enumerate(node.output) if scope.is_real(name)]
    return (not reads or 0 not in reads or 0 in inputs) and (not reads or any(k in inputs for k in reads)) and (
        not writes or any(k in outputs for k in writes)
    )  # fmt: skip


def _angle(scope: Scope, known: Known, i: int) -> Iterator[int]:
    """Yield a Sin or Cos and the arithmetic in front of it, where these read positions, times or large angles."""
    source = scope.nodes[i].input[0]
    before = list(scope.behind([source], lambda j: scope.is_arithmetic(j) or scope.is_index_product(j)))
    members = {i, *before}
    reads = {name for j in members for name in scope.real_inputs(j)}
    outside = {name for name in reads if scope.producers.get(name) not in members and name not in scope.constants}
    computed = any(name in scope.producers for name in outside)
    seen = known.ranges.get(source)
    if not computed or seen is None or seen.magnitude > LARGE_ANGLE:
        yield from members


def _mask_chain(scope: Scope, scores: frozenset[int]) -> set[int]:
    """Return the nodes that make an additive mask from integers or booleans: they are exact in half precision."""
    members = {i for i in scores if all(name in scope.counted for name in scope.real_outputs(i))}
    masks: list[str] = []
    large: set[str] = set()
    for i in sorted(members):
        node = scope.nodes[i]
        named = any(_is_mask(scope, name) for name in node.input)
        if named or _fills_mask(node) or any(name in large for name in node.input):
            large.update(node.output)
            masks += node.output
    return set(scope.behind(masks, lambda i: i in members))


def _is_mask(scope: Scope, name: str) -> bool:
    constant = scope.constants.get(name)
    if constant is None or constant.data_type not in (1, 10, 16) or scope.elements(name) != 1:
        return False
    return bool(onnx.numpy_helper.to_array(constant).astype(np.float32).reshape(()) < -LARGE_MASK)


def _fills_mask(node: onnx.NodeProto) -> bool:
    value = next((a.t for a in node.attribute if a.name == "value" and a.HasField("t")), None)
    if node.op_type != "ConstantOfShape" or value is None or value.data_type != onnx.TensorProto.FLOAT:
        return False
    return bool((onnx.numpy_helper.to_array(value) < -LARGE_MASK).all())


# --- by what is fused --------------------------------------------------------------------------------------------


def _positions(scope: Scope, unit: Unit) -> set[int]:
    return {i for name in unit.nodes for i in scope.named.get(name, ())}


def _inside(scope: Scope, known: Known) -> dict[str, Unit]:
    """Return the tensors that vanish in fused nodes, which compute them in float32 or do not round them."""
    found: dict[str, Unit] = {}
    outputs = {value.name for value in scope.graph.output}
    for unit in known.units:
        members = _positions(scope, unit)
        for i in members:
            node = scope.nodes[i]
            for name in node.output:
                readers = scope.readers.get(name, [])
                if readers and name not in outputs and all(j in members for j in readers):
                    found[name] = unit
    return found


def _norms(scope: Scope, known: Known) -> Iterator[int]:
    """Yield the nodes of norms from the squares to the quotient: they read and give half precision through Casts.

    That is how models in half precision are exported, and what is fused then computes in float32.  The scale and the
    shift that follow, and what is added in front, are in half precision.
    """
    for unit in known.units:
        if not unit.in_float32 or "norm" not in unit.fusion or len(unit.nodes) == 1:
            continue
        members = _positions(scope, unit)
        reduces = {i for i in members if scope.nodes[i].op_type.startswith("Reduce")}
        below = set(reduces)
        for i in sorted(members):
            node = scope.nodes[i]
            has_weight = any(scope.elements(name) > 1 for name in node.input)
            reads = {scope.producers.get(name) for name in node.input}
            if i not in below and not has_weight and reads & below:
                below.add(i)
        squares = {
            j
            for i in reduces
            for name in scope.nodes[i].input
            if (j := scope.producers.get(name)) in members and _is_square(scope.nodes[j])
        }
        yield from below | squares


def _is_square(node: onnx.NodeProto) -> bool:
    return node.op_type == "Pow" or (node.op_type == "Mul" and len(set(node.input)) == 1)


# --- by values ---------------------------------------------------------------------------------------------------


def _by_range(
    scope: Scope, known: Known, scores: frozenset[int], inside: Mapping[str, Unit]
) -> Iterator[tuple[int, str]]:
    """Yield the nodes around tensors that half precision cannot hold."""
    precision = known.precision
    for name, seen in known.ranges.items():
        if not scope.is_real(name):
            continue
        producer = scope.producers.get(name)
        is_score = producer in scores or any(j in scores for j in scope.readers.get(name, ()))
        reason = describe_range(name, seen, precision, is_score)
        if not reason and seen.smallest < precision.smallest and _is_divided_by(scope, name):
            reason = f"'{name}' goes down to {seen.smallest:.2g}, and is divided by, or its logarithm taken"
        unit = inside.get(name)
        if not reason:
            yield from () if unit else _by_cancelling(scope, known, name)
            continue
        if unit is None:
            yield from ((i, reason) for i in _around(scope, name))
        elif producer is not None and scope.nodes[producer].op_type in PRODUCTS and seen.magnitude > precision.limit:
            yield from ((i, reason) for i in _positions(scope, unit))


def describe_range(name: str, seen: Range, precision: Precision, is_score: bool) -> str:
    """Return why half precision cannot hold a tensor; "" if it can.  Scores may be masked, by any number below 0."""
    magnitude = seen.highest if is_score and seen.lowest < -LARGE_MASK else seen.magnitude
    if magnitude > precision.limit:
        return f"'{name}' reaches {magnitude:.3g}"
    if 0 < magnitude < precision.smallest:
        return f"'{name}' stays below {magnitude:.2g}"
    return ""


def _is_divided_by(scope: Scope, name: str) -> bool:
    """Return whether small values of a tensor become large."""
    readers = [scope.nodes[i] for i in scope.readers.get(name, ())]
    return any(
        node.op_type in ("Log", "Reciprocal") or (node.op_type == "Div" and node.input[1] == name)
        for node in readers
        if is_onnx(node)
    )


def _by_cancelling(scope: Scope, known: Known, name: str) -> Iterator[tuple[int, str]]:
    """Yield the node of a difference that is much smaller than what it is taken of, and those that compute that."""
    i = scope.producers.get(name)
    if i is None or scope.nodes[i].op_type not in ("Sub", "Add"):
        return
    terms = {each: known.ranges[each].magnitude for each in scope.nodes[i].input if each in known.ranges}
    seen, largest = known.ranges[name].magnitude, max(terms.values(), default=0.0)
    if len(terms) < 2 or not 0 < seen < known.precision.rounding * 2**BITS_LEFT * largest:
        return
    reason = f"'{name}' stays below {seen:.2g}, a difference of numbers up to {largest:.3g}"
    yield from ((j, reason) for j in (i, *(scope.producers[each] for each in terms if each in scope.producers)))


def _around(scope: Scope, name: str) -> Iterator[int]:
    """Yield the nodes that must be in float32 so that a tensor is."""
    if name in scope.producers:
        yield scope.producers[name]
    for i in scope.readers.get(name, ()):
        if scope.nodes[i].op_type not in READS_ANY or not is_onnx(scope.nodes[i]):
            yield i


def _by_weight(
    scope: Scope, known: Known, clamped: Collection[str], inside: Mapping[str, Unit]
) -> Iterator[tuple[int, str]]:
    """Yield the nodes whose weights half precision cannot hold."""
    for i, node in enumerate(scope.nodes):
        if is_onnx(node) and node.op_type in READS_ANY:
            continue
        allowed = half_inputs(node, known.opset, known.precision)
        for k, name in enumerate(node.input):
            tensor = scope.constants.get(name)
            if tensor is None or k not in allowed or not scope.is_real(name):
                continue
            if node.op_type == "Pow" and k == 1 and (why := _other_exponent(known, tensor)):
                yield i, f"its exponent '{name}', {why}"
                continue
            if scope.elements(name) == 1 and any(out in inside for out in node.output):
                continue
            if why := known.weights.loss(tensor, clamp=name in clamped):
                yield i, f"its constant '{name}' {why}"


def _other_exponent(known: Known, tensor: onnx.TensorProto) -> str:
    """Return which exponent would become an integer, whose powers of negative numbers are no NaN; "" if none."""
    if tensor.data_type != onnx.TensorProto.FLOAT:
        return ""
    values = known.weights.value(tensor).reshape(-1)
    rounded = known.precision.rounded(values).astype(np.float32)
    changed = np.flatnonzero((rounded == np.round(rounded)) & (values != rounded))
    if not changed.size:
        return ""
    return f"{values[changed[0]]:g}, would become {rounded[changed[0]]:g} in {known.precision.name}"
