"""The shapes of an operator's outputs, from its inputs' symbolic shapes: one rule per operator, in one table.

A rule gets what is known so far and a node.  It returns one shape, which then every output has, or a list with a shape
per output; a dimension or a shape that it cannot tell is None.  It raises `Undecided` where it can tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from onnxfuse.model.graph import Array, Node, attribute, op_of, producer
from onnxfuse.shapes.bounds import lower_bound, maximum, unclamped
from onnxfuse.shapes.dims import Size, product

if TYPE_CHECKING:
    from onnxfuse.shapes.inference import Shapes

Shape: TypeAlias = tuple[Size, ...]
Partial: TypeAlias = Sequence["Size | None"]
Rule: TypeAlias = Callable[["Shapes", Node], "tuple[Size | None, ...] | list[Partial | None]"]

SHAPE_RULES: dict[str, Rule] = {}


class Undecided(Exception):
    """What a rule needs is not known; no error."""


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Enter a rule for these operators."""

    def enter(function: Rule) -> Rule:
        SHAPE_RULES.update(dict.fromkeys(ops, function))
        return function

    return enter


def has(node: Node, place: int) -> bool:
    """Whether the node has an input there."""
    return place < len(node.inputs) and bool(node.inputs[place].name)


def shape_in(s: Shapes, node: Node, place: int = 0) -> Shape:
    """The shape of an input."""
    found = s.shape(node.inputs[place]) if has(node, place) else None
    if found is None:
        raise Undecided
    return found


def value_in(s: Shapes, node: Node, place: int = 0) -> Array:
    """The value of an input."""
    found = s.exact_value(node.inputs[place]) if has(node, place) else None
    if found is None:
        raise Undecided
    return found


def number(s: Shapes, node: Node, name: str) -> Any:
    """A parameter, be it an attribute, a constant or a computed input; None where it is absent."""
    found = attribute(s.graph, node, name)
    if hasattr(found, "inputs"):
        value = s.exact_value(found)
        if value is None:
            raise Undecided
        return value.tolist()
    return found


def numbers(s: Shapes, node: Node, name: str) -> list[Any] | None:
    """A parameter that is a list."""
    found = number(s, node, name)
    return found if found is None or isinstance(found, list) else [found]


def axes_in(s: Shapes, node: Node, rank: int, name: str = "axes") -> list[int] | None:
    """The axes that a node names, counted from the front; None where it names none."""
    found = numbers(s, node, name)
    return None if found is None else [axis_of(axis, rank) for axis in found]


def axis_of(axis: Any, rank: int) -> int:
    """An axis counted from the front."""
    if not isinstance(axis, int):
        raise Undecided
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tensor of rank {rank}")
    return axis % rank


def broadcast(s: Shapes, *shapes: Shape) -> Shape:
    """The shape that tensors of these shapes broadcast to."""
    rank = max(map(len, shapes))
    result: Shape = shapes[0]
    for shape in shapes[1:]:
        if shape != result:
            left, right = ((1,) * (rank - len(each)) + each for each in (result, shape))
            result = tuple(a if a == b else _broadcast_sizes(s, a, b) for a, b in zip(left, right, strict=True))
    return result


def _broadcast_sizes(s: Shapes, a: Size, b: Size) -> Size:
    if a == 1 or b == 1:
        return b if a == 1 else a
    for size in (a, b):  # two sizes that broadcast are equal, or one of them is 1
        low = lower_bound(size)
        if low is not None and low > 1:
            return size
    # A size that a slice limits to the length of a table broadcasts with the unlimited one only where it is equal or 1.
    if unclamped(b) == a or unclamped(a) == b:
        return a if unclamped(b) == a else b
    return s.unknown("broadcast", *sorted((str(a), str(b))))


@rule("Add", "Sub", "Mul", "Div", "Pow", "Mod", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual",
      "GreaterOrEqual", "Max", "Min", "Mean", "Sum", "Where", "PRelu", "BitShift", "BitwiseAnd", "BitwiseOr",
      "BitwiseXor", "com.microsoft::BiasGelu", "com.microsoft::BiasAdd")  # fmt: skip
