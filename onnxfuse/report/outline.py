"""The outline of a graph: the facts about its nodes that a report keeps, because it does not keep the model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import onnx
from onnx import AttributeProto, TensorProto

from onnxfuse.ir.domain import is_fused
from onnxfuse.ir.protos import operator_name

MAX_ATTRIBUTE_CHARACTERS: Final = 80
# Attributes of fused nodes that reports do not show.
BOOKKEEPING: Final = frozenset({"fusion", "operands", "output_types", "attributes", "output_ranks"})
# The metadata in which torch's exporter by dynamo keeps the modules around a node, and the node's name:
# "['', 'blocks.2', 'blocks.2.mlp', 'linear_8']".  The names of such nodes have no scopes.
NAME_SCOPES: Final = "pkg.torch.onnx.name_scopes"
PROGRAM: Final = "program"  # the attribute that lists the operators of a region or of an epilogue


@dataclass(frozen=True)
class OutlineNode:
    """A node: its label, its operator, the tensors that it reads and computes, and its attributes as text.

    `scope` has the parts of the label before its last "/", or the modules of torch in which the node was.
    """

    label: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)
    is_fused: bool = False
    scope: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outline:
    """A graph without its weights: its nodes in execution order, and the types of tensors as text."""

    nodes: tuple[OutlineNode, ...]
    types: Mapping[str, str] = field(default_factory=dict)  # by tensor: its recorded type, such as "float16[batch, 8]"
    constants: frozenset[str] = frozenset()  # names of initializers


@dataclass(frozen=True)
class Rewritten:
    """A graph before and after fusing: the main graph, or a body of an If, Loop or Scan.

    `originals` maps a tensor of the graph after fusing to the tensor before fusing that it holds in another layout.
    """

    where: str
    before: Outline
    after: Outline
    originals: Mapping[str, str] = field(default_factory=dict)


def outline(graph: onnx.GraphProto) -> Outline:
    """Return the outline of a graph, without the nodes of its subgraphs."""
    weights = {tensor.name: _weight_text(tensor) for tensor in graph.initializer}
    values = (*graph.value_info, *graph.input, *graph.output)
    types = {value.name: text for value in values if (text := _type_text(value.type))}
    return Outline(tuple(_outline_nodes(graph.node)), types | weights, frozenset(weights))


def _outline_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterable[OutlineNode]:
    for node in nodes:
        inputs, outputs = tuple(filter(None, node.input)), tuple(filter(None, node.output))
        label = node.name or next(iter(outputs), "")
        fused = is_fused(node)
        op = node.op_type if fused else operator_name(node)
        attributes = {each.name: text for each in node.attribute if (text := _attribute_text(each))}
        if fused:
            op = attributes.get("fusion", op)
            attributes = {name: text for name, text in attributes.items() if name not in BOOKKEEPING}
        scope = _module_scope(node) or tuple(label.split("/")[:-1])
        yield OutlineNode(label, op, inputs, outputs, attributes, fused, scope)


def _module_scope(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the modules of torch around a node, such as ("blocks.2", "mlp"); () if none are recorded."""
    text = next((each.value for each in node.metadata_props if each.key == NAME_SCOPES), "")
    if not text:
        return ()
    modules = re.findall("'([^']*)'", text)[:-1]
    return tuple(name.removeprefix(f"{outer}.") for outer, name in itertools.pairwise(modules))


def _attribute_text(attribute: AttributeProto) -> str:
    """Return an attribute's value as text: a tensor's type instead of its values, and "" for a graph."""
    value: object = ""
    match attribute.type:
        case AttributeProto.INT | AttributeProto.INTS:
            value = attribute.i if attribute.type == AttributeProto.INT else list(attribute.ints)
        case AttributeProto.FLOAT:
            value = f"{attribute.f:g}"
        case AttributeProto.FLOATS:
            value = [float(f"{each:g}") for each in attribute.floats]
        case AttributeProto.STRING if attribute.name == PROGRAM:
            value = ", ".join(op for op, *_ in json.loads(attribute.s)["ops"] if op != "Constant")
        case AttributeProto.STRING:
            value = attribute.s.decode(errors="replace")
        case AttributeProto.STRINGS:
            value = [each.decode(errors="replace") for each in attribute.strings]
        case AttributeProto.TENSOR:
            value = _weight_text(attribute.t)
    text = str(value)
    return text if len(text) <= MAX_ATTRIBUTE_CHARACTERS else text[: MAX_ATTRIBUTE_CHARACTERS - 3] + "..."


def _weight_text(tensor: TensorProto) -> str:
    return _tensor_text(tensor.data_type, list(tensor.dims))


def _type_text(value: onnx.TypeProto) -> str:
    """Return a tensor type as text, such as "float16[batch, 8]"; "" for other types."""
    if not value.HasField("tensor_type") or not value.tensor_type.elem_type:
        return ""
    kind = value.tensor_type
    if not kind.HasField("shape"):
        return _dtype_text(kind.elem_type)
    dims = [d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in kind.shape.dim]
    return _tensor_text(kind.elem_type, dims)


def _tensor_text(dtype: int, dims: Sequence[object]) -> str:
    return f"{_dtype_text(dtype)}[{', '.join(map(str, dims))}]"


def _dtype_text(dtype: int) -> str:
    return str(TensorProto.DataType.Name(dtype)).lower()
