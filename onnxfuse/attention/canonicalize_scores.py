"""Write the scores that a Softmax reads in the order that patterns match.

Patterns match a product of queries and keys that is first scaled, then gets at most one bias and, at the end, one mask.
Models write other orders.  They scale the sum of a product and a mask; replace the scores that one mask hides, and add
another mask; add three tensors; replace the masked elements of a bias before they add it (Falcon); or replace the
scores that one mask hides, and then those that another mask hides (x-transformers).

This pass distributes factors over sums.  It adds the addends to each other before it adds them to the scores: one sum
for tensors with an axis for heads, and one for all others.  A factor per head, as in cosine attention, moves to the
queries.  A causal mask that replaces scores becomes a mask that is added, because kernels compute the numbers of an
added causal mask from positions instead of reading them.

A key that two masks hide must keep the score that one mask gives it.  The reason is a row whose keys are all hidden, as
in left padding: there, keys with the lowest finite number as score still have weight, but the sum of two lowest numbers
is -inf.  So a mask that replaces scores becomes an added mask only if its number swallows every score, which means that
the sum of the number and a score is the number.  Where this mask hides a key, its number also replaces the numbers of
the masks before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Final

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.index_formulas import AtMostZero, causal_mask_value, negated
from onnxfuse.analysis.magnitudes import LARGEST_FLOAT32, is_ordinary
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.scores import HEADS_AXIS, MAX_STEPS, nodes_before, softmaxes_of_attention
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import write
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.scale_operand import scale_operand
from onnxfuse.patterns._attention import SWALLOWS_SCORES

MAX_ADDENDS: Final = 2  # maximum number of tensors that a fused attention adds to scores
QUERIES_AXIS: Final = -2
# By operator: pairs of input indices.  The first input can be scores; the second is added, multiplied or filled in.
OPERANDS: Final = {
    "Add": ((0, 1), (1, 0)), "Sub": ((0, 1),), "Mul": ((0, 1), (1, 0)), "Div": ((0, 1),), "Where": ((1, 2), (2, 1)),
}  # fmt: skip


@dataclass(frozen=True)
class Addend:
    """An addend of scores: a tensor times the number `factor`."""

    tensor: Tensor
    factor: float = 1.0

    def times(self, factor: float) -> Addend:
        """Return the addend times a factor, for a sum of scores and addend that is multiplied by the factor."""
        return replace(self, factor=self.factor * factor)


@dataclass(frozen=True)
class Mask:
    """A mask: its number replaces the scores that its condition hides, or is added to them if `is_added`.

    `swallows` says that the sum of the number and any score is rounded to the number.
    """

    condition: Tensor
    inverted: bool  # whether the condition is true where scores are hidden; else it is true where they are kept
    number: float
    swallows: bool
    is_added: bool = False

    def times(self, factor: float) -> Mask:
        """Return the mask with its number times a factor, for masked scores that are multiplied by the factor."""
        return replace(self, number=self.number * factor)


@dataclass(frozen=True)
class Scores:
    """Attention scores: `product` times `factor`, then `steps` in order; `nodes` are the nodes that compute them."""

    product: Tensor
    factor: float = 1.0
    steps: tuple[Addend | Mask, ...] = ()
    nodes: tuple[Node, ...] = ()
    is_usual: bool = True  # whether patterns match the steps in this order

    def then(self, node: Node, *steps: Addend | Mask, is_usual: bool = True) -> Scores:
        """Return the scores extended by a node that performs `steps`."""
        has_mask = any(isinstance(each, Mask) for each in self.steps)
        is_usual &= self.is_usual and not has_mask and len(self.steps) < MAX_ADDENDS
        return replace(self, steps=(*self.steps, *steps), nodes=(*self.nodes, node), is_usual=is_usual)

    def times(self, factor: float, node: Node) -> Scores:
        """Return the scores extended by a node that multiplies them by a number."""
        steps = tuple(each.times(factor) for each in self.steps)
        return replace(self, factor=self.factor * factor, steps=steps).then(node, is_usual=False)


@graph_pass(opset=9)  # from this opset on, Where broadcasts
def canonicalize_scores(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite scores that are computed in an order that no pattern matches.  Returns the number of rewritten scores."""
    analysis = cache(partial(IndexAnalysis, graph, shapes))  # computed on demand, because few models need it
    count = 0
    for node in softmaxes_of_attention(graph):
        made = _rewrite(graph, shapes, analysis, node) + _scale_queries(graph, shapes, node.inputs[0])
        if made:
            graph.scores.done.add(graph.scores.name(node))
        count += made
    return count


