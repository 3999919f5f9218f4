"""The body of a channels-last node: Transposes in front of the operators that it had, and behind them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.node import AttributeValue
from onnxfuse.layout.axes import Perm, inverse


@dataclass(frozen=True)
class Body:
    """Operators of channels-first tensors, as a function has them."""

    operands: tuple[str, ...]
    nodes: tuple[onnx.NodeProto, ...]
    outputs: tuple[str, ...]
    imports: tuple[onnx.OperatorSetIdProto, ...]
    doc: str = ""


def body_of_function(function: onnx.FunctionProto) -> Body:
    """Return the body of a fused node's function."""
    return Body(
        tuple(function.input), tuple(function.node), tuple(function.output), tuple(function.opset_import),
        function.doc_string,
    )  # fmt: skip


def body_of_node(
    node: onnx.NodeProto, operands: Mapping[str, str], constants: Iterable[onnx.TensorProto], opset: int
) -> Body:
    """Return the body that is one node with one output.

    `operands` names its inputs, by the names of their tensors; `constants` are other inputs, which the body holds.
    """
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.name = ""
    inner.ClearField("metadata_props")
    nodes: list[onnx.NodeProto] = []
    names = dict(operands)
    for tensor in constants:
        names[tensor.name] = f"constant_{len(nodes)}"
        nodes.append(helper.make_node("Constant", [], [names[tensor.name]], value=_unnamed(tensor)))
    inner.input[:] = [names[name] if name else "" for name in node.input]
    inner.output[:] = ["y"]
    return Body(tuple(operands.values()), (*nodes, inner), ("y",), (helper.make_opsetid("", opset),))


def channels_last_function(
    name: str, body: Body, perms: Mapping[str, Perm], output_perms: Mapping[str, Perm], attributes: Sequence[str]
) -> onnx.FunctionProto:
    """Return a function whose operands and outputs are transposed versions of those of `body`.

    `perms` and `output_perms` are the perms of the Transposes that made them from those that the body has, by the names
    in the body; others are as in the body.  `attributes` are the names of the attributes of the node that calls it.
    """
    taken = {*body.operands, *(each for node in body.nodes for each in (*node.input, *node.output))}
    renamed, first, last, outputs = dict[str, str](), list[onnx.NodeProto](), list[onnx.NodeProto](), list[str]()
    for operand in body.operands:
        if operand in perms:
            renamed[operand] = _new_name(f"{operand}_first", taken)
            first.append(helper.make_node("Transpose", [operand], [renamed[operand]], perm=inverse(perms[operand])))
    for output in body.outputs:
        outputs.append(_new_name(f"{output}_last", taken) if output in output_perms else output)
        if output in output_perms:
            last.append(helper.make_node("Transpose", [output], [outputs[-1]], perm=output_perms[output]))
    return helper.make_function(
        DOMAIN, name, list(body.operands), outputs, [*first, *_renamed(body.nodes, renamed), *last],
        list(body.imports), sorted(attributes), doc_string=body.doc,
    )  # fmt: skip


def followed_by(
    body: onnx.FunctionProto,
    op: str,
    attributes: Sequence[str],
    operand: str = "",
    values: Mapping[str, AttributeValue] | None = None,
) -> onnx.FunctionProto:
    """Return a body followed by an operator of its result, with its values numbered as fusing numbers them.

    The operator also reads a new `operand` if there is one, and has the attributes `values`.  `attributes` are the
    names of the attributes of the node that calls the function.
    """
    result = onnx.FunctionProto()
    result.CopyFrom(body)
    end = _next_value(body)
    operands = [body.output[0], operand] if operand else [body.output[0]]
    result.input.extend(operands[1:])
    node = helper.make_node(op, operands, [end], domain="")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in (values or {}).items())
    result.node.append(node)
    result.output[:] = [end]
    result.attribute[:] = sorted(attributes)
    return result


def times(body: onnx.FunctionProto, value: str) -> onnx.FunctionProto:
    """Return a body whose result is multiplied by another one of its values."""
    result = onnx.FunctionProto()
    result.CopyFrom(body)
    end = _next_value(body)
    result.node.append(helper.make_node("Mul", [value, body.output[0]], [end], domain=""))
    result.output[:] = [end]
    return result


def _next_value(body: onnx.FunctionProto) -> str:
    """Return a new name for a value, as fusing numbers values."""
    taken = {*body.input, *(name for node in body.node for name in (*node.input, *node.output))}
    return next(name for i in itertools.count(1) if (name := f"t{i}") not in taken)


def behind(
    body: onnx.FunctionProto, operand: str, before: onnx.FunctionProto, attributes: Sequence[str]
) -> onnx.FunctionProto:
    """Return a body in which another one computes an operand, from what that other one reads.

    Of that, what `body` reads too has the same name in both; the rest follows the operands of `body`.  `attributes` are
    the names of the attributes of the node that calls the function.
    """
    result = onnx.FunctionProto()
    result.CopyFrom(body)
    taken = {*body.input, *before.input, *(name for node in body.node for name in (*node.input, *node.output))}
    names = {name: _new_name(name, taken) for node in before.node for name in node.output}
    first = _renamed(before.node, names)
    for node in first:
        node.output[:] = [names[name] for name in node.output]
    del result.node[:]
    result.node.extend([*first, *_renamed(body.node, {operand: names[before.output[0]]})])
    result.input.extend(name for name in before.input if name not in body.input)
    result.attribute[:] = sorted(attributes)
    return result


def with_operands(body: onnx.FunctionProto, names: Mapping[str, str]) -> onnx.FunctionProto:
    """Return a body with other names for operands, which none of its values has."""
    result = onnx.FunctionProto()
    result.CopyFrom(body)
    result.input[:] = [names.get(name, name) for name in body.input]
    del result.node[:]
    result.node.extend(_renamed(body.node, names))
    return result


def _renamed(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> list[onnx.NodeProto]:
    result = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [names.get(name, name) for name in node.input]
        result.append(copy)
    return result


def _new_name(stem: str, taken: set[str]) -> str:
    while stem in taken:
        stem += "_"
    taken.add(stem)
    return stem


def _unnamed(tensor: onnx.TensorProto) -> onnx.TensorProto:
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.name = ""
    return copy
