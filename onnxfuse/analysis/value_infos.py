"""The types of tensors, from onnx's inference of the whole model and from the exporter's records."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

import onnx
import onnx.shape_inference

from onnxfuse.algebra.size_parser import is_name, parse_size
from onnxfuse.algebra.sizes import UNKNOWN, Size
from onnxfuse.ir.noted_sizes import noted_sizes
from onnxfuse.ir.protos import ONNX_DOMAINS, nodes, opset_of, overridable_initializers, subgraphs, value_info
from onnxfuse.ir.slices import hide_ends

MAX_COPIED_BYTES = 1024  # onnx's shape inference reads only small constants, so it gets a model without larger ones
EXPAND_BOUNDED_SINCE = 13  # before this opset, onnx makes a dimension per element of a target, even for 10^9 elements
INVENTED: Final = re.compile(r"unk__\d+")  # names that inferences give to unknown sizes
BRANCHES_JOINED_SINCE = 11  # before this opset, onnx's inference can use the shape of only one branch of an If
SCALARS_JOINED_SINCE = 13  # before this opset, an If's inferred shape can be wrong if it has no axes
ONNX_FAILURES = (
    onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError, RuntimeError, TypeError,
)  # fmt: skip
# A str is a symbol that onnx invented; None is a dimension without name or size.
RecordedSize: TypeAlias = "Size | str | None"


class ValueInfos:
    """Dtypes and shapes, by tensor name.

    Shapes are inferred from the shapes of the graph's inputs.  Shapes that the model records for other tensors are kept
    separately, because they may have been recorded for inputs of other sizes than the model has now.  Recorded dtypes
    are trusted: runtimes refuse wrong ones.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        """Run onnx's inference on a copy of the model without weights and without recorded shapes."""
        self._names_of_inputs, self._names = _dim_names(model.graph.input), _recorded_names(model.graph)
        light, weights = _without_weights(model)
        # A backward Slice up to the largest integer is ambiguous: tools may record other shapes for it, and for the
        # nodes after it, than onnxruntime computes.
        self.has_ambiguous_slices = hide_ends(light)
        graph = _inferred(light)
        if _hide_wrong_results(light, graph):
            graph = _inferred(light)
        self._infos = {info.name: info for info in (*graph.value_info, *graph.output, *graph.input, *weights)}
        self.noted = noted_sizes(model)
        source = model.graph
        self._records = {info.name: info for info in (*source.value_info, *source.output)}

    def dtype(self, name: str) -> int:
        """Return the onnx.TensorProto.DataType; 0 if it is unknown or the value is not a tensor."""
        info = self._infos.get(name)
        return int(info.type.tensor_type.elem_type) if info else 0

    def shape(self, name: str) -> list[RecordedSize] | None:
        """Return the dimensions that onnx infers, or that a graph input has; None if the rank is unknown."""
        return _dims(self._infos.get(name), self._names_of_inputs)

    def recorded_shape(self, name: str) -> list[Size | None] | None:
        """Return the dimensions that the model records for a computed tensor; None if it records none.

        A name that an inference invented, such as unk__3, becomes None: another inference may use it for another size.
        """
        found = _dims(self._records.get(name), self._names)
        return None if found is None else [None if isinstance(size, str) else size for size in found]

    def recorded_names(self, name: str) -> list[Size | None] | None:
        """Return the dimensions that the model records for a computed tensor; None if it records none.

        Every name becomes a symbol, even a name that an inference invented.
        """
        found = _dims(self._records.get(name), set())
        return None if found is None else [parse_size(size) if isinstance(size, str) else size for size in found]


def _dims(info: onnx.ValueInfoProto | None, names: set[str]) -> list[RecordedSize] | None:
    """Return the dims of a recorded shape; None without a shape.

    Dims with names in `names` become sizes, and dims with other names become strings.
    """
    if info is None or not info.type.tensor_type.HasField("shape"):
        return None
    return [_size(dim, names) for dim in info.type.tensor_type.shape.dim]


def _size(dim: onnx.TensorShapeProto.Dimension, names: set[str]) -> RecordedSize:
    if dim.HasField("dim_value"):
        return int(dim.dim_value) if dim.dim_value >= 0 else None
    name = dim.dim_param
    if name.startswith(UNKNOWN) or not is_name(name):
        return None
    return parse_size(name) if name in names else str(name)


