"""Replace MatMuls by MatMulNBits, whose weights onnxruntime's MatMulNBitsQuantizer quantizes, one at a time.

Each weight goes through the quantizer in a model of its own, so that no more than one is in memory as floats.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx
import onnx.numpy_helper
from onnx import TensorProto, helper

from onnxfuse.errors import NO_ONNXRUNTIME, MissingPackageError, UsageError, VerificationError, first_line
from onnxfuse.ir.domain import ORT_DOMAIN
from onnxfuse.ir.dtypes import FLOATS, Array
from onnxfuse.ir.protos import (
    defined_names,
    graphs,
    nodes,
    operator_name,
    overridable_initializers,
    subgraphs,
    without_initializers,
)
from onnxfuse.ir.validate import size_of
from onnxfuse.quantize.result import StayingWeights, WeightError, WeightsResult
from onnxfuse.verify.reference import Progress, run_original

if TYPE_CHECKING:
    from types import ModuleType

BITS: Final[Mapping[str, int]] = {"int4": 4, "int8": 8}
BLOCK_SIZE: Final = 32  # elements along K that share a scale, as onnxruntime-genai's builder has them
QUANTIZABLE: Final = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16}
WEIGHT_INPUTS: Final[Mapping[str, int]] = {"Conv": 1, "ConvTranspose": 1, "Gather": 0, "Gemm": 1, "MatMul": 1}
ONLY_MATMUL: Final = "only weights of MatMuls are quantized"
IN_BODY: Final = "it is in a branch or a body"
OF_FUNCTION: Final = "it is a function of the model, and the weights that it reads are not quantized"


class NothingToQuantizeError(UsageError):
    """A model without a weight that can be quantized; `result` has the nodes with weights, and why these stay."""

    def __init__(self, name: str, result: WeightsResult) -> None:
        why = "; ".join(f"{len(each.nodes)} {each.op}: {each.reason}" for each in result.stays)
        super().__init__(f"{name} has no MatMul whose weight can be quantized{f' ({why})' if why else ''}")
        self.result = result


@dataclass(frozen=True)
class QuantizedModel:
    """A model with quantized weights, and the facts about them; weights that were not quantized are as before."""

    model: onnx.ModelProto
    result: WeightsResult


def quantize_weights(model: onnx.ModelProto, folder: Path | None, dtype: str, name: str) -> QuantizedModel:
    """Quantize the weights of the main graph's MatMuls to "int4" or "int8"; the model, called `name`, is not changed.

    Weights are constants of two axes, or Transposes of such, in float32, float16 or bfloat16, that callers cannot
    override.  Scales have the dtype of the weight, and there are no zero points.

    Raises NothingToQuantizeError if there is no such weight, MissingPackageError if onnxruntime or onnx_ir is missing.
    """
    quantizing = _Quantizing(model, folder, dtype, _library())
    made = [each for node in model.graph.node for each in quantizing.replaced(node)]
    if not quantizing.quantized:
        raise NothingToQuantizeError(name, quantizing.told())
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
    """Remove the nodes with these outputs, and the inputs of these names, that nothing reads any more.

    Before IR version 4, weights are inputs, too.
    """
    for _ in range(2):  # first Transposes, then the Constants that only these read
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
    quantized: dict[str, list[str]] = field(default_factory=dict)  # by weight: packed numbers and scales
    sources: set[str] = field(default_factory=set)  # the weights that were quantized, and their Transposes
    stays: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # nodes by operator and reason
    count: int = 0
    bytes_before: int = 0

    def __post_init__(self) -> None:
        graph, parts = self.model.graph, list(graphs(self.model.graph))
        constants = {
            node.output[0]: attribute.t
            for node in nodes(graph)
            for attribute in (node.attribute if operator_name(node) == "Constant" else ())
            if attribute.name == "value"
        }
        weights = constants | {tensor.name: tensor for part in parts for tensor in part.initializer}
        self._weights = {name: t for name, t in weights.items() if t.data_type in FLOATS and len(t.dims) >= 2}
        self._overridable = overridable_initializers(self.model)
        self._names = {name for part in parts for name in defined_names(part)}
        self._functions = {(function.domain, function.name) for function in self.model.functions}
        self._turned = {
            node.output[0]: node.input[0]
            for node in nodes(graph)
            if operator_name(node) == "Transpose" and node.input[0] in self._weights and _perm(node) in ((), (1, 0))
        }

    def _weight_of(self, node: onnx.NodeProto) -> str:
        """Return the name of the weight that a node reads; "" if it reads none."""
        index = WEIGHT_INPUTS.get(operator_name(node))
        is_call = (node.domain, node.op_type) in self._functions
        names = node.input if is_call else node.input[index : index + 1] if index is not None else ()
        return next((name for name in names if self._turned.get(name, name) in self._weights), "")

    def replaced(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return a MatMulNBits for a node whose weight can be quantized; else the node, whose reason is counted."""
        for inner in nodes(*subgraphs(node)):
            if self._weight_of(inner):
                self._stay(inner, ONLY_MATMUL if operator_name(inner) != "MatMul" else IN_BODY)
        name = self._weight_of(node)
        if not name:
            return [node]
        source = self._turned.get(name, name)
        weight = self._weights[source]
        if (why := self._why_not(node, source)) is not None:
            self._stay(node, why)
            return [node]
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

    def _stay(self, node: onnx.NodeProto, why: str) -> None:
        self.stays.setdefault((node.op_type, why), []).append(node.name or node.output[0])

    def _why_not(self, node: onnx.NodeProto, source: str) -> str | None:
        """Return why the weight of a node is not quantized; None if it is."""
        weight = self._weights[source]
        if (node.domain, node.op_type) in self._functions:
            return OF_FUNCTION
        if node.op_type != "MatMul":
            return ONLY_MATMUL
        if source in self._overridable:
            return "its weight is an input of the model, too, so that callers can override it"
        if weight.data_type not in QUANTIZABLE:
            return "its weight is float64"
        if len(weight.dims) != 2:
            return f"its weight has {len(weight.dims)} axes"
        if min(weight.dims) < BLOCK_SIZE:
            return f"its weight is smaller than a block of {BLOCK_SIZE}"
        return None

    def _packed(self, name: str, weight: TensorProto) -> list[str]:
        """Return the names of a weight's packed numbers and scales, which become initializers."""
        if name not in self.quantized:
            values = onnx.numpy_helper.to_array(weight, base_dir=str(self.folder or ""))
            made = self._by_library(values.T if name in self._turned else values)
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
        quantizer = self.library.MatMulNBitsQuantizer(
            alone, bits=BITS[self.dtype], block_size=BLOCK_SIZE, is_symmetric=True
        )
        quantizer.process()
        found = {tensor.name: tensor for tensor in quantizer.model.model.graph.initializer}
        return [found[name] for name in quantizer.model.model.graph.node[0].input[1:]]

    def _unused(self, name: str) -> str:
        while name in self._names:
            name += "_"
        self._names.add(name)
        return name

    def told(self) -> WeightsResult:
        """Return the facts about the quantized weights."""
        after = sum(map(size_of, self.tensors))
        stays = tuple(StayingWeights(op, why, tuple(names)) for (op, why), names in self.stays.items())
        return WeightsResult(self.dtype, BLOCK_SIZE, self.count, stays, self.bytes_before, after)


