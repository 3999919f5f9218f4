"""Write what happens to scores between a product and a Softmax in the order that patterns know.

Patterns know scores that are scaled at the product, then at most one bias, and one mask at the end.  Some models scale
the sum of a product and a mask, replace scores under one mask and then add another, or add three tensors, or replace a
bias of heads under a mask before they add it (Falcon), or replace scores under two masks, one behind the other
(x-transformers).  Factors are distributed over sums, and what is added is summed up first, apart from tensors with an
axis for heads.  A factor of each head, as that of cosine attention, moves to the queries.  A Max of scores and the
lowest number behind a mask becomes one of the mask, and is left out where the mask is of finite numbers.  A causal mask
that replaces scores becomes one that is added, because kernels know by place what such a mask holds.

A key that two masks leave out keeps the score that the model gives it, because it has weight in a row without a key
that counts, as padding on the left makes them: the sum of two lowest numbers is -inf, and one of them is not.  So a
mask that replaces scores is added only if no score changes its number, and it replaces the masks in front of it.
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

from onnxfuse.algebra.operators import VIEWS
from onnxfuse.algebra.sizes import Size
from onnxfuse.analysis.index_formulas import AtMostZero, causal_mask_value, negated
from onnxfuse.analysis.magnitudes import is_ordinary
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.scores import HEADS_AXIS, MAX_STEPS, softmaxes_of_attention
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.attributes import tensor_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_number
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.passes.graph_pass import graph_pass
from onnxfuse.passes.scale_operand import scale_operand
from onnxfuse.patterns._attention import SWALLOWS_SCORES

MAX_ADDENDS: Final = 2  # that a fused attention takes
QUERIES_AXIS: Final = -2
INTEGERS: Final = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})


@dataclass(frozen=True)
class Addend:
    """A tensor times a number, which is added to scores."""

    tensor: Tensor
    factor: float = 1.0


@dataclass(frozen=True)
class Mask:
    """A number that replaces scores where a condition does not hold, or is added to them there (`is_added`).

    `swallows` says that a score to which the number is added becomes that number.
    """

    condition: Tensor
    inverted: bool  # the condition holds where a score does not count
    number: float
    swallows: bool
    is_added: bool = False


@dataclass(frozen=True)
class Scores:
    """Scores as a product times a number, and what is done to them in order; `nodes` do it, from the product on."""

    product: Tensor
    factor: float = 1.0
    steps: tuple[Addend | Mask, ...] = ()
    nodes: tuple[Node, ...] = ()
    is_usual: bool = True  # patterns know the order as it is

    @property
    def has_mask(self) -> bool:
        """Whether a number replaces scores anywhere."""
        return any(isinstance(each, Mask) for each in self.steps)


@graph_pass(opset=9)  # whose Where broadcasts
def canonicalize_scores(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite scores in front of Softmax whose order patterns do not know.  Returns the number of rewritten scores."""
    analysis = cache(partial(IndexAnalysis, graph, shapes))  # few models need it
    count = 0
    for node in softmaxes_of_attention(graph):
        made = _rewrite(graph, shapes, analysis, node) + _scale_queries(graph, shapes, node.inputs[0], MAX_STEPS)
        if made:
            graph.scores.done.add(graph.scores.name(node))
        count += made
    return count


def _rewrite(graph: Graph, shapes: ShapeInfo, analysis: Callable[[], IndexAnalysis], softmax: Node) -> bool:
    """Rewrite the scores that a Softmax reads; return whether they were."""
    if (unlimited := _without_lowest(graph, shapes, softmax.inputs[0])) is not None:
        softmax.inputs[0] = unlimited
        return True
    tensor = softmax.inputs[0]
    if shapes.dtype(tensor) not in FUSIBLE_FLOATS or shapes.shape(tensor) is None:
        return False
    scores = _scores(graph, shapes, tensor, MAX_STEPS)
    if scores is None or not scores.steps or _product_behind(scores.product) is None:
        return False
    is_causal = _is_replaced_behind_diagonal(shapes, analysis, scores)
    if scores.is_usual and not is_causal:
        return False
    made = [node.outputs[0] for node in scores.nodes]
    if any(graph.sole_consumer(each) is None for each in made):
        return False
    *inner, last = scores.steps
    mask = last if isinstance(last, Mask) and not last.is_added else None
    inner = inner if mask else [*inner, last]
    if any(isinstance(each, Mask) and not each.swallows for each in inner):
        return False
    product = _times(graph, shapes, scores.product, scores.factor)
    softmax.inputs[0] = _Writer(graph, shapes, tensor, is_causal).scores(product, inner, mask)
    return True