def _elementwise(s: Shapes, n: Node) -> Shape:
    if s.graph.opset < 7 and n.attrs.get("broadcast"):
        return shape_in(s, n)
    return broadcast(s, *(shape_in(s, n, i) for i in range(len(n.inputs))))


@rule("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "Bernoulli", "BitwiseNot", "Cast",
      "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "CumSum", "DequantizeLinear", "Dropout", "Elu", "Erf", "Exp",
      "EyeLike", "Floor", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
      "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LeakyRelu", "Log", "LogSoftmax", "LpNormalization",
      "MeanVarianceNormalization", "Mish", "Neg", "Not", "QuantizeLinear", "RMSNormalization", "RandomNormalLike",
      "RandomUniformLike", "Reciprocal", "Relu", "RotaryEmbedding", "Round", "Scatter", "ScatterElements", "ScatterND",
      "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tan",
      "Tanh", "TensorScatter", "ThresholdedRelu", "Trilu", "com.microsoft::FastGelu", "com.microsoft::Gelu",
      "com.microsoft::QuickGelu", "com.microsoft::RotaryEmbedding", "com.microsoft::GroupNorm",
      "SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization", "com.microsoft::BiasSoftmax",
      "com.microsoft::QuantizeLinear", "com.microsoft::DequantizeLinear")  # fmt: skip
def _same(s: Shapes, n: Node) -> list[Partial | None]:
    first = shape_in(s, n)
    if op_of(n) == "BatchNormalization":
        return [first, *([first[1:2]] * 4)]
    return [first] * len(n.outputs)


@rule("LayerNormalization")
def _layer_normalization(s: Shapes, n: Node) -> list[Partial | None]:
    shape = shape_in(s, n)
    axis = axis_of(n.attrs.get("axis", -1), len(shape))
    statistic = (*shape[:axis], *([1] * (len(shape) - axis)))
    return [shape, statistic, statistic]


@rule("com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization")
def _skip_layer_normalization(s: Shapes, n: Node) -> list[Partial | None]:
    shape = shape_in(s, n)
    return [shape, (*shape[:-1], 1), (*shape[:-1], 1), shape]


@rule("DynamicQuantizeLinear")
def _dynamic_quantize(s: Shapes, n: Node) -> list[Partial | None]:
    return [shape_in(s, n), (), ()]


@rule("Shape")
def _shape(s: Shapes, n: Node) -> Shape:
    rank = len(shape_in(s, n))
    return (len(range(rank)[slice(n.attrs.get("start", 0), n.attrs.get("end"))]),)


@rule("Size")
def _scalar(s: Shapes, n: Node) -> Shape:
    return ()


@rule("Constant")
def _constant(s: Shapes, n: Node) -> Shape:
    if "value" in n.attrs:
        return tuple(n.attrs["value"].shape)
    (value,) = n.attrs.values()
    return (len(value),) if isinstance(value, list) else ()


