"""Check models that were read; an error says in one sentence what is wrong, and how to correct it."""

from __future__ import annotations

import graphlib
import os
import re
from pathlib import Path

import onnx
import onnx.checker
from onnx.external_data_helper import uses_external_data

from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.domain import ORT_DOMAIN
from onnxfuse.ir.execution_order import in_execution_order, reads
from onnxfuse.ir.external_data import external_range, state_range
from onnxfuse.ir.inline_functions import check_expanded
from onnxfuse.ir.invented_operators import without_invented_operators
from onnxfuse.ir.ort_attributes import wrong_attribute
from onnxfuse.ir.protos import (
    ONNX_DOMAINS,
    external_tensors,
    nodes,
    opset_of,
    replace_tensors,
    subgraphs,
)
from onnxfuse.ir.read import read
from onnxfuse.ir.validate import label, validate

SUPPORTED_OPSETS = range(7, 28)
SUPPORTED_TEXT = f"{SUPPORTED_OPSETS[0]} to {SUPPORTED_OPSETS[-1]}"
# Bytes; smaller tensors stay inside the model file, because each tensor in a data file starts a new page.
EXTERNAL_THRESHOLD = 1024
# Operators that onnxruntime accepts in the ONNX domain although the opset lacks them.
ONNXRUNTIME_OPERATORS = frozenset({
    "Affine", "Crop", "DynamicSlice", "GRUUnit", "GivenTensorFill", "GroupNormalization", "ImageScaler",
    "LayerNormalization", "MeanVarianceNormalization", "ParametricSoftplus", "Scale", "ScaledTanh",
    "SimplifiedLayerNormalization", "ThresholdedRelu",
})  # fmt: skip
# Fields of an attribute that do not hold its value.
NO_VALUE = frozenset({"name", "doc_string", "type", "ref_attr_name"})
UNCHECKED_DOMAIN = "unchecked"  # nodes that the checker must skip are moved to this domain


def load(source: str | os.PathLike[str] | bytes | onnx.ModelProto) -> tuple[onnx.ModelProto, Path | None]:
    """Read and check a model; external data stays on disk.

    Returns the model, with its nodes in execution order, and the folder of its external data, which is None if the
    model does not come from a file.  A model that is given as a ModelProto is not changed. Raises ModelError if the
    model cannot be read or is not valid ONNX.
    """
    if isinstance(source, onnx.ModelProto):
        model, folder, name = source, None, "the model"
    elif isinstance(source, bytes):
        model, folder, name = read(source), None, "the model"
    else:
        model, folder, name = read(source), Path(source).parent, f"'{Path(source)}'"
    validate(model, name)
    model = _in_short_domain(model)
    model = in_execution_order(without_invented_operators(_without_references(model, name), name))
    _check(model, folder, name)
    return model, folder


