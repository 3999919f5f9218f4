"""Function bodies of channels-last nodes: the operators of the channels-first node, between Transposes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from onnxfuse.algebra.index_maps import inverse
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.layout.axes import Perm


@dataclass(frozen=True)
class Body:
    """The operators of a function on channels-first tensors."""

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
    """Return a body that consists of one node with one output.

    `operands` maps the node's input tensors to operand names; `constants` are its other inputs, which become part of
    the body.
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
    """Return a function with the operators of `body`, whose operands and outputs are transposed.

    `perms` and `output_perms` map names in `body` to the perms that convert the body's layout to the function's; other
    operands and outputs keep their layout.  `attributes` holds the names of the calling node's attributes.
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


def function_of_nodes(operands: Sequence[str], *nodes: onnx.NodeProto) -> onnx.FunctionProto:
    """Return a function of these ONNX operators, the last of which computes the result; see `chained`."""
    return helper.make_function(DOMAIN, "", operands, list(nodes[-1].output), list(nodes), [])


def chained(before: onnx.FunctionProto, after: onnx.FunctionProto, operand: str = "x") -> onnx.FunctionProto:
    """Return a function in which the result of `before` becomes an operand of `after`; operands of one name are shared.

    Values of `after` are numbered as in a fused function.
    """
    result = onnx.FunctionProto()
    result.CopyFrom(before)
    result.input.extend(name for name in after.input if name not in (operand, *before.input))
    taken = {*result.input, *(name for node in before.node for name in (*node.input, *node.output))}
    names = {operand: before.output[0]}
    for name in (name for node in after.node for name in node.output):
        names[name] = next(new for i in itertools.count(1) if (new := f"t{i}") not in taken)
        taken.add(names[name])
    result.node.extend(_renamed(after.node, names))
    result.output[:] = [names[name] for name in after.output]
    imported = {each.domain for each in before.opset_import}
    result.opset_import.extend(each for each in after.opset_import if each.domain not in imported)
    return result


def with_operands(body: onnx.FunctionProto, names: Mapping[str, str]) -> onnx.FunctionProto:
    """Return a body with operands renamed; no value of the body has one of the new names."""
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
        copy.output[:] = [names.get(name, name) for name in node.output]
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
