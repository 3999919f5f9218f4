"""What the matcher reads off a graph besides its operators: constant numbers, and Casts between floating dtypes."""

from __future__ import annotations

import math

from onnx import TensorProto

from onnxfuse.language.terms import Capture, Term
from onnxfuse.match.state import FLOATS, State
from onnxfuse.model.graph import Graph, Node, Tensor, constant_value, is_constant, op_of, producer
from onnxfuse.shapes.inference import Shapes

# By how much a constant may differ from the pattern's number, by the dtype that it is stored in: one rounding.
TOLERANCE: dict[int, float] = {TensorProto.FLOAT16: 2e-3, TensorProto.BFLOAT16: 1e-2}


class Reader:
    """Reads a graph for a fusion that absorbs Casts, or does not."""

    def __init__(self, graph: Graph, shapes: Shapes, casts: bool) -> None:
        self.graph, self.shapes, self.casts = graph, shapes, casts
        self._numbers: dict[str, float | None] = {}

    # --- constants ----------------------------------------------------------------------------------------------------

    def number(self, tensor: Tensor) -> float | None:
        """The value of a constant of one element."""
        if not is_constant(tensor):
            return None
        if tensor.name not in self._numbers:
            self._numbers[tensor.name] = self._read_number(tensor)
        return self._numbers[tensor.name]

    def _read_number(self, tensor: Tensor) -> float | None:
        if math.prod(tensor.shape) != 1:
            return None
        value = constant_value(self.graph, tensor)
        return float(value.reshape(())) if value.dtype != object else None

    def widening(self, node: Node) -> Tensor | None:
        """The constant of one element that has more axes than all that it meets, and so gives the result more."""
        numbers = [t for t in node.inputs if is_constant(t) and t.shape and math.prod(t.shape) == 1]
        if not numbers:
            return None
        widest = max(numbers, key=lambda t: len(t.shape))
        ranks = [self.shapes.rank(t) for t in node.inputs if t.name and self.number(t) is None]
        most = max((1 if rank is None else rank for rank in ranks), default=len(widest.shape))
        return widest if len(widest.shape) > most else None

    def close(self, found: float, required: float, tensor: Tensor) -> bool:
        """Whether a stored constant is the required number, rounded to the dtype it is stored in."""
        tolerance = TOLERANCE.get(self.shapes.dtype(tensor), 2e-5)
        return found == required or math.isclose(found, required, rel_tol=tolerance)

    # --- casts ---------------------------------------------------------------------------------------------------

    def float_cast(self, tensor: Tensor) -> Node | None:
        """The Cast between floating dtypes that computes a tensor; None where another operator does."""
        node = producer(tensor)
        if node is None or op_of(node) != "Cast":
            return None
        return node if {self.shapes.dtype(tensor), self.shapes.dtype(node.inputs[0])} <= FLOATS.keys() else None

    def widens(self, node: Node) -> bool:
        """Whether a Cast is to float32."""
        return self.shapes.dtype(node.outputs[0]) == TensorProto.FLOAT

    def through_casts(self, tensor: Tensor, state: State) -> tuple[Tensor, State]:
        """What is under the Casts on a tensor, where the fusion absorbs them."""
        nodes = []
        while self.casts and (node := self.float_cast(tensor)):
            nodes.append(node)
            tensor = node.inputs[0]
        return tensor, state.with_nodes(nodes)

    def stem(self, tensor: Tensor, term: Term) -> Tensor:
        """What a value is, Casts aside."""
        while self.casts and (node := self.float_cast(tensor)):
            if isinstance(term, Capture) and not self.widens(node):
                break
            tensor = node.inputs[0]
        return tensor