def _rewrite(graph: Graph, shapes: ShapeInfo, analysis: Callable[[], IndexAnalysis], softmax: Node) -> bool:
    """Rewrite the scores that a Softmax reads; return whether they were rewritten."""
    tensor = softmax.inputs[0]
    if shapes.dtype(tensor) not in FUSIBLE_FLOATS or shapes.shape(tensor) is None:
        return False
    scores = parse_scores(graph, shapes, tensor)
    if scores is None or not scores.steps:
        return False
    is_causal = _is_replaced_after_diagonal(shapes, analysis, scores)
    if scores.is_usual and not is_causal:
        return False
    *inner, last = scores.steps
    mask = last if isinstance(last, Mask) and not last.is_added else None
    inner = inner if mask else [*inner, last]
    if any(graph.sole_consumer(node.outputs[0]) is None for node in scores.nodes):
        return False
    if any(isinstance(each, Mask) and not each.swallows for each in inner):
        return False
    softmax.inputs[0] = _Writer(graph, shapes, tensor, is_causal).scores(scores, inner, mask)
    return True


# --- reading scores ---------------------------------------------------------------------------------------------------


def parse_scores(graph: Graph, shapes: ShapeInfo, tensor: Tensor, steps: int = MAX_STEPS) -> Scores | None:
    """Return how a tensor is computed from a product; None if no product is found within `steps` nodes."""
    node = producer(tensor)
    if node is None or not steps:
        return None
    op = op_of(node)
    for place, beside in OPERANDS["Add"] if op == "Add" else ():
        masked = producer(node.inputs[place])
        selected = _selected(graph, masked, node.inputs[beside])
        if masked is not None and selected is not None:
            scores, mask = parse_scores(graph, shapes, selected[0], steps - 1), selected[1]
            return None if scores is None else scores.then(masked).then(node, mask, is_usual=False)
    if op in ("MatMul", "Tanh", "Cast"):
        before = nodes_before(tensor, ("Mul", "Div", "Tanh", "Cast"))
        return Scores(tensor) if any(op_of(each) == "MatMul" for each in before) else None
    found = []
    for place, beside in OPERANDS.get(op, ()):
        number = graph.number(node.inputs[beside])
        if number is not None or op in ("Add", "Sub"):
            scores = parse_scores(graph, shapes, node.inputs[place], steps - 1)
            found += [] if scores is None else [(scores, number or 0.0, place, node.inputs[beside])]
    if len(found) != 1:
        return None
    ((scores, number, place, other),) = found
    if op in ("Mul", "Div"):
        if not number:
            return None
        factor = 1 / number if op == "Div" else number
        return scores.times(factor, node) if scores.steps else Scores(tensor)
    if op == "Where":
        return scores.then(node, Mask(node.inputs[0], place == 2, number, _swallows(number, shapes.dtype(other))))
    if op == "Add" and (both := _masked_bias(graph, shapes, other)) is not None:
        return scores.then(node, *both, is_usual=False)
    return scores.then(node, Addend(other, 1.0 if op == "Add" else -1.0), is_usual=op == "Add")


def _selected(graph: Graph, product: Node | None, numbers: Tensor) -> tuple[Tensor, Mask] | None:
    """Return the scores and the mask if `product` + `numbers` computes a Where of scores and a number.

    `product` must multiply the scores by a constant tensor of zeros and ones.  `numbers` must be a constant tensor with
    0 where the scores are multiplied by 1, and one finite number elsewhere.  tf2onnx writes a Where in this way.
    """
    if product is None or op_of(product) != "Mul" or not is_constant(numbers):
        return None
    ones, scores = sorted(product.inputs, key=is_constant, reverse=True)
    if not is_constant(ones) or is_constant(scores):
        return None
    factors, addends = np.broadcast_arrays(constant_value(graph, ones), constant_value(graph, numbers))
    kept = factors == 1
    hidden = addends[~kept]
    if not hidden.size or np.any(factors[~kept]) or np.any(addends[kept]) or np.any(hidden != hidden[0]):
        return None
    number = float(hidden[0])
    if not math.isfinite(number):
        return None
    return scores, Mask(graph.constant(f"{ones.name}_kept", kept), False, number, number < SWALLOWS_SCORES)


