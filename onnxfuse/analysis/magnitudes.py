"""How large the elements of a tensor may be, so that it can or cannot hold the numbers of a mask, such as -3.4e38."""

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

MASKS_FROM: Final = 1e30  # magnitudes of masks: added to one, a score vanishes
# What sums of products are taken to stay below, as everything here takes scores to be nothing beside a mask.
LARGEST_OF_PRODUCTS: Final = 1e12
LARGEST_FLOAT32: Final = float(np.finfo(np.float32).max)
MAX_DEPTH: Final = 24  # nodes between a tensor and those that it is computed from
MAX_ELEMENTS: Final = 2**24  # elements of a constant that is read

KEEPING: Final = frozenset({"Abs", "Cast", "Max", "Min", "Neg", "ReduceMax", "ReduceMean", "ReduceMin", "Relu"})
SUMS: Final = frozenset({"Add", "Sub", "Sum"})
AT_MOST_ONE: Final = frozenset({"Cos", "Erf", "HardSigmoid", "Sigmoid", "Sign", "Sin", "Softmax", "Tanh"})
NORMALIZED: Final = PRODUCTS | {"LayerNormalization"}


def is_ordinary(shapes: ShapeInfo, *tensors: Tensor) -> bool:
    """Return whether the product of tensors cannot hold a number as masks have it, so that it vanishes beside one.

    What is computed by products counts as ordinary, as scores do.  A floating-point input of the graph may hold a mask.
    """
    bounds = Bounds(shapes)
    return math.prod(max(1.0, bounds.of(each)) for each in tensors) < MASKS_FROM


def is_bounded(shapes: ShapeInfo, tensor: Tensor) -> bool:
    """Return whether no element of a float32 tensor is infinite or NaN, where products are taken to be finite."""
    return Bounds(shapes).of(tensor) <= LARGEST_FLOAT32


def holds_zero_or_one(shapes: ShapeInfo, tensor: Tensor, steps: int = MAX_DEPTH) -> bool:
    """Return whether each element of a tensor is 0 or 1: stored ones, and those that a Cast makes of booleans."""
    if is_constant(tensor):
        if math.prod(tensor.shape) > MAX_ELEMENTS:
            return False
        try:
            values = constant_value(shapes.graph, tensor)
        except ModelError:  # the file with its data cannot be read
            return False
        return values.dtype.kind in "fiu" and bool(np.all((values == 0) | (values == 1)))
    node = producer(tensor)
    if node is None or not steps:
        return False
    if op_of(node) == "Cast" and shapes.dtype(node.inputs[0]) == TensorProto.BOOL:
        return True
    return op_of(node) in SELECTING | {"Cast", "Trilu"} and holds_zero_or_one(shapes, node.inputs[0], steps - 1)


class Bounds:
    """Bounds of the magnitudes of tensors, of those that were asked for; they hold while the graph stays as it is."""

    def __init__(self, shapes: ShapeInfo) -> None:
        self._shapes = shapes
        self._known: dict[str, float] = {}
        self._depth = 0

    def of(self, tensor: Tensor) -> float:
        """Return a bound of the magnitudes of a tensor's elements; infinity where none is known."""
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
        """Return the bound of a Mul; 0 times infinity is unknown."""
        first, second = map(self.of, node.inputs)
        return math.inf if math.inf in (first, second) else first * second

    def of_quotient(self, node: Node) -> float:
        """Return the bound of a Div by a constant."""
        divisor = node.inputs[1]
        if not is_constant(divisor) or not 0 < math.prod(divisor.shape) <= MAX_ELEMENTS:
            return math.inf
        smallest = float(np.abs(constant_value(self._shapes.graph, divisor).astype(np.float64)).min())
        return self.of(node.inputs[0]) / smallest if smallest > 0 else math.inf

    def of_choice(self, node: Node) -> float:
        """Return the bound of a Where."""
        return max(map(self.of, node.inputs[1:]))

    def of_fill(self, node: Node) -> float:
        """Return the bound of a ConstantOfShape."""
        value = tensor_attribute(node, "value")
        return 0.0 if value is None else self._of_constant(value)


_RULES: Final[dict[str, Callable[[Bounds, Node], float]]] = {
    "ConstantOfShape": Bounds.of_fill, "Div": Bounds.of_quotient, "Mul": Bounds.of_product,
    "Where": Bounds.of_choice,
}  # fmt: skip