def _perm(node: onnx.NodeProto) -> tuple[int, ...]:
    return next((tuple(each.ints) for each in node.attribute if each.name == "perm"), ())


def with_errors(
    quantized: WeightsResult, original: tuple[onnx.ModelProto, Path | None], written: onnx.ModelProto,
    inputs: Mapping[str, Array] | None, shapes: Sequence[str], tell: Progress,
) -> WeightsResult:  # fmt: skip
    """Return the facts with the errors of the written model's outputs, on drawn inputs, beside the float model."""
    model, folder = original
    try:
        reference = run_original(model, folder, inputs or {}, tell, shapes, extremes=False)
        tell("run the model with quantized weights")
        session = reference.open(written)
        results = [reference.run(session, each.feeds) for each in reference.runs]
    except VerificationError as error:
        return replace(quantized, note=f"its errors were not measured: {error}")
    except Exception as error:  # any exception of onnxruntime
        return replace(quantized, note=f"its errors were not measured: {first_line(error)}")
    found = [reference.worst_difference(results, name) for name in reference.runs[0].outputs]
    return replace(quantized, errors=tuple(WeightError(each.name, each.max_abs, each.max_rel) for each in found))


def _library() -> ModuleType:
    """Import onnxruntime's quantizer.  Raises MissingPackageError if it, or onnx_ir, is not installed."""
    try:
        with _logging_unchanged():
            library = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
    except ImportError as error:
        if (error.name or "").startswith("onnx_ir"):
            raise MissingPackageError(
                "onnxruntime's quantizer needs the package onnx_ir; pip install onnx-ir"
            ) from error
        raise MissingPackageError(f"{NO_ONNXRUNTIME} ({first_line(error)})") from error
    logging.getLogger(library.__name__).setLevel(logging.WARNING)
    return library


@contextmanager
def _logging_unchanged() -> Iterator[None]:
    """Undo what the block does to the root logger: the quantizer's module lets it print all that is logged."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
