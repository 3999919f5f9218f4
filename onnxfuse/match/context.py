"""The context of matching rules: the graph's constant numbers and Casts, and the matching of inner terms."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

from onnx import TensorProto

from onnxfuse.analysis.mask_values import IndexAnalysis
from onnxfuse.analysis.shape_info import ShapeInfo
from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import Capture, Term
from onnxfuse.ir.dtypes import FUSIBLE_FLOATS
from onnxfuse.ir.graph import Graph, constant_value
from onnxfuse.ir.node import Constant, Node, Tensor, is_constant, op_of, producer
from onnxfuse.match.diagnostics import NearestMiss, number_text
from onnxfuse.match.prefilter import Prefilter
from onnxfuse.match.state import CapturedValue, State

# Relative difference allowed between a constant and the pattern's number, by the constant's dtype: about one rounding.
TOLERANCES: dict[int, float] = {TensorProto.FLOAT16: 2e-3, TensorProto.BFLOAT16: 1e-2}
FLOAT32_TOLERANCE = 2e-5


class MatchContext(ABC):
    """The facts that the rules of matching share while one fusion is matched on one graph."""

    def __init__(self, graph: Graph, shapes: ShapeInfo, fusion: Fusion, joined: bool = False) -> None:
        """Create the context; `joined` says whether operators or a norm will be fused into the match."""
        self.graph, self.shapes, self.fusion, self.casts = graph, shapes, fusion, fusion.casts
        self.number = graph.number
        self.joined = joined
        self.nearest = NearestMiss(fusion)
        self.fail = self.nearest.fail
        self.prefilter = Prefilter(fusion, self.float_cast if fusion.casts else None)
        self.fits, self.wanted = self.prefilter.fits, self.prefilter.wanted

    @abstractmethod
    def match(self, term: Term, tensor: Tensor, state: State) -> Iterator[State]:
        """Yield the state after each way to match the tensor with the term."""

    def bind_value(self, term: Capture, value: CapturedValue, state: State) -> Iterator[State]:
        """Yield the state with a scalar or attribute bound, unless it is already bound to another value.

        The value of an attribute that the operator lacks is None.
        """
        if term.name in state.values and state.values[term.name] != value:
            here, elsewhere = number_text(value), number_text(state.values[term.name])
            self.fail(term, state, lambda: f"{term.name} is {here} here; it is {elsewhere} elsewhere")
            return
        yield state._replace(values={**state.values, term.name: value})

    def is_output(self, term: Term) -> bool:
        """Return whether a term is an output of the fusion."""
        return any(output.unwrapped is term.unwrapped for output in self.fusion.outputs)

    @functools.cached_property
    def index_analysis(self) -> IndexAnalysis:
        """The values of integer and boolean tensors.  Fusing changes no values, so the analysis stays valid."""
        return IndexAnalysis(self.graph, self.shapes)

    # --- constants -----------------------------------------------------------------------------------------------

    def is_zero(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a constant of zeros."""
        return is_constant(tensor) and not constant_value(self.graph, tensor).any()

    def rank_raising_constant(self, node: Node) -> Constant | None:
        """Return the one-element constant that has more axes than the node's other inputs, or None."""
        numbers = [t for t in node.inputs if is_constant(t) and self.number(t) is not None and t.shape]
        if not numbers:
            return None
        widest = max(numbers, key=lambda t: len(t.shape))
        ranks = [self.shapes.rank(t) for t in node.inputs if t.name and self.number(t) is None]
        most = max((1 if rank is None else rank for rank in ranks), default=len(widest.shape))
        return widest if len(widest.shape) > most else None

    def close(self, found: float, required: float, tensor: Tensor) -> bool:
        """Return whether a stored constant equals the required number within the rounding of its dtype."""
        tolerance = TOLERANCES.get(self.shapes.dtype(tensor), FLOAT32_TOLERANCE)
        return found == required or math.isclose(found, required, rel_tol=tolerance)

    # --- Casts ---------------------------------------------------------------------------------------------------

    def float_cast(self, tensor: Tensor) -> Node | None:
        """Return the Cast between floating dtypes that computes a tensor; None if another operator computes it."""
        node = producer(tensor)
        if node is None or op_of(node) != "Cast":
            return None
        return node if {self.shapes.dtype(tensor), self.shapes.dtype(node.inputs[0])} <= FUSIBLE_FLOATS else None

    def is_to_float32(self, cast: Node) -> bool:
        """Return whether a Cast is to float32."""
        return self.shapes.dtype(cast.outputs[0]) == TensorProto.FLOAT

    def without_casts(self, tensor: Tensor, *, is_operand: bool = False) -> tuple[Tensor, list[Node]]:
        """Return the tensor before the Casts that the fusion absorbs, and these Casts.

        For an operand, only Casts to float32 are absorbed: other Casts round the operand to the dtype that the kernel
        reads.  A term that occurs several times in a pattern can match several Casts of one tensor.
        """
        casts = []
        while self.casts and (node := self.float_cast(tensor)):
            if is_operand and not self.is_to_float32(node):
                break
            casts.append(node)
            tensor = node.inputs[0]
        return tensor, casts