def _masked_bias(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> tuple[Addend, Mask] | None:
    """Return the bias and the mask if a tensor is a Where that replaces the hidden elements of a bias by a number.

    The bias must have an axis for heads, the mask must have none, and the number must be so low that its sum with any
    score is the number.  The bias must also be the same for all queries: otherwise, reading the result of the Where is
    faster for a kernel than reading bias and mask.
    """
    node = producer(tensor)
    if node is None or op_of(node) != "Where" or _has_heads(shapes.shape(node.inputs[0])):
        return None
    for place, beside in OPERANDS["Where"]:
        bias, number = node.inputs[place], graph.number(node.inputs[beside])
        shape = shapes.shape(bias)
        if number is None or shape is None or not _swallows(number, shapes.dtype(bias)):
            continue
        if _has_heads(shape) and shape[QUERIES_AXIS] == 1 and is_ordinary(shapes, bias):
            return Addend(bias), Mask(node.inputs[0], place == 2, number, swallows=True, is_added=True)
    return None


def _swallows(number: float, dtype: int) -> bool:
    return number == -math.inf or (dtype == TensorProto.FLOAT and number < SWALLOWS_SCORES)


def _has_heads(shape: Sequence[Size] | None) -> bool:
    return shape is None or (len(shape) >= -HEADS_AXIS and shape[HEADS_AXIS] != 1)


def _is_replaced_after_diagonal(shapes: ShapeInfo, analysis: Callable[[], IndexAnalysis], scores: Scores) -> bool:
    """Return whether the last step is a causal mask that replaces scores, and all earlier steps add biases per head.

    Such a bias has an axis for heads, and holds no number of a mask, such as -inf.
    """
    *others, mask = scores.steps
    sizes = shapes.shape(scores.product)
    if not isinstance(mask, Mask) or mask.is_added or not mask.swallows or sizes is None:
        return False
    tensor = mask.condition
    tensors = [each.tensor for each in others if isinstance(each, Addend) and _has_heads(shapes.shape(each.tensor))]
    if len(tensors) < len(others) or not is_ordinary(shapes, *tensors) or _has_heads(shapes.shape(tensor)):
        return False
    seen = causal_mask_value(*sizes[-2:])
    value, node = analysis().value(tensor), producer(tensor)
    if mask.inverted:
        return isinstance(seen, AtMostZero) and value is not None and negated(value) == seen
    joined = node.inputs if node is not None and op_of(node) == "And" else ()
    return isinstance(seen, AtMostZero) and seen in (value, *map(analysis().value, joined))


# --- factors of heads -------------------------------------------------------------------------------------------------


def _scale_queries(graph: Graph, shapes: ShapeInfo, scores: Tensor) -> bool:
    """Move a factor per head or per query from scores to the queries; return whether there was one."""
    before = nodes_before(scores, ("Add", "Where"))
    return any(op_of(node) == "Mul" and _scale_queries_of(graph, shapes, node) for node in before)


def _scale_queries_of(graph: Graph, shapes: ShapeInfo, node: Node) -> bool:
    for tensor, factor in (node.inputs, node.inputs[::-1]):
        product, sizes, dtype = producer(tensor), shapes.shape(factor), shapes.dtype(factor)
        if product is None or op_of(product) != "MatMul" or graph.sole_consumer(tensor) is None:
            continue
        queries = product.inputs[0]
        shape = shapes.shape(queries)
        if shape is None or not sizes or sizes[-1] != 1 or len(sizes) > len(shape) or dtype != shapes.dtype(queries):
            continue
        if broadcast(shapes, shape, sizes) == shape and graph.number(factor) is None:
            scale_operand(shapes, product, node)
            return True
    return False


# --- writing scores ---------------------------------------------------------------------------------------------------


@dataclass
class _Writer:
    """Writes the nodes of scores that replace the tensor `end`."""

    graph: Graph
    shapes: ShapeInfo
    end: Tensor
    is_causal: bool  # whether the last mask is causal
    of_heads: Tensor | None = None  # the sum of the addends with an axis for heads
    plain: Tensor | None = None  # the sum of the other addends

    def scores(self, scores: Scores, inner: Sequence[Addend | Mask], mask: Mask | None) -> Tensor:
        """Write the scores as a product plus at most two tensors, or plus at most one if a mask then replaces scores.

        `mask` is the last step if that is a mask that replaces scores, else None; `inner` has all other steps.
        """
        total, stem = self._times(scores.product, scores.factor), f"{self.end.name}_masked"
        for step in inner:
            self._add(step)
        if mask is not None and mask.swallows and self._may_be_added():
            self.plain, mask = self._under(mask, self.plain), None
        elif mask is not None and self.of_heads is not None and self.plain is not None:
            self.of_heads, self.plain = self._sum(self.of_heads, self.plain), None
        for each in (self.of_heads, self.plain):
            if each is not None:
                total = write(self.shapes, "Add", [total, each], stem)
        return total if mask is None else self._where(mask, total, stem)

    def _may_be_added(self) -> bool:
        """Return whether adding the mask is exact, and lets a kernel read less than replacing scores does.

        This holds if some addends have an axis for heads and others have none.  If all addends have this axis, it
        holds for a causal mask only, because kernels compute the numbers of an added causal mask from positions.
        """
        if self.of_heads is not None and not is_ordinary(self.shapes, self.of_heads):
            return False
        return (self.of_heads is not None) if self.plain is not None else self.is_causal

    def _add(self, step: Addend | Mask) -> None:
        """Add a step to `of_heads` if its tensor has an axis for heads, else to `plain`."""
        if isinstance(step, Mask) and not step.is_added:
            self._replace(step)
            return
        tensor = self._under(step, None) if isinstance(step, Mask) else self._times(step.tensor, step.factor)
        if _has_heads(self.shapes.shape(tensor)):
            self.of_heads = self._sum(self.of_heads, tensor)
        else:
            self.plain = self._sum(self.plain, tensor)

    def _replace(self, mask: Mask) -> None:
        """Write the mask's number over the elements that the mask hides in one of the sums `plain` and `of_heads`.

        The other sum is added later, so it must not hold the number of another mask.  The changed sum is `of_heads` if
        the mask has an axis for heads.  If neither sum can be added later, the two are added first.
        """
        is_ordinary_of_heads, is_ordinary_plain = (
            each is None or is_ordinary(self.shapes, each) for each in (self.of_heads, self.plain)
        )
        if is_ordinary_of_heads and not _has_heads(self.shapes.shape(mask.condition)):
            self.plain = self._under(mask, self.plain)
        elif is_ordinary_plain or self.plain is None:
            self.of_heads = self._under(mask, self.of_heads)
        else:
            self.of_heads, self.plain = self._under(mask, self._sum(self.of_heads, self.plain)), None

    def _under(self, mask: Mask, addend: Tensor | None) -> Tensor:
        """Return a tensor with the mask's number where the mask hides scores, and the addend or 0 elsewhere."""
        stem = f"{self.end.name}_mask"
        return self._where(mask, self._constant(f"{stem}_zero", 0.0) if addend is None else addend, stem)

    def _where(self, mask: Mask, value: Tensor, stem: str) -> Tensor:
        """Write a Where that selects `mask.number` where the mask hides scores, and `value` elsewhere."""
        number = self._constant(f"{stem}_number", mask.number)
        branches = [number, value] if mask.inverted else [value, number]
        return write(self.shapes, "Where", [mask.condition, *branches], stem)

    def _sum(self, a: Tensor | None, b: Tensor) -> Tensor:
        return b if a is None else write(self.shapes, "Add", [a, b], f"{self.end.name}_mask")

    def _times(self, tensor: Tensor, factor: float) -> Tensor:
        """Return a tensor times a number; a Where of two numbers stays a Where of the scaled numbers."""
        if factor == 1:
            return tensor
        stem, node = f"{tensor.name}_scaled", producer(tensor)
        numbers = [self.graph.number(each) for each in node.inputs[1:]] if node is not None else []
        known = [number for number in numbers if number is not None]
        if node is not None and op_of(node) == "Where" and len(known) == len(numbers):
            branches = [self._constant(f"{stem}_number", number * factor) for number in known]
            return write(self.shapes, "Where", [node.inputs[0], *branches], stem)
        return write(self.shapes, "Mul", [tensor, self._constant(f"{stem}_factor", factor)], stem)

    def _constant(self, stem: str, number: float) -> Tensor:
        rounded = number if abs(number) <= LARGEST_FLOAT32 else math.copysign(math.inf, number)
        dtype = tensor_dtype_to_np_dtype(self.shapes.dtype(self.end))
        return self.graph.constant(stem, np.array(rounded, dtype))
