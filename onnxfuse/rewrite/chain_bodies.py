"""Chain the functions of fused nodes: make one function that computes the results of two functions in sequence."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import helper

from onnxfuse.ir.domain import DOMAIN


def function_of(operands: Sequence[str], nodes: Sequence[onnx.NodeProto], opset: int = 0) -> onnx.FunctionProto:
    """Return a function that consists of `nodes`; the last node computes the function's results.

    The opset can be left out if the function is only passed to `chained` as its argument `after`.
    """
    imports = [helper.make_opsetid("", opset)] if opset else []
    return helper.make_function(DOMAIN, "", operands, nodes[-1].output, nodes, imports)


def chained(before: onnx.FunctionProto, after: onnx.FunctionProto, operand: str = "x") -> onnx.FunctionProto:
    """Return a function in which the first result of `before` is an operand of `after`.

    The returned function has the other operands of both.  It has the results of `after`, and then all results of
    `before` but the first.  If a name of `after` is taken in `before`, it is replaced by t1, t2 and so on, like the
    names in the functions of fused nodes.
    """
    result = onnx.FunctionProto()
    result.CopyFrom(before)
    taken = {*before.input, *(name for node in before.node for name in node.output)}
    names = {operand: before.output[0], "": ""}
    for name in (*after.input, *(name for node in after.node for name in node.output)):
        if name not in names:
            numbered = (f"t{i}" for i in itertools.count(1))
            names[name] = name if name not in taken else next(new for new in numbered if new not in taken)
            taken.add(names[name])
    result.input.extend(names[name] for name in after.input if name != operand)
    result.node.extend(renamed(after.node, names))
    result.output[:] = [*(names[name] for name in after.output), *before.output[1:]]
    imported = {each.domain for each in before.opset_import}
    result.opset_import.extend(each for each in after.opset_import if each.domain not in imported)
    return result


def with_operands(body: onnx.FunctionProto, names: Mapping[str, str]) -> onnx.FunctionProto:
    """Return a body with operands renamed; the new names must not be names of other values in the body."""
    result = onnx.FunctionProto()
    result.CopyFrom(body)
    result.input[:] = [names.get(name, name) for name in body.input]
    del result.node[:]
    result.node.extend(renamed(body.node, names))
    return result


def renamed(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> list[onnx.NodeProto]:
    """Return copies of nodes in which values have new names; values that are not in `names` keep theirs."""
    result = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.input[:] = [names.get(name, name) for name in node.input]
        copy.output[:] = [names.get(name, name) for name in node.output]
        result.append(copy)
    return result
