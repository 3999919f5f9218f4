"""Write what happens to scores between a product and a Softmax in the order that patterns know.

Patterns know scores that are scaled at the product, then at most one bias, and one mask at the end.  Some models scale
the sum of a product and a mask, replace scores under one mask and then add another, or add three tensors, or replace a
bias of heads under a mask before they add it (Falcon).  Factors are distributed over sums, a mask that replaces scores
by a number which no score changes becomes one that is added, and what is added is summed up first, apart from tensors
with an axis for heads.  A factor of each head, as that of cosine attention, moves to the queries.  A Max of scores and
the lowest number behind a mask becomes one of the mask, and is left out where the mask is of finite numbers.  A causal
mask that replaces scores becomes one that is added, too, because kernels know by place what such a mask holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import numpy as np
from onnx import TensorProto
from onnx.helper import tensor_dtype_to_np_dtype

from onnxfuse.analysis.dims import Size
from onnxfuse.analysis.index_formulas import AtMostZero, causal_mask_value, negated
from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast
from onnxfuse.ir.attributes import tensor_attribute
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_number
from onnxfuse.ir.node import Node, Tensor, is_constant, op_of, producer
from onnxfuse.passes.emit import emit
from onnxfuse.patterns._attention import SWALLOWS_SCORES

FIRST_OPSET: Final = 9  # whose Where broadcasts
MAX_STEPS: Final = 12  # from the Softmax to the product
MAX_ADDENDS: Final = 2  # that a fused attention takes
HEADS_AXIS: Final = -3
QUERIES_AXIS: Final = -2
VIEWS: Final = frozenset({"Expand", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
INTEGERS: Final = frozenset({TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64})


@dataclass(frozen=True)
class Addend:
    """What is added to scores: a tensor times a number, or 0 where a condition holds, or fails, and else a number."""

    tensor: Tensor  # or the condition
    factor: float = 1.0
    masked_score: float | None = None  # of a condition
    inverted: bool = False  # a score counts where the condition is false


@dataclass(frozen=True)
class Scores:
    """Scores as a product times a number, and addends in order; `nodes` compute them from the product on."""

    product: Tensor
    factor: float = 1.0
    addends: tuple[Addend, ...] = ()
    nodes: tuple[Node, ...] = ()
    is_usual: bool = True  # patterns know the order as it is


def spell_scores(graph: Graph, shapes: ShapeInfo) -> int:
    """Rewrite scores in front of Softmax whose order patterns do not know.  Returns the number of rewritten scores."""
    if graph.opset < FIRST_OPSET:
        return 0
    softmaxes = [node for node in graph.nodes if op_of(node) == "Softmax"]
    analysis = cache(partial(IndexAnalysis, graph, shapes))  # few models need it
    count = sum(_rewrite(graph, shapes, analysis, node) for node in softmaxes)
    count += sum(_scale_queries(graph, shapes, node.inputs[0], MAX_STEPS) for node in softmaxes)
    if count:
        graph.remove_dead()
        graph.sort()
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
    if scores is None or len(scores.addends) == 0 or _product_behind(scores.product) is None:
        return False
    if scores.is_usual and not _is_replaced_behind_diagonal(shapes, analysis, scores):
        return False
    made = [node.outputs[0] for node in scores.nodes]
    if any(graph.sole_consumer(each) is None for each in made):
        return False
    end = tensor
    total = _times(graph, shapes, scores.product, scores.factor)
    for group in _grouped(shapes, scores.addends):
        written = [_written(graph, shapes, each, end) for each in group]
        addend = written[0]
        for other in written[1:]:
            addend = _add(graph, shapes, addend, other, f"{end.name}_mask", None)
        total = _add(graph, shapes, total, addend, f"{end.name}_masked", shapes.shape(end))
    softmax.inputs[0] = total
    return True


def _is_replaced_behind_diagonal(shapes: ShapeInfo, analysis: Callable[[], IndexAnalysis], scores: Scores) -> bool:
    """Return whether a causal mask replaces scores, which no other mask would have to be added to."""
    fills = [each for each in scores.addends if each.masked_score is not None]
    sizes = shapes.shape(scores.product)
    if len(fills) != 1 or sizes is None or any(len(group) > 1 for group in _grouped(shapes, scores.addends)):
        return False
    seen = causal_mask_value(*sizes[-2:])
    value, node = analysis().value(fills[0].tensor), producer(fills[0].tensor)
    if fills[0].inverted:
        return isinstance(seen, AtMostZero) and value is not None and negated(value) == seen
    joined = node.inputs if node is not None and op_of(node) == "And" else ()
    return isinstance(seen, AtMostZero) and seen in (value, *map(analysis().value, joined))


def _without_lowest(graph: Graph, shapes: ShapeInfo, scores: Tensor) -> Tensor | None:
    """Return scores without the Max with the lowest finite number, which is taken of what is added to them instead.

    That is the same for scores that a number below -1e30 swallows, and changes infinite ones.  A mask of finite numbers
    needs no Max.
    """
    node = producer(scores)
    if node is None or op_of(node) != "Max" or len(node.inputs) != 2 or shapes.dtype(scores) != TensorProto.FLOAT:
        return None
    for tensor, number in (node.inputs, node.inputs[::-1]):
        total = producer(tensor)
        if total is None or op_of(total) != "Add" or constant_number(graph, number) != float(np.finfo(np.float32).min):
            continue
        if any(_is_finite_mask(graph, shapes, each, MAX_STEPS) for each in total.inputs):
            return tensor
        for product, mask in (total.inputs, total.inputs[::-1]):
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
    return op_of(node) in VIEWS and finite(node.inputs[0])


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
            stem = f"{node.outputs[0].name}_queries"
            scaled = emit(graph, shapes, "Mul", [product.inputs[0], factor], stem, queries, dtype)
            return _multiply(graph, shapes, node, scaled, product.inputs[1])
    return False


def _is_number(tensor: Tensor) -> bool:
    return is_constant(tensor) and math.prod(tensor.shape) == 1


def _multiply(graph: Graph, shapes: ShapeInfo, scaled: Node, queries: Tensor, columns: Tensor) -> bool:
    end = scaled.outputs[0]
    product = emit(
        graph, shapes, "MatMul", [queries, columns], f"{end.name}_scores", shapes.shape(end), shapes.dtype(end)
    )
    return graph.replace(end, product)


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
        return Scores(scores.product, scores.factor, (*scores.addends, *both), (*scores.nodes, node), is_usual=False)
    addend = Addend(other, -1.0 if op_of(node) == "Sub" else 1.0)
    has_mask = any(each.masked_score is not None for each in scores.addends)
    usual = scores.is_usual and op_of(node) == "Add" and not has_mask and len(scores.addends) < MAX_ADDENDS
    return Scores(scores.product, scores.factor, (*scores.addends, addend), (*scores.nodes, node), usual)


def _masked_bias(graph: Graph, shapes: ShapeInfo, tensor: Tensor) -> tuple[Addend, Addend] | None:
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
        if _has_heads(shape) and shape[QUERIES_AXIS] == 1:
            return Addend(bias), Addend(condition, 1.0, number, inverted)
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
    if not scores.addends:
        return Scores(node.outputs[0])  # the product times a number
    factor = 1 / number if op_of(node) == "Div" else number
    addends = tuple(_scale(each, factor) for each in scores.addends)
    return Scores(scores.product, scores.factor * factor, addends, (*scores.nodes, node), is_usual=False)


def _scale(addend: Addend, factor: float) -> Addend:
    if addend.masked_score is not None:
        return Addend(addend.tensor, 1.0, addend.masked_score * factor, addend.inverted)
    return Addend(addend.tensor, addend.factor * factor)


def _masked(graph: Graph, shapes: ShapeInfo, node: Node, steps: int) -> Scores | None:
    """Return scores that a Where replaces by a number which no score changes when they are added."""
    condition, yes, no = node.inputs
    for branch, other, inverted in ((yes, no, False), (no, yes, True)):
        number = constant_number(graph, other)
        if number is None or not _swallows(number, shapes.dtype(other)):
            continue
        scores = _scores(graph, shapes, branch, steps - 1)
        if scores is None:
            continue
        addend = Addend(condition, 1.0, number, inverted)
        has_mask = any(each.masked_score is not None for each in scores.addends)
        usual = scores.is_usual and not has_mask and len(scores.addends) < MAX_ADDENDS
        return Scores(scores.product, scores.factor, (*scores.addends, addend), (*scores.nodes, node), usual)
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


def _grouped(shapes: ShapeInfo, addends: Sequence[Addend]) -> list[list[Addend]]:
    """Return the addends that are summed up before they are added to scores: those without heads, and the others."""
    if len(addends) <= 1:
        return [list(addends)]
    groups: dict[bool, list[Addend]] = {}
    for addend in addends:
        groups.setdefault(_has_heads(shapes.shape(addend.tensor)), []).append(addend)
    return [groups[key] for key in sorted(groups, reverse=True)]


def _has_heads(shape: Sequence[Size] | None) -> bool:
    return shape is None or (len(shape) >= -HEADS_AXIS and shape[HEADS_AXIS] != 1)


def _written(graph: Graph, shapes: ShapeInfo, addend: Addend, scores: Tensor) -> Tensor:
    """Return an addend as a tensor."""
    if addend.masked_score is None:
        return _times(graph, shapes, addend.tensor, addend.factor)
    dtype, stem = shapes.dtype(scores), f"{scores.name}_mask"
    keep = _constant(graph, f"{stem}_zero", 0.0, dtype)
    drop = _constant(graph, f"{stem}_number", addend.masked_score, dtype)
    branches = [drop, keep] if addend.inverted else [keep, drop]
    shape = shapes.shape(addend.tensor)
    return emit(graph, shapes, "Where", [addend.tensor, *branches], stem, shape, dtype)


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


def _add(graph: Graph, shapes: ShapeInfo, a: Tensor, b: Tensor, stem: str, shape: Sequence[Size] | None) -> Tensor:
    first, second = shapes.shape(a), shapes.shape(b)
    if shape is None and first is not None and second is not None:
        shape = broadcast(shapes, first, second)
    return emit(graph, shapes, "Add", [a, b], stem, shape, shapes.dtype(a))


def _constant(graph: Graph, stem: str, number: float, dtype: int) -> Tensor:
    limit = float(np.finfo(np.float32).max)
    rounded = number if abs(number) <= limit else math.copysign(math.inf, number)
    return graph.constant(stem, np.array(rounded, tensor_dtype_to_np_dtype(dtype)))
