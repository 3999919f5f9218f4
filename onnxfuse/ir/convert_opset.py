"""Convert a model to a newer opset of ONNX by onnx's version converter."""

from __future__ import annotations

import onnx
import onnx.version_converter

from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.load import EXTERNAL_THRESHOLD
from onnxfuse.ir.protos import copy_without, nodes, overridable_initializers, replace_tensors
from onnxfuse.ir.validate import ONNX_DOMAINS

ELSEWHERE = "elsewhere"  # where the converter is told that large weights lie, which it does not look at
OLDEST_IR_VERSION = 8  # before version 4 the converter wants initializers among the inputs


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the ONNX domain; 0 if it is not imported."""
    return next((each.version for each in model.opset_import if each.domain in ONNX_DOMAINS), 0)


def convert_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Return a model in a newer opset; `model` stays as it is.  Its own functions are inlined.

    Raises ModelError if onnx's version converter refuses the model, or a function cannot be inlined.
    """
    if opset_of(model) in (0, opset):
        return model
    refusal = f"cannot convert the model from opset {opset_of(model)} to {opset}"
    inlined = inline_functions(model)
    if inlined.model.functions:
        kept = inlined.kept[0] if inlined.kept else f"its function '{inlined.model.functions[0].name}' is not inlined"
        raise ModelError(f"{refusal}: {kept}")
    light = replace_tensors(inlined.model, _without_values)
    _drop_constant_inputs(light)
    light.ir_version = max(light.ir_version, OLDEST_IR_VERSION)
    try:
        converted = onnx.version_converter.convert_version(light, opset)
    except Exception as error:  # the converter raises RuntimeError, and what its adapters assert
        line = str(error).strip().split("\n")[0]
        raise ModelError(f"{refusal}: onnx's version converter says: {line}; export it for opset {opset}") from error
    return _with_weights(converted, inlined.model)


def lower_opset(model: onnx.ModelProto, oldest: int) -> None:
    """Lower the opset of a converted model to the first one from `oldest` on that has all of its nodes.

    From one opset to the next, the operators that both have mean the same from 23 on; some take more dtypes.
    """
    version = opset_of(model)
    while version > oldest and all(_has_node(node, version - 1) for node in nodes(model.graph)):
        version -= 1
    for each in model.opset_import:
        if each.domain in ONNX_DOMAINS:
            each.version = version
    needed = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", version)])
    model.ir_version = max(model.ir_version, needed)


def _has_node(node: onnx.NodeProto, opset: int) -> bool:
    """Return whether an opset has a node's operator with its inputs, outputs and attributes."""
    if node.domain not in ONNX_DOMAINS:
        return True
    found = schema(node.op_type, opset)
    if found is None:
        return False
    attributes = all(each.name in found.attributes for each in node.attribute)
    return attributes and len(node.input) <= found.max_input and len(node.output) <= found.max_output


def _without_values(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return a large tensor as an external one; the converter reads the values of small ones, such as axes."""
    if len(tensor.raw_data) < EXTERNAL_THRESHOLD and not tensor.external_data:
        return tensor
    light = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    light.data_location = onnx.TensorProto.EXTERNAL
    light.external_data.add(key="location", value=ELSEWHERE)
    return light


def _drop_constant_inputs(model: onnx.ModelProto) -> None:
    """Remove from the inputs of a model before IR version 4 the initializers, which no caller can override there."""
    constants = {tensor.name for tensor in model.graph.initializer} - overridable_initializers(model)
    inputs = [each for each in model.graph.input if each.name not in constants]
    del model.graph.input[:]
    model.graph.input.extend(inputs)


def _with_weights(converted: onnx.ModelProto, original: onnx.ModelProto) -> onnx.ModelProto:
    """Return the converted graph with the weights of the original, and its metadata, which the converter drops."""
    weights = {tensor.name: tensor for tensor in original.graph.initializer}
    result = copy_without(original, "graph", "opset_import", "ir_version")
    result.ir_version = converted.ir_version
    result.opset_import.extend(converted.opset_import)
    result.graph.CopyFrom(copy_without(converted.graph, "initializer"))
    result.graph.initializer.extend(weights.get(each.name, each) for each in converted.graph.initializer)
    return result