def _in_short_domain(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with domain "ai.onnx" renamed to "": both mean ONNX, but onnx's checker distinguishes them."""
    long = "ai.onnx"
    if all(node.domain != long for node in nodes(model.graph, *model.functions)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in nodes(copy.graph, *copy.functions):
        node.domain = "" if node.domain == long else node.domain
    for part in (copy, *copy.functions):
        imported = {each.domain: each.version for each in part.opset_import}
        if long in imported:
            imported.setdefault("", imported.pop(long))
        del part.opset_import[:]
        part.opset_import.extend(onnx.helper.make_opsetid(domain, version) for domain, version in imported.items())
    return copy


def _without_references(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Return the model without `ref_attr_name` in nodes outside functions, where onnxruntime ignores it.

    An attribute that had this field keeps its own value.  Raises ModelError if it has none.
    """
    found = [(node, a) for node in nodes(model.graph) for a in node.attribute if a.ref_attr_name]
    for node, attribute in found:
        if not any(field.name not in NO_VALUE for field, _ in attribute.ListFields()):
            raise ModelError(
                f"{name} is not valid ONNX: {label(node)} refers in '{attribute.name}' to the attribute "
                f"'{attribute.ref_attr_name}' of a function, and is in no function; give the attribute a value"
            )
    if found:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        model = copy
        for node in nodes(model.graph):
            for attribute in node.attribute:
                attribute.ClearField("ref_attr_name")
    return model


def _check(model: onnx.ModelProto, folder: Path | None, name: str) -> None:
    """Raise ModelError unless the model is valid ONNX of a supported opset, and its external data lies in `folder`."""
    if not model.graph.node:
        raise ModelError(f"{name} has an empty graph; expected at least one node")
    if not model.graph.output:
        raise ModelError(f"{name} has no graph output; expected at least one")
    versions = [o.version for o in model.opset_import if o.domain in ONNX_DOMAINS]
    if not versions and any(n.domain in ONNX_DOMAINS for n in nodes(model.graph)):
        raise ModelError(f"{name} imports no opset of the ONNX domain; expected one of {SUPPORTED_TEXT}")
    if versions and versions[0] not in SUPPORTED_OPSETS:
        raise ModelError(
            f"{name} has opset {versions[0]}; supported are {SUPPORTED_TEXT}: export it again for one of these"
        )
    check_expanded(model, name)
    _check_names(model.graph, {}, frozenset(), name)
    for tensor in external_tensors(model):
        state_range(tensor, *external_range(tensor, folder)[1:])
    _check_operators(model, name)
    outline = replace_tensors(model, _without_values)
    _hide_from_checker(outline)
    if outline.ir_version == 3:  # ONNX's checker requires initializers to be inputs in version 3; onnxruntime doesn't
        outline.ir_version = 4
    for value in outline.graph.output:
        if not value.HasField("type"):  # onnxruntime infers the type
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for value in (*outline.graph.input, *outline.graph.output):
        if value.type.HasField("tensor_type"):  # the checker requires a shape; runtimes do not
            value.type.tensor_type.shape.SetInParent()
    try:
        onnx.checker.check_model(outline)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise ModelError(f"{name} is not valid ONNX: {_what_and_where(str(error))}") from error


def _what_and_where(text: str) -> str:
    """Return, as one line, the checker's message and the node that caused it."""
    line = " ".join(text.strip().split("\n")[0].split())
    nodes = re.findall(r"Bad node spec for node\. Name: (.*) OpType: (.*)", text)
    if not nodes:
        return line
    name, op = nodes[-1]  # the innermost node
    where = f"{op} node '{name}'" if name else f"{op} node"
    return f"{line} (in the {where})"


def _check_operators(model: onnx.ModelProto, name: str) -> None:
    """Raise ModelError for a node of the ONNX domain whose operator does not exist in the model's opset.

    Also raise it for a node of com.microsoft with an attribute of a wrong type, which ONNX's checker does not see.
    """
    local = {(f.domain, f.name) for f in model.functions}
    for part in (model.graph, *model.functions):
        opset = opset_of(part if isinstance(part, onnx.FunctionProto) else model)
        for node in nodes(part):
            if node.domain in ONNX_DOMAINS and opset and not (
                _has_operator(node.op_type, opset) or (node.domain, node.op_type) in local
                or node.op_type in ONNXRUNTIME_OPERATORS
            ):  # fmt: skip
                raise ModelError(
                    f"{name}: {label(node)} has the operator '{node.op_type}', which opset {opset} of ONNX does not "
                    "have; export the model again, for an opset that has it, or give the node the operator's domain"
                )
            if node.domain == ORT_DOMAIN and (wrong := wrong_attribute(node)):
                raise ModelError(f"{name} is not valid: {label(node)} has {wrong}")


def _has_operator(op: str, opset: int) -> bool:
    found = schema(op, opset)
    return found is not None and not found.deprecated


def _hide_from_checker(outline: onnx.ModelProto) -> None:
    """Move nodes with ONNXRUNTIME_OPERATORS to a domain without schemas, because ONNX's checker refuses them."""
    for part in (outline.graph, *outline.functions):
        owner = part if isinstance(part, onnx.FunctionProto) else outline
        opset = opset_of(owner)
        hidden = [
            node for node in nodes(part)
            if node.domain in ONNX_DOMAINS and node.op_type in ONNXRUNTIME_OPERATORS
            and not _has_operator(node.op_type, opset)
        ]  # fmt: skip
        for node in hidden:
            node.domain = UNCHECKED_DOMAIN
        if hidden:
            owner.opset_import.append(onnx.helper.make_opsetid(UNCHECKED_DOMAIN, 1))


def _check_names(
    graph: onnx.GraphProto, outer_definitions: dict[str, str], defined_outside: frozenset[str], name: str
) -> None:
    """Raise ModelError unless every tensor is defined once, and before a node reads it.

    `outer_definitions` maps each tensor of the graphs around a subgraph to a text that says what defines it.
    `defined_outside` holds the tensors that are defined before the subgraph.
    """
    weights = [*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer)]
    definitions = {i.name: "a graph input" for i in graph.input}
    defined = set(defined_outside) | set(definitions) | set(weights)
    pairs = [(w, "an initializer") for w in weights] + [(o, label(n)) for n in graph.node for o in n.output if o]
    for tensor, definition in pairs:
        before = definitions.get(tensor)
        if before and (before, definition) != ("a graph input", "an initializer"):
            raise ModelError(f"{name} defines '{tensor}' twice, by {before} and by {definition}; expected one of them")
        definitions[tensor] = definition
    for node in graph.node:
        for tensor in node.input:
            if tensor and tensor not in defined:
                raise ModelError(f"{name}: {_describe_undefined(graph, node, tensor, definitions, outer_definitions)}")
        for inner in subgraphs(node):
            _check_names(inner, outer_definitions | definitions, frozenset(defined), name)
        defined.update(node.output)
    for output in graph.output:
        if output.name not in defined:
            raise ModelError(f"{name} has the graph output '{output.name}', which no node writes; expected a writer")


def _describe_undefined(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    tensor: str,
    definitions: dict[str, str],
    outer_definitions: dict[str, str],
) -> str:
    """Return why `tensor` is not defined where the node reads it; the text completes an error message."""
    if tensor in outer_definitions and tensor not in definitions:
        later = f"which {outer_definitions[tensor]} of the graph around it writes only later"
        return f"{label(node)} in a subgraph reads '{tensor}', {later}; ONNX graphs are acyclic and in execution order"
    if tensor not in definitions:
        return f"{label(node)} reads '{tensor}', which nothing defines; expected an input, initializer or node output"
    producer = {o: i for i, n in enumerate(graph.node) for o in n.output}
    needs = {i: {producer[t] for t in reads(n) if t in producer} for i, n in enumerate(graph.node)}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        cycle = " -> ".join(label(graph.node[i]) for i in error.args[1][:6])
        return f"its graph has a cycle, {cycle}; ONNX graphs must be acyclic"
    return f"{label(node)} reads '{tensor}' before {definitions[tensor]} writes it; expected it before"


def _without_values(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """Return an empty tensor if the given one is large or external, so that the checker reads little data."""
    if not uses_external_data(tensor):
        found = len(tensor.raw_data)
        if found < EXTERNAL_THRESHOLD:
            return tensor
    return onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0])
