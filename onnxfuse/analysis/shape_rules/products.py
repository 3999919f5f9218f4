"""Shape rules of matrix products."""

from __future__ import annotations

from onnxfuse.algebra.sizes import Shape, Size
from onnxfuse.analysis.rules import RuleTable, ShapeRule, input_shape, operands_of, required
from onnxfuse.analysis.shape_info import CannotInfer, ShapeInfo
from onnxfuse.analysis.shape_rules.elementwise import broadcast, broadcast_sizes
from onnxfuse.ir.attributes import int_attribute, str_attribute
from onnxfuse.ir.node import Node

RULES = RuleTable[ShapeRule]()
TRANSPOSED = frozenset({"transA", "transB", "transBatchA", "transBatchB"})


def require_equal(shapes: ShapeInfo, a: Size, b: Size) -> None:
    """Record that a product runs only if these two sizes are equal."""
    shapes.require(a, b)
    shapes.require(b, a)


@RULES.rule(
    "MatMul", "MatMulInteger", "QLinearMatMul", "com.microsoft::FusedMatMul", "com.microsoft::DynamicQuantizeMatMul",
    "com.microsoft::MatMulIntegerToFloat", "com.microsoft::TransposeMatMul", "com.microsoft::GemmFastGelu",
)  # fmt: skip
def _matmul(shapes: ShapeInfo, node: Node) -> Shape:
    a, b = (input_shape(shapes, node, i) for i in operands_of(node)[:2])
    if min(len(a), len(b)) < (2 if TRANSPOSED & node.attrs.keys() else 1):
        raise CannotInfer
    if int_attribute(node, "transBatchA", 0):  # the first axis moves to just before the last one
        a = (*a[1:-1], a[0], a[-1])
    if int_attribute(node, "transBatchB", 0):
        b = (*b[1:-1], b[0], b[-1])
    a = (*a[:-2], a[-1], a[-2]) if int_attribute(node, "transA", 0) else a
    b = (*b[:-2], b[-1], b[-2]) if int_attribute(node, "transB", 0) else b
    require_equal(shapes, a[-1], b[-2] if len(b) > 1 else b[0])
    return (*broadcast(shapes, a[:-2], b[:-2]), *a[-2:-1], *(b[-1:] if len(b) > 1 else ()))


@RULES.rule("com.microsoft::MatMulNBits", "com.microsoft::MatMulBnb4")
def _matmul_of_packed_weight(shapes: ShapeInfo, node: Node) -> Shape:
    x, n, k = input_shape(shapes, node), *(required(int_attribute(node, name, 0) or None) for name in ("N", "K"))
    require_equal(shapes, x[-1], k)
    return (*x[:-1], n)


@RULES.rule("Gemm", "com.microsoft::FusedGemm", "com.microsoft::QGemm")
def _gemm(shapes: ShapeInfo, node: Node) -> Shape:
    (m, a), (b, n) = (input_shape(shapes, node, i, 2) for i in operands_of(node)[:2])
    m, a = (a, m) if int_attribute(node, "transA", 0) else (m, a)
    b, n = (n, b) if int_attribute(node, "transB", 0) else (b, n)
    require_equal(shapes, a, b)
    return (m, n)


@RULES.rule("Einsum")
def _einsum(shapes: ShapeInfo, node: Node) -> Shape:
    left, arrow, right = required(str_attribute(node, "equation")).replace(" ", "").partition("->")
    if not arrow or "." in left:
        raise CannotInfer
    sizes: dict[str, Size] = {}
    for i, letters in enumerate(left.split(",")):
        for letter, size in zip(letters, input_shape(shapes, node, i), strict=True):
            is_new = sizes.get(letter, size) == size
            sizes[letter] = size if is_new else broadcast_sizes(shapes, sizes[letter], size)
    return tuple(sizes[letter] for letter in right)