def _is_replaced_behind_diagonal(shapes: ShapeInfo, analysis: Callable[[], IndexAnalysis], scores: Scores) -> bool:
    """Return whether a causal mask replaces scores at last, to which nothing but a tensor of heads is added before."""
    *others, mask = scores.steps
    sizes = shapes.shape(scores.product)
    if not isinstance(mask, Mask) or mask.is_added or not mask.swallows or sizes is None:
        return False
    tensor = mask.condition
    is_of_heads = [isinstance(each, Addend) and _has_heads(shapes.shape(each.tensor)) for each in others]
    if not all(is_of_heads) or _has_heads(shapes.shape(tensor)):
        return False
    seen = causal_mask_value(*sizes[-2:])
    value, node = analysis().value(tensor), producer(tensor)
    if mask.inverted:
        return isinstance(seen, AtMostZero) and value is not None and negated(value) == seen
    joined = node.inputs if node is not None and op_of(node) == "And" else ()
    return isinstance(seen, AtMostZero) and seen in (value, *map(analysis().value, joined))


def _without_lowest(graph: Graph, shapes: ShapeInfo, scores: Tensor) -> Tensor | None:
    """Return scores without the Max with the lowest finite number, which is taken of the mask that is added instead.

    That is the same for scores that a number below -1e30 swallows, and changes infinite ones.  A mask of finite numbers
    needs no Max.  Scores under another mask as well may be -inf, which becomes the number of a key that one mask leaves
    out.
    """
    node = producer(scores)
    if node is None or op_of(node) != "Max" or len(node.inputs) != 2 or shapes.dtype(scores) != TensorProto.FLOAT:
        return None
    for tensor, number in (node.inputs, node.inputs[::-1]):
        total = producer(tensor)
        if total is None or op_of(total) != "Add" or constant_number(graph, number) != float(np.finfo(np.float32).min):
            continue
        sides = [side for side in (total.inputs, total.inputs[::-1]) if is_ordinary(shapes, side[1])]
        if any(_is_finite_mask(graph, shapes, mask, MAX_STEPS) for mask, _ in sides):
            return tensor
        for mask, product in sides:
            found = _scores(graph, shapes, product, MAX_STEPS)
            if found is None or _product_behind(found.product) is None or graph.sole_consumer(tensor) is None:
                continue
            dtype, stem = TensorProto.FLOAT, f"{mask.name}_limited"
            limited = emit(graph, shapes, "Max", [mask, number], stem, shapes.shape(mask), dtype)
            stem = f"{tensor.name}_limited"
            return emit(graph, shapes, "Add", [product, limited], stem, shapes.shape(tensor), dtype)
    return None


def _is_finite_mask(graph: Graph, shapes: ShapeInfo, tensor: Tensor, steps: int) -> bool:
    """Return whether a tensor holds finite numbers alone: those that Wheres choose from, and what integers give."""
    if is_constant(tensor):
        number = constant_number(graph, tensor)
        return number is not None and math.isfinite(number)
    node = producer(tensor)
    if node is None or not steps:
        return False
    finite = partial(_is_finite_mask, graph, shapes, steps=steps - 1)
    match op_of(node):
        case "Where":
            return all(map(finite, node.inputs[1:]))
        case "Cast":
            return shapes.dtype(node.inputs[0]) in INTEGERS
        case "Sub":  # 1 less a mask of integers
            casts = [made for each in node.inputs if (made := producer(each)) is not None]
            return all(op_of(cast) == "Cast" for cast in casts) and all(map(finite, node.inputs))
        case "ConstantOfShape":
            value = tensor_attribute(node, "value")
            number = 0.0 if value is None else constant_number(graph, value)
            return number is not None and math.isfinite(number)
    return op_of(node) in VIEWS | {"Slice"} and finite(node.inputs[0])


