"""Function bodies of channels-last nodes: the operators of the channels-first node, between Transposes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from onnxfuse.algebra.index_maps import inverse
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.graph import take_name
from onnxfuse.layout.axes import Perm
from onnxfuse.rewrite.chain_bodies import renamed


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
    first = {name: take_name(taken, f"{name}_first") for name in body.operands if name in perms}
    last = {name: take_name(taken, f"{name}_last") for name in body.outputs if name in output_perms}
    nodes = [
        *(helper.make_node("Transpose", [name], [new], perm=inverse(perms[name])) for name, new in first.items()),
        *renamed(body.nodes, first),
        *(helper.make_node("Transpose", [name], [new], perm=output_perms[name]) for name, new in last.items()),
    ]
    return helper.make_function(
        DOMAIN, name, list(body.operands), [last.get(name, name) for name in body.outputs], nodes,
        list(body.imports), sorted(attributes), doc_string=body.doc,
    )  # fmt: skip


def _unnamed(tensor: onnx.TensorProto) -> onnx.TensorProto:
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.name = ""
    return copy
