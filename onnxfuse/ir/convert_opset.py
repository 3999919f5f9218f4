"""Convert a model to a newer opset of ONNX without changing the meaning of any node.

Most new versions of an operator only accept more dtypes, which the schemas show.  `opset_adapters.py` rewrites the
nodes whose meaning or form changes.  Any other change is refused, with an error that names it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import onnx
import onnx.helper
from onnx import TensorProto
from onnx.defs import OpSchema

from onnxfuse.errors import ModelError
from onnxfuse.ir.attributes import schema
from onnxfuse.ir.inline_functions import inline_functions
from onnxfuse.ir.opset_adapters import ADAPTERS, LACKING, NEUTRAL_DEFAULTS, Place, Refused, Surroundings
from onnxfuse.ir.protos import (
    ONNX_DOMAINS,
    drop_constant_inputs,
    graphs,
    import_opset,
    nodes,
    opset_of,
    subgraphs,
    tensors,
    without_initializers,
)
from onnxfuse.ir.validate import DTYPE_ATTRIBUTES, label


def convert_opset(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Return a model converted to a newer opset; `model` is not changed.  Functions are inlined where possible.

    A model whose opset is the same, newer or missing is returned unchanged.  Raises ModelError, which names the node,
    if a node cannot be expressed in the newer opset, or if onnxruntime has no kernel for the converted node.  The
    caller has to set the IR version by `state_ir_version`.
    """
    old = opset_of(model)
    if old == 0 or old >= opset:
        return model
    source = inline_functions(model).model
    result = without_initializers(source)
    drop_constant_inputs(result, {tensor.name for tensor in source.graph.initializer})
    parts = [(result.graph, source), *((each, _as_model(each)) for each in result.functions)]
    for part, model_of_part in parts:
        around = Surroundings(model_of_part, opset)
        try:
            _raise_nodes(part, opset_of(model_of_part), around)
        except Refused as error:
            raise ModelError(f"cannot convert the model from opset {old} to {opset}: {error}") from None
    _set_opset(result, opset)
    result.graph.initializer.extend(source.graph.initializer)
    return result


def describe_change(original: onnx.ModelProto, converted: onnx.ModelProto, reason: str) -> str:
    """Return a sentence for users: the converted model differs from the original because of `reason`."""
    old, new = opset_of(original), opset_of(converted)
    return f"raising the opset from {old} to {new} changed the model: {reason}; please report this model"


def lower_opset(model: onnx.ModelProto, oldest: int) -> None:
    """Lower a model's opset, in place, to the lowest one (at least `oldest`) in which all nodes keep their meaning."""
    version, dtypes = opset_of(model), _dtypes(model)
    found = [each for each in nodes(model.graph, *model.functions) if each.domain in ONNX_DOMAINS]
    while version > oldest and all(_has_node(each, version - 1, dtypes) for each in found):
        version -= 1
    _set_opset(model, version)
    state_ir_version(model)


def _set_opset(model: onnx.ModelProto, version: int) -> None:
    for part in (model, *model.functions):
        import_opset(part, version)


def state_ir_version(model: onnx.ModelProto) -> None:
    """Raise the IR version of a model, in place, to the lowest one that allows its opset."""
    needed = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset_of(model))])
    model.ir_version = max(model.ir_version, needed)


def _as_model(function: onnx.FunctionProto) -> onnx.ModelProto:
    """Return a model that has the function's nodes; the model's inputs and outputs have no types."""
    inputs, outputs = (
        [onnx.ValueInfoProto(name=name) for name in names] for names in (function.input, function.output)
    )
    graph = onnx.GraphProto(node=function.node, input=inputs, output=outputs)
    return onnx.ModelProto(opset_import=function.opset_import, graph=graph)


def _raise_nodes(part: onnx.GraphProto | onnx.FunctionProto, opset: int, around: Surroundings) -> None:
    """Convert all nodes of a graph or function from `opset` to the newer opset, in place."""
    written = [_raised(node, opset, around) for node in part.node]
    if any(len(each) > 1 for each in written):
        nodes_in_order = [node for each in written for node in each]
        del part.node[:]
        part.node.extend(nodes_in_order)


def _raised(node: onnx.NodeProto, opset: int, around: Surroundings) -> list[onnx.NodeProto]:
    """Convert a node to the newer opset, in place and version by version; return it with the nodes added around it."""
    for inner in subgraphs(node):
        _raise_nodes(inner, opset, around)
    before: list[onnx.NodeProto] = []
    after: list[onnx.NodeProto] = []
    name, op = label(node), node.op_type
    while node.domain in ONNX_DOMAINS and (version := _next_version(node.op_type, opset, around.opset)):
        place = Place(node, around)
        try:
            _adapt(place, version)
        except Refused as error:
            raise Refused(f"{name} ({op}): {error}" if node.name else f"{name}: {error}") from None
        before += [each for new in place.before for each in _raised(new, version, around)]
        after = [each for new in place.after for each in _raised(new, version, around)] + after
        opset = version
    return [*before, node, *after]


