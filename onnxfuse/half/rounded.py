"""Models in float32 that show what half precision does: its noise, and bfloat16 where no kernels for it exist."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import onnx.helper
from onnx import TensorProto
from onnx.external_data_helper import uses_external_data

from onnxfuse.half.precision import REAL, Precision
from onnxfuse.half.weights import ScratchFolder, Weights
from onnxfuse.ir.dtypes import HALF_PRECISION, Array
from onnxfuse.ir.protos import graphs, replace_tensors, subgraphs, tensors
from onnxfuse.verify.noise import move_by_rounding
from onnxfuse.verify.widen import model_to_float32


def with_moved_weights(
    plain: onnx.ModelProto, folder: Path | None, precision: Precision, draw: int
) -> tuple[onnx.ModelProto, Weights]:
    """Return a model whose weights are moved by one rounding to half precision, and what holds them on disk.

    draw  another one has other directions
    """
    weights = Weights(folder, precision)
    if any(uses_external_data(tensor) for tensor in tensors(plain.graph, *plain.functions)):
        weights.scratch = ScratchFolder()
    result = replace_tensors(plain, lambda tensor: weights.moved(tensor, draw))
    for part in graphs(*(inner for node in result.graph.node for inner in subgraphs(node))):
        for tensor in part.initializer:
            tensor.CopyFrom(weights.moved(tensor, draw))
    return result, weights


def moved(feeds: Mapping[str, Array], precision: Precision, draw: int) -> dict[str, Array]:
    """Return inputs of which floating-point values are moved up or down by one rounding to half precision."""
    return {name: move_by_rounding(name, value, precision.rounding, draw) for name, value in feeds.items()}


def with_roundings(model: onnx.ModelProto, types: Mapping[str, int]) -> onnx.ModelProto:
    """Return a model in float32 that rounds what each node of the main graph writes, where that is in half precision.

    types  the dtype of each tensor of `model`, where it is known
    """
    result = model_to_float32(model)
    halves = {name: number for name, number in types.items() if number in HALF_PRECISION}
    present = list(result.graph.node)
    del result.graph.node[:]
    for node in present:
        rounded = [name for name in node.output if name in halves and node.op_type != "Cast"]
        exact = {name: f"{name}::exact" for name in rounded}
        node.output[:] = [exact.get(name, name) for name in node.output]
        result.graph.node.append(node)
        for name in rounded:
            for source, made, to in (
                (exact[name], f"{name}::half", halves[name]),
                (f"{name}::half", name, TensorProto.FLOAT),
            ):
                result.graph.node.append(onnx.helper.make_node("Cast", [source], [made], to=to))
    return result


def weight_bytes(model: onnx.ModelProto, names: Collection[int] = REAL) -> int:
    """Return the bytes of the floating-point initializers of a model."""
    sizes = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2}
    total = 0
    for tensor in model.graph.initializer:
        if tensor.data_type in names:
            count = sizes[tensor.data_type]
            for size in tensor.dims:
                count *= size
            total += count
    return total