@rule("ConstantOfShape", "Expand", "Tile", "Range", "RandomNormal", "RandomUniform")
def _made(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    op = op_of(n)
    if op == "Range":
        return (range_length(*(value_in(s, n, i).item() for i in range(3))),)
    if op.startswith("Random"):
        return tuple(n.attrs["shape"])
    if op == "Tile" and s.graph.opset < 6:
        raise Undecided
    place = 0 if op == "ConstantOfShape" else 1
    try:
        sizes = tuple(value_in(s, n, place).tolist())
    except Undecided:
        return rank_only(s, n, place)
    if op == "Expand":
        return broadcast(s, shape_in(s, n), sizes)
    return tuple(a * b for a, b in zip(shape_in(s, n), sizes, strict=True)) if op == "Tile" else sizes


def rank_only(s: Shapes, n: Node, place: int) -> tuple[Size | None, ...]:
    """The result where the input that gives its shape has a known length, but no known value."""
    (rank,) = shape_in(s, n, place)
    if not isinstance(rank, int):
        raise Undecided
    if op_of(n) == "Expand":
        rank = max(rank, len(shape_in(s, n)))
    return (None,) * rank


def range_length(start: Size, limit: Size, delta: Size) -> Size:
    """How many numbers `Range` gives."""
    if not isinstance(delta, int) or delta == 0:
        raise Undecided
    span = (limit - start) * (1 if delta > 0 else -1)
    return maximum(0, (span + abs(delta) - 1) // abs(delta))


@rule("MatMul", "MatMulInteger", "QLinearMatMul", "com.microsoft::FusedMatMul", "com.microsoft::DynamicQuantizeMatMul",
      "com.microsoft::MatMulIntegerToFloat", "com.microsoft::TransposeMatMul")  # fmt: skip
def _matmul(s: Shapes, n: Node) -> Shape:
    a, b = shape_in(s, n), shape_in(s, n, 3 if op_of(n) == "QLinearMatMul" else 1)
    a = (*a[:-2], a[-1], a[-2]) if n.attrs.get("transA") else a
    b = (*b[:-2], b[-1], b[-2]) if n.attrs.get("transB") else b
    return (*broadcast(s, a[:-2], b[:-2]), *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


@rule("Gemm", "com.microsoft::FusedGemm")
def _gemm(s: Shapes, n: Node) -> Shape:
    a, b = shape_in(s, n), shape_in(s, n, 1)
    return (a[1 if n.attrs.get("transA") else 0], b[0 if n.attrs.get("transB") else 1])


@rule("Einsum")
def _einsum(s: Shapes, n: Node) -> Shape:
    left, arrow, right = n.attrs["equation"].replace(" ", "").partition("->")
    if not arrow or "." in left:
        raise Undecided
    sizes: dict[str, Size] = {}
    for place, letters in enumerate(left.split(",")):
        for letter, size in zip(letters, shape_in(s, n, place), strict=True):
            sizes[letter] = _broadcast_sizes(s, sizes[letter], size) if sizes.get(letter, size) != size else size
    return tuple(sizes[letter] for letter in right)


@rule("NonZero")
def _non_zero(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    shape = shape_in(s, n)
    maker = producer(n.inputs[0])
    whole = False
    if maker is not None and op_of(maker) == "ConstantOfShape" and "value" in maker.attrs:
        whole = bool(maker.attrs["value"].values.all())
    return (len(shape), product(shape) if whole else None)


@rule("OneHot")
def _one_hot(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    shape: list[Size | None] = list(shape_in(s, n))
    axis = axis_of(n.attrs.get("axis", -1), len(shape) + 1)
    depth = s.exact_value(n.inputs[1])
    shape.insert(axis, None if depth is None else depth.reshape(-1)[0])
    return tuple(shape)


@rule("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
      "ReduceSum", "ReduceSumSquare")  # fmt: skip
def _reduce(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    shape = shape_in(s, n)
    try:
        axes = axes_in(s, n, len(shape))
    except Undecided:
        if n.attrs.get("keepdims", 1):
            return (None,) * len(shape)
        raise
    if not axes:
        axes = [] if n.attrs.get("noop_with_empty_axes") else list(range(len(shape)))
    return _reduced(shape, axes, n)


@rule("ArgMax", "ArgMin")
def _arg_reduce(s: Shapes, n: Node) -> Shape:
    shape = shape_in(s, n)
    return _reduced(shape, [axis_of(n.attrs.get("axis", 0), len(shape))], n)


def _reduced(shape: Shape, axes: list[int], n: Node) -> Shape:
    if n.attrs.get("keepdims", 1):
        return tuple(1 if i in axes else size for i, size in enumerate(shape))
    return tuple(size for i, size in enumerate(shape) if i not in axes)


@rule("TopK")
def _top_k(s: Shapes, n: Node) -> tuple[Size | None, ...]:
    shape: list[Size | None] = list(shape_in(s, n))
    try:
        k = numbers(s, n, "k" if "k" in n.attrs else "K")
    except Undecided:
        k = None
    shape[axis_of(n.attrs.get("axis", -1), len(shape))] = k[0] if k else None
    return tuple(shape)