def _adapt(place: Place, version: int) -> None:
    op = place.node.op_type
    if LACKING.get(op) == version:
        raise Refused(f"onnxruntime has no kernel for {op} from opset {version} on")
    if (op, version) in ADAPTERS:
        ADAPTERS[op, version](place)
    elif differences := changes(op, version):
        raise Refused(f"opset {version} changes {differences[0]}, and onnxfuse has no rewriting for that")


@functools.cache
def _next_version(op: str, opset: int, newest: int) -> int | None:
    """Return the next opset, up to `newest`, that defines a new version of an operator; None if there is none."""
    return next((version for version in range(opset + 1, newest + 1) if _is_changed(op, version)), None)


@functools.cache
def _is_changed(op: str, version: int) -> bool:
    """Return whether an opset defines a new version of an operator."""
    old, new = schema(op, version - 1), schema(op, version)
    if old is None:  # ONNX does not define this operator; onnxruntime adds it to the ONNX domain
        return (op, version) in ADAPTERS or LACKING.get(op) == version
    return new is None or old.since_version != new.since_version


@functools.cache
def changes(op: str, version: int) -> tuple[str, ...]:
    """Return, as texts, the attributes, inputs and outputs of an operator that an opset changes.

    Changes that keep older nodes valid are omitted: more dtypes, optional inputs, and attributes in NEUTRAL_DEFAULTS.
    """
    old, new = schema(op, version - 1), schema(op, version)
    if old is None or new is None or new.deprecated:
        return (f"{op}, which one of both opsets does not have",)
    return tuple(_changed_attributes(old, new)) + tuple(_changed_operands(old, new))


def _changed_attributes(old: OpSchema, new: OpSchema) -> Iterator[str]:
    for name in sorted({*old.attributes, *new.attributes}):
        before, after = old.attributes.get(name), new.attributes.get(name)
        if before is None and after is not None:
            is_same = not after.required and (not after.default_value.name or (old.name, name) in NEUTRAL_DEFAULTS)
        else:
            is_same = before is not None and after is not None and before.default_value == after.default_value
        if not is_same:
            yield f"the attribute '{name}' of {old.name}"


def _changed_operands(old: OpSchema, new: OpSchema) -> Iterator[str]:
    optional = OpSchema.FormalParameterOption.Optional
    for what, before, after in (("input", old.inputs, new.inputs), ("output", old.outputs, new.outputs)):
        for one, other in zip(before, after, strict=False):
            if not set(one.types) <= set(other.types) or other.option not in (one.option, optional):
                yield f"the {what} '{one.name}' of {old.name}"
        rest = (*before[len(after) :], *(each for each in after[len(before) :] if each.option != optional))
        yield from (f"the {what} '{each.name}' of {old.name}" for each in rest)


# --- lower the opset ---------------------------------------------------------------------------------------------


def _has_node(node: onnx.NodeProto, opset: int, dtypes: frozenset[str]) -> bool:
    """Return whether a node valid in opset + 1 is also valid in `opset`, given the dtypes that the model uses."""
    op = node.op_type
    if not _is_changed(op, opset + 1):
        return schema(op, opset) is not None or schema(op, opset + 1) is None
    old = schema(op, opset)
    if old is None or (op, opset + 1) in ADAPTERS or changes(op, opset + 1) or _widened(op, opset + 1) & dtypes:
        return False
    attributes = all(each.name in old.attributes for each in node.attribute)
    return attributes and len(node.input) <= old.max_input and len(node.output) <= old.max_output


@functools.cache
def _widened(op: str, version: int) -> frozenset[str]:
    """Return the dtypes that a version of an operator accepts, but the previous version does not."""
    old, new = schema(op, version - 1), schema(op, version)
    assert old is not None and new is not None
    formals = zip((*old.inputs, *old.outputs), (*new.inputs, *new.outputs), strict=False)
    return frozenset(dtype for before, after in formals for dtype in set(after.types) - set(before.types))


def _dtypes(model: onnx.ModelProto) -> frozenset[str]:
    """Return the dtypes of a model's inputs, outputs, stored tensors and dtype attributes, such as "tensor(float)"."""
    found = {each.data_type for each in tensors(model.graph, *model.functions)}
    found |= {each.type.tensor_type.elem_type for part in graphs(model.graph) for each in (*part.input, *part.output)}
    attributes = (each for node in nodes(model.graph, *model.functions) for each in node.attribute)
    found |= {each.i for each in attributes if each.name in DTYPE_ATTRIBUTES}
    return frozenset(f"tensor({TensorProto.DataType.Name(number).lower()})" for number in found)
