"""Upper bounds of the magnitudes in a tensor, to tell whether it can hold a mask's large number, such as -3.4e38."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from onnx import TensorProto

from onnxfuse.algebra.operators import PRODUCTS, SELECTING
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import tensor_attribute
from onnxfuse.ir.dtypes import INTEGER_RANGES
from onnxfuse.ir.graph import constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer

MASKS_FROM: Final = 1e30  # numbers of at least this magnitude count as masks: a score vanishes if they are added to it
# Assumed bound of the results of matrix products and norms.  Rewrites of attention rely on it: a score within this
# bound vanishes when a mask's number is added.
LARGEST_OF_PRODUCTS: Final = 1e12
LARGEST_FLOAT32: Final = float(np.finfo(np.float32).max)
MAX_DEPTH: Final = 24  # maximum number of nodes followed back from a tensor
MAX_ELEMENTS: Final = 2**24  # larger constants are not read

KEEPING: Final = frozenset({"Abs", "Cast", "Max", "Min", "Neg", "ReduceMax", "ReduceMean", "ReduceMin", "Relu"})
SUMS: Final = frozenset({"Add", "Sub", "Sum"})
AT_MOST_ONE: Final = frozenset({"Cos", "Erf", "HardSigmoid", "Sigmoid", "Sign", "Sin", "Tanh"})
NORMALIZED: Final = PRODUCTS | {"LayerNormalization"}


def is_ordinary(shapes: ShapeInfo, *tensors: Tensor) -> bool:
    """Return whether the product of tensors stays so small that it vanishes when a mask's large number is added.

    Results of matrix products, such as scores, count as small.  A floating-point input of the graph does not count as
    small, because it may hold a mask.
    """
    bounds = Bounds(shapes)
    return math.prod(max(1.0, bounds.of(each)) for each in tensors) < MASKS_FROM


def is_bounded(shapes: ShapeInfo, tensor: Tensor) -> bool:
    """Return whether no element of a float32 tensor is infinite or NaN, assuming that matrix products are finite."""
    return Bounds(shapes).of(tensor) <= LARGEST_FLOAT32


def holds_zero_or_one(shapes: ShapeInfo, tensor: Tensor, steps: int = MAX_DEPTH) -> bool:
    """Return whether each element of a tensor is 0 or 1: a constant of such numbers, or a Cast of booleans."""
    if is_constant(tensor):
        if math.prod(tensor.shape) > MAX_ELEMENTS:
            return False
        try:
            values = constant_value(shapes.graph, tensor)
        except ModelError:  # the file with the constant's data cannot be read
            return False
        return values.dtype.kind in "fiu" and bool(np.all((values == 0) | (values == 1)))
    node = producer(tensor)
    if node is None or not steps:
        return False
    if op_of(node) == "Cast" and shapes.dtype(node.inputs[0]) == TensorProto.BOOL:
        return True
    return op_of(node) in SELECTING | {"Cast", "Trilu"} and holds_zero_or_one(shapes, node.inputs[0], steps - 1)


class Bounds:
    """Bounds of the magnitudes of tensors, computed on demand and cached; valid while the graph does not change."""

    def __init__(self, shapes: ShapeInfo) -> None:
        self._shapes = shapes
        self._known: dict[str, float] = {}
        self._depth = 0

    def of(self, tensor: Tensor) -> float:
        """Return an upper bound of the magnitudes of a tensor's elements; infinity if no bound is known."""
        found = self._known.get(tensor.name)
        if found is None and self._depth < MAX_DEPTH:
            self._depth += 1
            found = self._known[tensor.name] = self._found(tensor)
            self._depth -= 1
        return math.inf if found is None else found

    def _found(self, tensor: Tensor) -> float:
        if is_constant(tensor):
            return self._of_constant(tensor)
        limits = INTEGER_RANGES.get(self._shapes.dtype(tensor))
        if limits is not None:
            return float(max(map(abs, limits)))
        node = producer(tensor)
        return math.inf if node is None else self._of_result(node)

    def _of_constant(self, tensor: Constant) -> float:
        if not 0 < math.prod(tensor.shape) <= MAX_ELEMENTS:
            return math.inf if math.prod(tensor.shape) else 0.0
        value = constant_value(self._shapes.graph, tensor)
        if value.dtype.kind in "OUSc":
            return math.inf
        largest = float(np.abs(value.astype(np.float64)).max())
        return math.inf if math.isnan(largest) else largest

    def _of_result(self, node: Node) -> float:
        op = op_of(node)
        if op in AT_MOST_ONE:
            return 1.0
        if op in NORMALIZED:
            return LARGEST_OF_PRODUCTS
        if op in SELECTING:
            return self.of(node.inputs[0])
        if op == "Concat":
            return max(map(self.of, node.inputs))
        if op in KEEPING:
            return max(map(self.of, node.inputs[:1] if op.startswith("Reduce") else node.inputs))
        if op in SUMS:
            return sum(map(self.of, node.inputs))
        rule = _RULES.get(op)
        return math.inf if rule is None else rule(self, node)

    def of_product(self, node: Node) -> float:
        """Return the bound of a Mul's result; infinity if one factor has no bound, even if the other factor is 0."""
        first, second = map(self.of, node.inputs)
        return math.inf if math.inf in (first, second) else first * second

    def of_quotient(self, node: Node) -> float:
        """Return the bound of the result of a Div by a constant."""
        divisor = node.inputs[1]
        if not is_constant(divisor) or not 0 < math.prod(divisor.shape) <= MAX_ELEMENTS:
            return math.inf
        smallest = float(np.abs(constant_value(self._shapes.graph, divisor).astype(np.float64)).min())
        return self.of(node.inputs[0]) / smallest if smallest > 0 else math.inf

    def of_softmax(self, node: Node) -> float:
        """Return the bound of a Softmax's result; infinity if a row may be all -inf, because it then becomes NaN."""
        return 1.0 if self.of(node.inputs[0]) < math.inf else math.inf

    def of_choice(self, node: Node) -> float:
        """Return the bound of a Where's result."""
        return max(map(self.of, node.inputs[1:]))

    def of_fill(self, node: Node) -> float:
        """Return the bound of a ConstantOfShape's result."""
        value = tensor_attribute(node, "value")
        return 0.0 if value is None else self._of_constant(value)


_RULES: Final[dict[str, Callable[[Bounds, Node], float]]] = {
    "ConstantOfShape": Bounds.of_fill, "Div": Bounds.of_quotient, "Mul": Bounds.of_product,
    "Softmax": Bounds.of_softmax, "Where": Bounds.of_choice,
}  # fmt: skip
