"""Quantize weights and activations by onnxruntime's quantize_static, with the ranges that tensors have on samples.

The result has integers of 8 bits or float8 numbers.

The outputs of products and convolutions stay floats, because the operators after them are fused into their kernels.  A
tensor is quantized only where another product or convolution reads it, so after biases and activations, but before a
MaxPool, which then moves integers.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx
from onnx import TensorProto

from onnxfuse.analysis.shape_inference import read_and_infer
from onnxfuse.errors import ModelError, first_line
from onnxfuse.ir.dtypes import Array, dtype_name
from onnxfuse.ir.external_data import with_values
from onnxfuse.ir.protos import external_tensors, nodes
from onnxfuse.ir.validate import size_of
from onnxfuse.quantize.library import logging_unchanged, quantizer
from onnxfuse.quantize.merge_projections import merge_projections
from onnxfuse.quantize.result import QuantizedModel, WeightsResult
from onnxfuse.quantize.slower_layers import SlowerLayers
from onnxfuse.quantize.weight_readers import NothingToQuantizeError, WeightReaders

if TYPE_CHECKING:
    from types import ModuleType

OPTIMISTIC: Final = "these errors are those of samples that gave the ranges; other inputs may be off by more"
MAX_SAMPLES_COMPARED: Final = 8  # maximum number of samples to measure errors on; all samples are used for ranges


@dataclass(frozen=True)
class EightBits:
    """What a model is quantized to.  The names of types and methods are those of onnxruntime.quantization."""

    operators: tuple[str, ...]  # the operators whose operands are quantized
    oldest_opset: int  # the first opset in which their quantizers can have one scale per channel
    weights: str
    activations: str
    method: str  # how ranges follow from samples
    read: str  # the dtype of activations, in reports


STATIC: Final[Mapping[str, EightBits]] = {
    "int8": EightBits(("Conv", "Gemm", "MatMul"), 13, "QInt8", "QUInt8", "MinMax", "uint8"),
    "float8": EightBits(("Conv", "Gemm", "MatMul"), 21, "QFLOAT8E4M3FN", "QFLOAT8E4M3FN", "Distribution", "float8"),
}


class _Samples:
    """The samples, with the interface of onnxruntime's CalibrationDataReader."""

    def __init__(self, samples: Sequence[Mapping[str, Array]]) -> None:
        self._left: Iterator[Mapping[str, Array]] = iter(samples)

    def get_next(self) -> Mapping[str, Array] | None:
        """Return the next sample; None after the last one."""
        return next(self._left, None)


def quantize_static(
    model: onnx.ModelProto, folder: Path | None, dtype: str, samples: Sequence[Mapping[str, Array]], name: str,
    sizes: Mapping[str, Sequence[int]],
) -> QuantizedModel:  # fmt: skip
    """Quantize the weights of a float32 model's products, and of its convolutions for int8, and their other inputs.

    `dtype` is int8 or float8: the dtype of the weights, with one scale per channel and no zero points.  The other
    inputs are uint8, with one scale and one zero point, or float8, with one scale.  `model`, called `name` in messages,
    has at least the opset `oldest_opset`, and is not changed.  The projections of an attention are merged first.  Nodes
    in subgraphs stay floats, and so do those that are estimated to be faster in float16 for inputs of the shapes
    `sizes`, by name.

    Raises NothingToQuantizeError if there is no such weight, MissingPackageError without onnxruntime, and ModelError if
    the quantizer raises.
    """
    to = STATIC[dtype]
    named = _with_names(model)
    for tensor in external_tensors(named):
        tensor.CopyFrom(with_values(tensor, folder))
    merge_projections(named)
    readers = WeightReaders(named, to.operators)
    shapes = read_and_infer(named, folder)
    slower, linked = SlowerLayers(shapes, dtype, sizes), {node.outputs[0].name: node for node in shapes.graph.nodes}

    def why_not(node: onnx.NodeProto, weight: TensorProto) -> str | None:
        return _why_not(node, weight) or slower.why(linked[node.output[0]])

    chosen = {node.name: each for node in named.graph.node if (each := readers.weight_to_quantize(node, why_not))}
    if not chosen:
        *most, last = to.operators
        result = WeightsResult(dtype, 0, 0, readers.told(), 0, 0)
        raise NothingToQuantizeError(name, f"{', '.join(most)} or {last}", result)
    before = sum(size_of(readers.weights[each]) for each in set(chosen.values()))
    all_before = sum(map(size_of, named.graph.initializer))
    library = quantizer("quantize")
    try:
        made = _by_library(library, named, to, samples, list(chosen))
    except Exception as error:  # any exception of onnxruntime
        raise ModelError(f"onnxruntime's quantizer does not quantize {name}: {first_line(error)}") from error
    if to.read == "uint8":
        _quantize_before_pools(made)
    after = before + sum(map(size_of, made.graph.initializer)) - all_before
    return QuantizedModel(
        made, WeightsResult(dtype, 0, len(chosen), readers.told(), before, after, activations=to.read)
    )


