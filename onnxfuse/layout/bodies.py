"""Function bodies of channels-last nodes: the operators of the channels-first node, between Transposes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.numpy_helper
from onnx import helper

from onnxfuse.algebra.index_maps import inverse
from onnxfuse.ir.domain import DOMAIN
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.graph import take_name
from onnxfuse.layout.axes import Perm
from onnxfuse.rewrite.chain_bodies import function_of, renamed


def body_of_node(
    node: onnx.NodeProto, operands: Mapping[str, str], constants: Mapping[str, Array], opset: int
) -> onnx.FunctionProto:
    """Return a function that consists of one node with one output.

    `operands` maps the node's input tensors to operand names; `constants` are its other inputs, which become part of
    the body.
    """
    names = {**operands, **{name: f"constant_{i}" for i, name in enumerate(constants)}}
    stored = {names[name]: onnx.numpy_helper.from_array(value) for name, value in constants.items()}
    (inner,) = renamed([node], names)
    inner.name, inner.output[:] = "", ["y"]
    inner.ClearField("metadata_props")
    nodes = [helper.make_node("Constant", [], [name], value=value) for name, value in stored.items()]
    return function_of(list(operands.values()), [*nodes, inner], opset)


def channels_last_function(
    body: onnx.FunctionProto, perms: Mapping[str, Perm], output_perms: Mapping[str, Perm]
) -> onnx.FunctionProto:
    """Return a function that computes `body` from transposed operands, and returns transposed outputs.

    `perms` and `output_perms` map names in `body` to the perms that convert the body's layout to the function's; other
    operands and outputs keep their layout.
    """
    taken = {*body.input, *(each for node in body.node for each in (*node.input, *node.output))}
    first = {name: take_name(taken, f"{name}_first") for name in body.input if name in perms}
    last = {name: take_name(taken, f"{name}_last") for name in body.output if name in output_perms}
    nodes = [
        *(helper.make_node("Transpose", [name], [new], perm=inverse(perms[name])) for name, new in first.items()),
        *renamed(body.node, first),
        *(helper.make_node("Transpose", [name], [new], perm=output_perms[name]) for name, new in last.items()),
    ]
    return helper.make_function(
        DOMAIN, body.name, body.input, [last.get(name, name) for name in body.output], nodes, body.opset_import,
        body.attribute, doc_string=body.doc_string,
    )  # fmt: skip
