"""Replace MatMuls by MatMulNBits; onnxruntime's MatMulNBitsQuantizer quantizes their weights, one at a time.

Each weight goes through the quantizer in a model of its own, so that no more than one is in memory as floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper

from onnxfuse.ir.domain import ORT_DOMAIN
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import array_of
from onnxfuse.ir.protos import defined_names, graphs, nodes, without_initializers
from onnxfuse.ir.validate import size_of
from onnxfuse.quantize.library import quantizer
from onnxfuse.quantize.result import QuantizedModel, WeightsResult
from onnxfuse.quantize.weight_readers import NothingToQuantizeError, WeightReaders

if TYPE_CHECKING:
    from types import ModuleType

BITS: Final[Mapping[str, int]] = {"int4": 4, "int8": 8}
BLOCK_SIZE: Final = 32  # elements along K that share a scale, as in onnxruntime-genai's builder
QUANTIZABLE: Final = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}


def quantize_weights(model: onnx.ModelProto, folder: Path | None, dtype: str, name: str) -> QuantizedModel:
    """Quantize the weights of the main graph's MatMuls to "int4" or "int8"; the model, called `name`, is not changed.

    Weights are constants of two axes, or Transposes of them, in float32, float16 or bfloat16; callers cannot override
    them.  Scales have the dtype of the weight, and there are no zero points.

    Raises NothingToQuantizeError if there is no such weight, MissingPackageError if onnxruntime or onnx_ir is missing.
    """
    quantizing = _Quantizing(model, folder, dtype, quantizer("matmul_nbits_quantizer"))
    made = [each for node in model.graph.node for each in quantizing.replaced(node)]
    if not quantizing.quantized:
        raise NothingToQuantizeError(name, "MatMul", quantizing.told())
    result = without_initializers(model)
    del result.graph.node[:]
    result.graph.node.extend(made)
    _remove_unused(result.graph, quantizing.sources)
    read = _read(result.graph)
    kept = [tensor for tensor in model.graph.initializer if tensor.name in read]
    result.graph.initializer.extend([*kept, *quantizing.tensors])
    if ORT_DOMAIN not in {each.domain for each in result.opset_import}:
        result.opset_import.append(helper.make_opsetid(ORT_DOMAIN, 1))
    return QuantizedModel(result, quantizing.told())


def _read(graph: onnx.GraphProto) -> set[str]:
    return {name for node in nodes(graph) for name in node.input} | {each.name for each in graph.output}


def _remove_unused(graph: onnx.GraphProto, candidates: set[str]) -> None:
    """Remove the nodes that compute unread tensors of `candidates`, and graph inputs of these names.

    Before IR version 4, weights are inputs, too.
    """
    for _ in range(2):  # first Transposes, then the Constants that only they read
        unused = candidates - _read(graph)
        left = [node for node in graph.node if not unused.intersection(node.output)]
        del graph.node[:]
        graph.node.extend(left)
    inputs = [value for value in graph.input if value.name not in unused]
    del graph.input[:]
    graph.input.extend(inputs)


@dataclass
class _Quantizing:
    """The weights of a model, and those that were quantized so far."""

    model: onnx.ModelProto
    folder: Path | None
    dtype: str
    library: ModuleType
    tensors: list[TensorProto] = field(default_factory=list)  # the new initializers
    # Name of a weight -> names of its packed numbers and scales.
    quantized: dict[str, list[str]] = field(default_factory=dict)
    sources: set[str] = field(default_factory=set)  # the weights that were quantized, and their Transposes
    count: int = 0
    bytes_before: int = 0

    def __post_init__(self) -> None:
        self._readers = WeightReaders(self.model, ("MatMul",))
        self._names = {name for part in graphs(self.model.graph) for name in defined_names(part)}

    def replaced(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return a MatMulNBits for a node whose weight can be quantized; else count the reason, and return the node."""
        name = self._readers.weight_to_quantize(node, _why_not)
        if not name:
            return [node]
        source = self._readers.source(name)
        weight = self._readers.weights[source]
        packed, scales = self._packed(name, weight)
        self.sources |= {name, source}
        depth, columns = weight.dims if name == source else reversed(weight.dims)
        self.count += 1
        return [
            helper.make_node(
                "MatMulNBits", [node.input[0], packed, scales], list(node.output), name=node.name, domain=ORT_DOMAIN,
                K=depth, N=columns, bits=BITS[self.dtype], block_size=BLOCK_SIZE,
            )
        ]  # fmt: skip

    def _packed(self, name: str, weight: TensorProto) -> list[str]:
        """Return the names of a weight's packed numbers and scales, which become initializers."""
        if name not in self.quantized:
            values = array_of(self.folder, weight)
            made = self._by_library(values.T if name in self._readers.turned else values)
            self.bytes_before += size_of(weight)
            for tensor, end in zip(made, ("Q", "scales"), strict=True):
                tensor.name = self._unused(f"{name}_{end}")
            self.tensors += made
            self.quantized[name] = [tensor.name for tensor in made]
        return self.quantized[name]

    def _by_library(self, values: Array) -> list[TensorProto]:
        """Return packed numbers, (N, blocks, bytes) of uint8, and scales, (N, blocks), of a weight (K, N)."""
        weight = onnx.numpy_helper.from_array(values.copy(), "w")
        kind = weight.data_type
        x, y = (helper.make_tensor_value_info(name, kind, [None, None]) for name in "xy")
        graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"], "product")], "g", [x], [y], [weight])
        alone = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
        made = self.library.MatMulNBitsQuantizer(alone, bits=BITS[self.dtype], block_size=BLOCK_SIZE, is_symmetric=True)
        made.process()
        found = {tensor.name: tensor for tensor in made.model.model.graph.initializer}
        return [found[name] for name in made.model.model.graph.node[0].input[1:]]

    def _unused(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def told(self) -> WeightsResult:
        """Return the facts about the quantized weights for the report."""
        after = sum(map(size_of, self.tensors))
        return WeightsResult(self.dtype, BLOCK_SIZE, self.count, self._readers.told(), self.bytes_before, after)


def _why_not(_: onnx.NodeProto, weight: TensorProto) -> str | None:
    """Return why the weight of a MatMul is not quantized; None if it is."""
    if weight.data_type not in QUANTIZABLE:
        return "its weight is float64"
    if len(weight.dims) != 2:
        return f"its weight has {len(weight.dims)} axes"
    if min(weight.dims) < BLOCK_SIZE:
        return f"its weight is smaller than a block of {BLOCK_SIZE}"
    return None
