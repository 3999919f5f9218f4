"""Shape rules of elementwise operators, with or without broadcasting, and of norms."""

from __future__ import annotations

from onnxfuse.algebra.bounds import limited_sizes, lower_bound, without_min_constants
from onnxfuse.algebra.sizes import Shape, Size, divisor
from onnxfuse.analysis.rules import RuleTable, ShapeRule, input_shape, normalize_axis, operands_of
from onnxfuse.analysis.shape_info import PartialShape, ShapeInfo
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.node import Node, op_of

RULES = RuleTable[ShapeRule]()
# Norms whose second input has one element per channel (for GroupNormalization before opset 21: one per group).
OF_CHANNELS = frozenset({"BatchNormalization", "GroupNormalization", "InstanceNormalization"})


def broadcast(shapes: ShapeInfo, *operands: Shape) -> Shape:
    """Return the broadcast shape of tensors with these shapes."""
    rank = max(map(len, operands))
    result: Shape = operands[0]
    for shape in operands[1:]:
        if shape != result:
            left, right = ((1,) * (rank - len(each)) + each for each in (result, shape))
            pairs = zip(left, right, strict=True)
            result = tuple(a if a == b else broadcast_sizes(shapes, a, b) for a, b in pairs)
    return result


def broadcast_sizes(shapes: ShapeInfo, a: Size, b: Size) -> Size:
    """Return the size that two sizes broadcast to; an unknown size if it is not known which of them is 1."""
    if a == 1 or b == 1:
        return b if a == 1 else a
    large = [size for size in (a, b) if (lower_bound(size) or 0) > 1 or divisor(size) > 1]  # sizes that cannot be 1
    if len(large) == 2:
        shapes.require(a, b)
        shapes.require(b, a)
    if large:  # sizes that broadcast are equal, or one of them is 1
        return large[0]
    # `Min(512, seq)` is a number of rows sliced from a table.  If it broadcasts with `seq`, it equals `seq` or is 1.
    for limited, size in ((b, a), (a, b)):
        if without_min_constants(limited) == size:
            shapes.not_limited.update(limited_sizes(limited, least=2))
            return size
    return shapes.broadcast(a, b)


@RULES.rule(
    "Add", "Sub", "Mul", "Div", "Pow", "Mod", "And", "Or", "Xor", "Equal", "Less", "Greater", "LessOrEqual",
    "GreaterOrEqual", "Max", "Min", "Mean", "Sum", "Where", "PRelu", "BitShift", "BitwiseAnd", "BitwiseOr",
    "BitwiseXor", "com.microsoft::BiasGelu", "com.microsoft::BiasAdd", "com.microsoft::QLinearAdd",
    "com.microsoft::QLinearMul", "com.microsoft::QLinearWhere",
)  # fmt: skip
def _broadcasting(shapes: ShapeInfo, node: Node) -> Shape:
    if shapes.graph.opset < 7 and int_attribute(node, "broadcast", 0):
        return input_shape(shapes, node)
    return broadcast(shapes, *(input_shape(shapes, node, i) for i in operands_of(node) or (0,)))


@RULES.rule(
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "Bernoulli", "BitwiseNot", "Cast",
    "CastLike", "Ceil", "Celu", "Clip", "Cos", "Cosh", "CumSum", "DequantizeLinear", "Dropout", "Elu", "Erf", "Exp",
    "EyeLike", "Floor", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax", "Identity",
    "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LeakyRelu", "Log", "LogSoftmax", "LpNormalization",
    "MeanVarianceNormalization", "Mish", "Neg", "Not", "QuantizeLinear", "RMSNormalization", "RandomNormalLike",
    "RandomUniformLike", "Reciprocal", "Relu", "RotaryEmbedding", "Round", "Scatter", "ScatterElements", "ScatterND",
    "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Swish", "Tan",
    "Tanh", "TensorScatter", "ThresholdedRelu", "Trilu", "com.microsoft::FastGelu", "com.microsoft::Gelu",
    "com.microsoft::QuickGelu", "com.microsoft::RotaryEmbedding", "com.microsoft::GroupNorm",
    "com.microsoft::SkipGroupNorm", "com.microsoft::MoE", "com.microsoft::QMoE",
    "SimplifiedLayerNormalization", "com.microsoft::SimplifiedLayerNormalization", "com.microsoft::BiasSoftmax",
    "com.microsoft::QuantizeLinear", "com.microsoft::DequantizeLinear", "com.microsoft::QLinearSigmoid",
    "com.microsoft::QLinearLeakyRelu", "com.microsoft::QLinearSoftmax",
    # Operators that onnxruntime registers in the ONNX domain: ONNX removed some of them before opset 9, and the others
    # are used by onnxruntime's own fusions.
    "Affine", "ImageScaler", "ParametricSoftplus", "Scale", "ScaledTanh",
)  # fmt: skip
def _same_as_first_input(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    first = input_shape(shapes, node)
    op = op_of(node)
    if op in OF_CHANNELS and not (op == "GroupNormalization" and shapes.graph.opset < 21) and len(first) > 1:
        shapes.require(first[1], input_shape(shapes, node, 1)[0])
    if op == "BatchNormalization":
        return [first, *([first[1:2]] * 4)]
    return [first] * len(node.outputs)


@RULES.rule("LayerNormalization")
def _layer_normalization(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    shape = input_shape(shapes, node)
    axis = normalize_axis(int_attribute(node, "axis", -1), len(shape))
    statistic = (*shape[:axis], *([1] * (len(shape) - axis)))
    return [shape, statistic, statistic]


@RULES.rule(
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "com.microsoft::SkipLayerNormalization",
    "com.microsoft::SkipSimplifiedLayerNormalization",
)  # fmt: skip
def _skip_layer_normalization(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    shape = input_shape(shapes, node)
    return [shape, (*shape[:-1], 1), (*shape[:-1], 1), shape]


@RULES.rule("com.microsoft::BiasSplitGelu")
def _half_of_last_axis(shapes: ShapeInfo, node: Node) -> Shape:
    shape = input_shape(shapes, node)
    return (*shape[:-1], shape[-1] // 2)


@RULES.rule("com.microsoft::EmbedLayerNormalization")
def _embed_layer_normalization(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    ids, table = input_shape(shapes, node, 0, 2), input_shape(shapes, node, 2, 2)
    rows = (*ids, table[-1])
    return [rows, ids[:1], rows]


@RULES.rule("DynamicQuantizeLinear")
def _dynamic_quantize(shapes: ShapeInfo, node: Node) -> list[PartialShape | None]:
    return [input_shape(shapes, node), (), ()]
