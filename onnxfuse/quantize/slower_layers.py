"""Find products and convolutions that are estimated to take longer in 8 bits than in float16, on an H200.

A time is the sum of a launch's, its results', its multiplications' and its operands'.  The constants are fitted to
benchmarks/results/eight_bits-h200-2026-11-30.json, eight_bits_products and float8: the first plans of convolutions and
of products, with bias, Relu and, for 8 bits, a quantizer.  Estimates are off by 13 to 18 % in the geometric mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onnxfuse.analysis.related_sizes import at_sizes
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.analysis.tensor_bytes import assumed_number
from onnxfuse.ir.attributes import int_attribute
from onnxfuse.ir.node import Node, Tensor

LAUNCH: Final = 3.0  # microseconds of a launch in a CUDA graph
# Layers that take at most this many times as long in 8 bits as in float16 are quantized: a float layer among layers of
# 8 bits would write its results twice, for those that read integers and for a residual.
MARGIN: Final = 1.2
ROW_MULTIPLE: Final = 16  # TMA reads rows of 8-bit numbers whose lengths are multiples of this number
GROUPS: Final = "float16 is faster, because no kernel multiplies groups of 8-bit numbers"
CHANNELS: Final = f"float16 is faster, because {ROW_MULTIPLE} does not divide its input channels"
FEW_PRODUCTS: Final = "float16 is estimated to be faster, because each result sums few products"


@dataclass(frozen=True)
class Times:
    """The microseconds that kernels of a dtype take per million results, billion products and million operands."""

    results: float
    multiplications: float
    operands: float

    def of(self, results: int, terms: int, operands: int) -> float:
        """Return the microseconds for so many results and operands, where each result sums `terms` products."""
        multiplied = self.multiplications * terms / 1e3
        return LAUNCH + (results * (self.results + multiplied) + operands * self.operands) / 1e6


TIMES: Final[Mapping[str, Times]] = {
    "int8": Times(0.43, 1.5, 0.09),
    "float8": Times(0.77, 1.58, 0.14),
    "float16": Times(0.27, 2.7, 0.24),
}


@dataclass(frozen=True)
class SlowerLayers:
    """The Convs, Gemms and MatMuls of a graph that are estimated to be slower in `dtype`, int8 or float8.

    `sizes` are the shapes of the graph's inputs by name; other dynamic dims have assumed sizes.
    """

    shapes: ShapeInfo
    dtype: str
    sizes: Mapping[str, Sequence[int]]

    def why(self, node: Node) -> str | None:
        """Return why a node that reads a constant weight is estimated to be slower than in float16; None if not."""
        if int_attribute(node, "group", 1) > 1:
            return GROUPS
        with at_sizes(self.shapes, self.sizes):
            (x, w), (y,) = (list(map(self._sizes, each)) for each in (node.inputs[:2], node.outputs))
        if not (x and y):  # the rank of x or y is not known
            return None
        columns = w[0] if node.op == "Conv" else y[-1]
        terms = math.prod(w) // max(columns, 1)
        channels = w[1] if node.op == "Conv" else terms
        if channels % ROW_MULTIPLE:
            return CHANNELS
        problem = math.prod(y), terms, math.prod(x) + math.prod(w)
        if TIMES[self.dtype].of(*problem) <= MARGIN * TIMES["float16"].of(*problem):
            return None
        return FEW_PRODUCTS

    def _sizes(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(assumed_number(self.shapes, size) for size in self.shapes.shape(tensor) or ())