def _why_not(node: onnx.NodeProto, weight: TensorProto) -> str | None:
    """Return why the weight of a product or convolution cannot be quantized; None if it can."""
    if weight.data_type != TensorProto.FLOAT:
        return f"its weight is {dtype_name(weight.data_type)}, so that it has to be exported in float32 first"
    if node.op_type == "MatMul" and len(weight.dims) != 2:
        return f"its weight has {len(weight.dims)} axes"
    return None


def _with_names(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in which each node has a unique name, because the quantizer selects nodes by name."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    seen = {""}
    for node in copy.graph.node:
        node.name = node.name or node.output[0]
        while node.name in seen:
            node.name += "_"
        seen.add(node.name)
    return copy


def _quantize_before_pools(model: onnx.ModelProto) -> None:
    """Exchange each MaxPool and the QuantizeLinear that alone reads its result; the largest integer stays the same.

    Nodes of subgraphs count as readers.
    """
    graph, outputs = model.graph, {each.name for each in model.graph.output}
    readers = Counter(name for node in nodes(graph) for name in node.input)
    makers = {node.output[0]: i for i, node in enumerate(graph.node) if node.op_type == "MaxPool"}
    for node in graph.node:
        at = makers.get(node.input[0], -1) if node.op_type == "QuantizeLinear" else -1
        name = node.input[0] if node.input else ""
        if at < 0 or readers[name] > 1 or name in outputs or len(graph.node[at].output) > 1:
            continue
        pool = graph.node[at]
        node.input[0], pool.input[0] = pool.input[0], name
        node.output[0], pool.output[0] = name, node.output[0]
        for info in [each for each in graph.value_info if each.name in (name, pool.output[0])]:
            graph.value_info.remove(info)
        before = onnx.NodeProto()
        before.CopyFrom(pool)
        pool.CopyFrom(node)
        node.CopyFrom(before)


def _by_library(
    library: ModuleType, model: onnx.ModelProto, to: EightBits, samples: Sequence[Mapping[str, Array]], names: list[str]
) -> onnx.ModelProto:
    """Return the model with quantizers around the nodes with these names."""
    kinds, operators = library.QuantType, list(to.operators)
    with logging_unchanged(), tempfile.TemporaryDirectory() as scratch, redirect_stdout(None):
        path = Path(scratch, "model.onnx")
        library.quantize_static(
            model, path, _Samples(samples), op_types_to_quantize=operators, nodes_to_quantize=names,
            per_channel=True, activation_type=kinds[to.activations], weight_type=kinds[to.weights],
            calibrate_method=library.CalibrationMethod[to.method], use_external_data_format=True,
            extra_options={"OpTypesToExcludeOutputQuantization": operators},
        )  # fmt: skip
        return onnx.load(path)