def _scale_queries(graph: Graph, shapes: ShapeInfo, scores: Tensor, steps: int) -> bool:
    """Move a factor of each head, or of each query, from scores to the queries; return whether there was one."""
    node = producer(scores)
    if node is None or not steps:
        return False
    if op_of(node) in ("Add", "Where"):
        return any(_scale_queries(graph, shapes, each, steps - 1) for each in node.inputs)
    if op_of(node) != "Mul":
        return False
    for tensor, factor in (node.inputs, node.inputs[::-1]):
        product, sizes = producer(tensor), shapes.shape(factor)
        if product is None or op_of(product) != "MatMul" or graph.sole_consumer(tensor) is None:
            continue
        queries, dtype = shapes.shape(product.inputs[0]), shapes.dtype(factor)
        if queries is None or not sizes or sizes[-1] != 1 or dtype != shapes.dtype(product.inputs[0]):
            continue
        if len(sizes) <= len(queries) and broadcast(shapes, queries, sizes) == queries and not _is_number(factor):
            scale_operand(graph, shapes, product, node)
            return True
    return False


def _is_number(tensor: Tensor) -> bool:
    return is_constant(tensor) and math.prod(tensor.shape) == 1


def _scores(graph: Graph, shapes: ShapeInfo, tensor: Tensor, steps: int) -> Scores | None:
    """Return how a tensor is computed from a product; None where the product is not found in so many steps."""
    node = producer(tensor)
    if node is None or steps == 0:
        return None
    match op_of(node):
        case "MatMul" | "Tanh" | "Cast":
            return Scores(tensor)
        case "Add" | "Sub":
            return _sum(graph, shapes, node, steps)
        case "Mul" | "Div":
            return _scaled(graph, shapes, node, steps)
        case "Where":
            return _masked(graph, shapes, node, steps)
    return None


def _sum(graph: Graph, shapes: ShapeInfo, node: Node, steps: int) -> Scores | None:
    sides = (0,) if op_of(node) == "Sub" else (0, 1)
    found = ((side, _scores(graph, shapes, node.inputs[side], steps - 1)) for side in sides)
    known = [(side, scores) for side, scores in found if scores is not None]
    known = [(side, scores) for side, scores in known if _product_behind(scores.product) is not None]
    if len(known) != 1:
        return None
    side, scores = known[0]
    other = node.inputs[1 - side]
    if op_of(node) == "Add" and (both := _masked_bias(graph, shapes, other)) is not None:
        return Scores(scores.product, scores.factor, (*scores.steps, *both), (*scores.nodes, node), is_usual=False)
    addend = Addend(other, -1.0 if op_of(node) == "Sub" else 1.0)
    usual = scores.is_usual and op_of(node) == "Add" and not scores.has_mask and len(scores.steps) < MAX_ADDENDS
    return Scores(scores.product, scores.factor, (*scores.steps, addend), (*scores.nodes, node), usual)