def _inferred(model: onnx.ModelProto) -> onnx.GraphProto:
    try:
        return onnx.shape_inference.infer_shapes(model).graph
    except ONNX_FAILURES:
        return model.graph


def _hide_wrong_results(model: onnx.ModelProto, inferred: onnx.GraphProto) -> bool:
    """Replace outputs that onnx infers wrongly by inputs without a shape; return whether any was replaced.

    Before opset 11, onnx gives an If the shape of one branch if it does not know the shape of the other.  Before
    opset 13, the shape that it infers for an If can be wrong if that shape has no axes.  For a sequence that a Loop
    carries, it infers the elements' shape from the first iteration's sequence.
    """
    opset = opset_of(model)
    is_old = opset < SCALARS_JOINED_SINCE
    known = {info.name: info for info in (*inferred.value_info, *inferred.output)}
    found = False
    for node in model.graph.node:
        is_if = is_old and node.op_type == "If"
        has_if = is_old and any(each.op_type == "If" for each in nodes(*subgraphs(node)))
        for i, name in enumerate(node.output):
            info = known.get(name, onnx.ValueInfoProto(name=name))
            may_be_wrong = has_if or (is_if and (opset < BRANCHES_JOINED_SINCE or not info.type.tensor_type.shape.dim))
            if name and (may_be_wrong or (node.op_type == "Loop" and info.type.HasField("sequence_type"))):
                node.output[i], found = f"{name}::hidden", True
                model.graph.input.append(_without_shape(info))
    return found


def _dim_names(infos: Iterable[onnx.ValueInfoProto]) -> set[str]:
    return {dim.dim_param for info in infos for dim in info.type.tensor_type.shape.dim if dim.dim_param}


def _recorded_names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of sizes that a graph records, except the names that inferences invent."""
    found = _dim_names((*graph.output, *graph.value_info))
    return _dim_names(graph.input) | {name for name in found if not INVENTED.fullmatch(name)}


def _without_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.ValueInfoProto]]:
    """Return a copy without recorded shapes and weights, and the types of all constants.

    In the copy, large and overridable constants are inputs.
    """
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    light.functions.extend(model.functions)
    source, graph = model.graph, light.graph
    graph.name = source.name
    graph.value_info.extend(map(_without_shape, source.value_info))
    graph.output.extend(map(_without_shape, source.output))
    graph.input.extend(source.input)
    for node in source.node:
        is_large = node.op_type == "Constant" and node.ByteSize() > MAX_COPIED_BYTES
        if is_large and node.attribute[0].HasField("t"):
            value = node.attribute[0].t
            graph.input.append(value_info(node.output[0], value.data_type, value.dims))
        else:
            graph.node.append(node)
    inputs = {info.name for info in source.input}
    weights = [value_info(t.name, t.data_type, t.dims) for t in source.initializer if t.name not in inputs]
    weights += [value_info(t.values.name, t.values.data_type, t.dims) for t in source.sparse_initializer]
    defaults = overridable_initializers(model)
    small = {t.name: t for t in source.initializer if t.name not in defaults and t.ByteSize() <= MAX_COPIED_BYTES}
    graph.initializer.extend(small.values())
    graph.input.extend(info for info in weights if info.name not in small)
    if any(o.domain in ONNX_DOMAINS and o.version < EXPAND_BOUNDED_SINCE for o in model.opset_import):
        _hide_expand_targets(graph)
    return light, weights


def _hide_expand_targets(graph: onnx.GraphProto) -> None:
    """Give each Expand with a computed target an undefined target, so that onnx infers only its output's dtype."""
    constants = {tensor.name for tensor in graph.initializer}
    constants.update(name for node in nodes(graph) if node.op_type == "Constant" for name in node.output)
    for node in nodes(graph):
        if node.op_type == "Expand" and len(node.input) > 1 and node.input[1] not in constants:
            node.input[1] = f"{node.input[1]}::hidden"


def _without_shape(info: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    if info.type.HasField("sequence_type"):
        elements = info.type.sequence_type.elem_type.tensor_type.elem_type
        return onnx.helper.make_tensor_sequence_value_info(info.name, elements, None)
    if not info.type.HasField("tensor_type"):
        return info
    return value_info(info.name, info.type.tensor_type.elem_type, None)
