"""Find the nodes of a model that read weights, and record why weights are not quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import onnx

from onnxfuse.errors import UsageError
from onnxfuse.ir.dtypes import FLOATS
from onnxfuse.ir.protos import (
    graphs,
    nodes,
    operator_name,
    overridable_initializers,
    subgraphs,
)
from onnxfuse.quantize.result import StayingWeights, WeightsResult

WEIGHT_INPUTS: Final[Mapping[str, int]] = {"Conv": 1, "ConvTranspose": 1, "Gather": 0, "Gemm": 1, "MatMul": 1}
IN_BODY: Final = "it is in a branch or a body"
OF_FUNCTION: Final = "it is a function of the model, and the weights that it reads are not quantized"


class NothingToQuantizeError(UsageError):
    """A model has no weight that can be quantized; `result` has the nodes with weights, and the reasons."""

    def __init__(self, name: str, ops: str, result: WeightsResult) -> None:
        why = "; ".join(f"{len(each.nodes)} {each.op}: {each.reason}" for each in result.stays)
        super().__init__(f"{name} has no {ops} whose weight can be quantized{f' ({why})' if why else ''}")
        self.result = result


@dataclass
class WeightReaders:
    """The nodes of a model that read weights: constants of at least two axes, or Transposes of them.

    Only the weights of the operators `ops` can be quantized.
    """

    model: onnx.ModelProto
    ops: tuple[str, ...]
    stays: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # nodes by operator and reason

    def __post_init__(self) -> None:
        graph = self.model.graph
        constants = {
            node.output[0]: attribute.t
            for node in nodes(graph)
            for attribute in (node.attribute if operator_name(node) == "Constant" else ())
            if attribute.name == "value"
        }
        weights = constants | {tensor.name: tensor for part in graphs(graph) for tensor in part.initializer}
        self.weights = {name: t for name, t in weights.items() if t.data_type in FLOATS and len(t.dims) >= 2}
        self.turned: dict[str, str] = {
            node.output[0]: node.input[0]
            for node in nodes(graph)
            if operator_name(node) == "Transpose" and node.input[0] in self.weights and _perm(node) in ((), (1, 0))
        }
        self._overridable = overridable_initializers(self.model)
        self._functions = {(function.domain, function.name) for function in self.model.functions}

    def source(self, name: str) -> str:
        """Return the name of the weight that is read: the input of the Transpose if there is one, else `name`."""
        return self.turned.get(name, name)

    def weight_to_quantize(
        self, node: onnx.NodeProto, why_not: Callable[[onnx.NodeProto, onnx.TensorProto], str | None]
    ) -> str:
        """Return the name of the weight that a node reads, if it can be quantized; else "", and count the reason.

        `why_not` returns why the weight of a node is not quantized; None if it can be.  Weights that nodes in the
        branches or bodies of `node` read are never quantized, but are counted as well.
        """
        for inner in nodes(*subgraphs(node)):
            if self._weight_of(inner):
                self._stay(inner, IN_BODY if operator_name(inner) in self.ops else self._only)
        name = self._weight_of(node)
        if name and (why := self._why_not(node, name) or why_not(node, self.weights[self.source(name)])) is not None:
            self._stay(node, why)
            return ""
        return name

    def told(self) -> tuple[StayingWeights, ...]:
        """Return the nodes whose weights are not quantized, by operator and reason."""
        return tuple(StayingWeights(op, why, tuple(names)) for (op, why), names in self.stays.items())

    def _weight_of(self, node: onnx.NodeProto) -> str:
        """Return the name of the weight that a node reads; "" if it reads none."""
        index = WEIGHT_INPUTS.get(operator_name(node))
        is_call = (node.domain, node.op_type) in self._functions
        names = node.input if is_call else node.input[index : index + 1] if index is not None else ()
        return next((name for name in names if self.source(name) in self.weights), "")

    def _why_not(self, node: onnx.NodeProto, name: str) -> str | None:
        if (node.domain, node.op_type) in self._functions:
            return OF_FUNCTION
        if node.op_type not in self.ops:
            return self._only
        if self.source(name) in self._overridable:
            return "its weight is an input of the model, too, so that callers can override it"
        return None

    def _stay(self, node: onnx.NodeProto, why: str) -> None:
        self.stays.setdefault((node.op_type, why), []).append(node.name or node.output[0])

    @property
    def _only(self) -> str:
        *first, last = (f"{op}s" for op in self.ops)
        return f"only weights of {' and '.join([*([', '.join(first)] if first else []), last])} are quantized"


def _perm(node: onnx.NodeProto) -> tuple[int, ...]:
    return next((tuple(each.ints) for each in node.attribute if each.name == "perm"), ())