def _masked_bias(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> tuple[Addend, Mask] | None:
    """Return the bias of heads and the mask without heads that a Where joins, beside whose number no score counts.

    The bias is the same for all queries: reading one of all queries and a mask takes longer than reading both as one.
    """
    node = producer(tensor)
    if node is None or op_of(node) != "Where" or _has_heads(shapes.shape(node.inputs[0])):
        return None
    condition, yes, no = node.inputs
    for bias, other, inverted in ((yes, no, False), (no, yes, True)):
        number = constant_number(graph, other)
        shape = shapes.shape(bias)
        if number is None or shape is None or not _swallows(number, shapes.dtype(other)):
            continue
        if _has_heads(shape) and shape[QUERIES_AXIS] == 1 and is_ordinary(shapes, bias):
            return Addend(bias), Mask(condition, inverted, number, swallows=True, is_added=True)
    return None


def _scaled(graph: Graph, shapes: ShapeInfo, node: Node, steps: int) -> Scores | None:
    sides = (0,) if op_of(node) == "Div" else (0, 1)
    side = next((side for side in sides if constant_number(graph, node.inputs[1 - side]) is not None), None)
    if side is None:
        return None
    number = constant_number(graph, node.inputs[1 - side])
    scores = _scores(graph, shapes, node.inputs[side], steps - 1)
    if number is None or number == 0 or scores is None:
        return None
    if not scores.steps:
        return Scores(node.outputs[0])  # the product times a number
    factor = 1 / number if op_of(node) == "Div" else number
    scaled = tuple(_scale(each, factor) for each in scores.steps)
    return Scores(scores.product, scores.factor * factor, scaled, (*scores.nodes, node), is_usual=False)


def _scale(step: Addend | Mask, factor: float) -> Addend | Mask:
    if isinstance(step, Mask):
        return replace(step, number=step.number * factor)
    return replace(step, factor=step.factor * factor)


def _masked(graph: Graph, shapes: ShapeInfo, node: Node, steps: int) -> Scores | None:
    condition, yes, no = node.inputs
    for branch, other, inverted in ((yes, no, False), (no, yes, True)):
        number = constant_number(graph, other)
        scores = None if number is None else _scores(graph, shapes, branch, steps - 1)
        if number is None or scores is None:
            continue
        mask = Mask(condition, inverted, number, _swallows(number, shapes.dtype(other)))
        nodes, before = (*scores.nodes, node), scores.steps
        usual = scores.is_usual and not scores.has_mask and len(before) < MAX_ADDENDS
        return Scores(scores.product, scores.factor, (*before, mask), nodes, usual)
    return None


def _swallows(number: float, dtype: int) -> bool:
    return number == -math.inf or (dtype == TensorProto.FLOAT and number < SWALLOWS_SCORES)


def _product_behind(tensor: Tensor) -> Node | None:
    """Return the MatMul that a tensor is a multiple, a Tanh or a Cast of."""
    for _ in range(MAX_STEPS):
        node = producer(tensor)
        if node is None or op_of(node) == "MatMul":
            return node
        if op_of(node) not in ("Mul", "Div", "Tanh", "Cast"):
            return None
        tensor = next((each for each in node.inputs if not is_constant(each)), node.inputs[0])
    return None


def _has_heads(shape: Sequence[Size] | None) -> bool:
    return shape is None or (len(shape) >= -HEADS_AXIS and shape[HEADS_AXIS] != 1)


@dataclass(frozen=True)
class _Writer:
    """Writes scores that are computed otherwise as `end` is."""

    graph: Graph
    shapes: ShapeInfo
    end: Tensor
    is_causal: bool  # the mask at last is

    def scores(self, product: Tensor, inner: Sequence[Addend | Mask], mask: Mask | None) -> Tensor:
        """Return a product plus at most two tensors, or plus one and with a number in its place under a mask."""
        of_heads, plain = self._summed(inner)
        if mask is not None and mask.swallows and self._may_be_added(mask, of_heads, plain):
            of_heads, plain, mask = of_heads, self._under(mask, plain), None
        elif mask is not None and of_heads is not None and plain is not None:
            of_heads, plain = self._add(of_heads, plain), None
        total = product
        for each in (of_heads, plain):
            if each is not None:
                total = self._add(total, each, f"{self.end.name}_masked", self.shapes.shape(self.end))
        return total if mask is None else self._where(mask, total, f"{self.end.name}_masked")

    def _may_be_added(self, mask: Mask, of_heads: Tensor | None, plain: Tensor | None) -> bool:
        """Return whether a mask can be added in place of replacing scores, and is better: see `causal` in patterns."""
        if of_heads is not None and not is_ordinary(self.shapes, of_heads):
            return False
        return (of_heads is not None) if plain is not None else self.is_causal

    def _summed(self, steps: Sequence[Addend | Mask]) -> tuple[Tensor | None, Tensor | None]:
        """Return the sums of what is added to scores: of tensors with an axis for heads, and of the others."""
        of_heads: Tensor | None = None
        plain: Tensor | None = None
        for step in steps:
            if isinstance(step, Mask) and not step.is_added:
                of_heads, plain = self._replaced(step, of_heads, plain)
                continue
            tensor = (
                self._under(step, None)
                if isinstance(step, Mask)
                else _times(self.graph, self.shapes, step.tensor, step.factor)
            )
            if _has_heads(self.shapes.shape(tensor)):
                of_heads = self._add(of_heads, tensor)
            else:
                plain = self._add(plain, tensor)
        return of_heads, plain

    def _replaced(
        self, mask: Mask, of_heads: Tensor | None, plain: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the sums under a mask that replaces scores.

        Its number replaces one of the sums: the other one holds no number of a mask.
        """
        ordinary = [each is None or is_ordinary(self.shapes, each) for each in (of_heads, plain)]
        if ordinary[0] and not _has_heads(self.shapes.shape(mask.condition)):
            return of_heads, self._under(mask, plain)
        if ordinary[1]:
            return self._under(mask, of_heads), plain
        assert plain is not None
        return self._under(mask, self._add(of_heads, plain)), None

    def _under(self, mask: Mask, addend: Tensor | None) -> Tensor:
        """Return what is added to scores, or 0, with the number of a mask in its place where that does not hold."""
        stem = f"{self.end.name}_mask"
        if addend is None:
            addend = _constant(self.graph, f"{stem}_zero", 0.0, self.shapes.dtype(self.end))
        return self._where(mask, addend, stem)

    def _where(self, mask: Mask, value: Tensor, stem: str) -> Tensor:
        """Return a value, and the number of a mask where that does not hold."""
        dtype = self.shapes.dtype(self.end)
        number = _constant(self.graph, f"{stem}_number", mask.number, dtype)
        branches = [number, value] if mask.inverted else [value, number]
        shape = self._broadcast(mask.condition, value)
        return emit(self.graph, self.shapes, "Where", [mask.condition, *branches], stem, shape, dtype)

    def _add(self, a: Tensor | None, b: Tensor, stem: str = "", shape: Sequence[Size] | None = None) -> Tensor:
        if a is None:
            return b
        shape = self._broadcast(a, b) if shape is None else shape
        stem = stem or f"{self.end.name}_mask"
        return emit(self.graph, self.shapes, "Add", [a, b], stem, shape, self.shapes.dtype(a))

    def _broadcast(self, a: Tensor, b: Tensor) -> Sequence[Size] | None:
        first, second = self.shapes.shape(a), self.shapes.shape(b)
        return None if first is None or second is None else broadcast(self.shapes, first, second)


def _times(graph: Graph, shapes: ShapeInfo, tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor times a number; a choice of 0 and a number by a condition stays one."""
    if factor == 1:
        return tensor
    dtype, stem, node = shapes.dtype(tensor), f"{tensor.name}_scaled", producer(tensor)
    branches = node.inputs[1:] if node is not None and op_of(node) == "Where" else ()
    numbers = [constant_number(graph, branch) for branch in branches]
    if node is not None and numbers and None not in numbers:
        scaled = [_constant(graph, f"{stem}_number", x * factor, dtype) for x in numbers if x is not None]
        return emit(graph, shapes, "Where", [node.inputs[0], *scaled], stem, shapes.shape(tensor), dtype)
    number = _constant(graph, f"{stem}_factor", factor, dtype)
    return emit(graph, shapes, "Mul", [tensor, number], stem, shapes.shape(tensor), dtype)


def _constant(graph: Graph, stem: str, number: float, dtype: int) -> Tensor:
    limit = float(np.finfo(np.float32).max)
    rounded = number if abs(number) <= limit else math.copysign(math.inf, number)
    return graph.constant(stem, np.array(rounded, tensor_dtype_to_np_dtype(dtype)))
