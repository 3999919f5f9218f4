"""Find nodes that draw random numbers: outputs that depend on such a node cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx.external_data_helper import uses_external_data

from onnxfuse.algebra.operators import RANDOM
from onnxfuse.ir.dtypes import Array
from onnxfuse.ir.protos import ONNX_DOMAINS, OneNode, nodes, tensors


def describe_random_node(model: onnx.ModelProto, given: Mapping[str, Array], *, seeded: bool = False) -> str | None:
    """Return a sentence about a node that draws random numbers in the graph, a subgraph or a function; None if none.

    `given` are inputs by name: Dropout draws numbers only if its training_mode, which can be an input, is true.
    A node with a seed draws the same numbers in every session, but new ones in every run of a session.  It counts only
    if `seeded` is true.
    """
    for node in nodes(model.graph, *model.functions):
        if _draws(model, node, given, seeded=seeded):
            return _described(node)
    return None


def _draws(model: onnx.ModelProto, node: onnx.NodeProto, given: Mapping[str, Array], *, seeded: bool = False) -> bool:
    is_random = node.op_type in RANDOM or (node.op_type == "Dropout" and _is_training(model, node, given))
    return is_random and node.domain in ONNX_DOMAINS and (seeded or all(a.name != "seed" for a in node.attribute))


def _described(node: onnx.NodeProto) -> str:
    return f"{node.op_type} node '{node.name or node.output[0]}' draws random numbers: no two runs are the same"


def random_outputs(model: onnx.ModelProto, given: Mapping[str, Array]) -> dict[str, str]:
    """Return a sentence for each graph output that depends on a node which draws new numbers each time.

    A node whose subgraph, or whose function, draws numbers counts as such a node.
    """
    if describe_random_node(model, given) is None:
        return {}
    random_functions = _random_functions(model, given)
    drawn: dict[str, str] = {}
    for node in model.graph.node:  # in execution order
        sentence = _sentence(model, node, given, random_functions)
        reads = {name for each in nodes(OneNode((node,))) for name in each.input}
        sentence = sentence or next((drawn[name] for name in sorted(reads & drawn.keys())), None)
        if sentence:
            drawn |= dict.fromkeys(node.output, sentence)
    return {o.name: drawn[o.name] for o in model.graph.output if o.name in drawn}


def _sentence(
    model: onnx.ModelProto, node: onnx.NodeProto, given: Mapping[str, Array], functions: Mapping[str, str]
) -> str | None:
    """Return a sentence on a node that draws numbers, or has such nodes in subgraphs or functions; None for others."""
    for inner in nodes(OneNode((node,))):
        called = functions.get(f"{inner.domain}::{inner.op_type}")
        if called or _draws(model, inner, given):
            return called or _described(inner)
    return None


def _random_functions(model: onnx.ModelProto, given: Mapping[str, Array]) -> dict[str, str]:
    """Return a sentence for each model-local function that draws numbers, itself or in a function that it calls."""
    found: dict[str, str] = {}
    for _ in model.functions:  # one pass per level of nested calls
        for function in model.functions:
            for node in function.node:
                if sentence := _sentence(model, node, given, found):
                    found[f"{function.domain}::{function.name}"] = sentence
    return found


def _is_training(model: onnx.ModelProto, dropout: onnx.NodeProto, given: Mapping[str, Array]) -> bool:
    """Return whether the training_mode of a Dropout, which is an input since opset 12, can be true."""
    flag = dropout.input[2] if len(dropout.input) > 2 else ""
    if not flag or flag in given:
        return bool(flag) and bool(given[flag])
    stored = {t.name: t for t in tensors(model.graph, *model.functions) if t.name}
    for node in nodes(model.graph, *model.functions):
        if node.op_type == "Constant" and flag in node.output and node.attribute[0].name == "value":
            stored[flag] = node.attribute[0].t
    known = flag in stored and not uses_external_data(stored[flag])
    return not known or bool(onnx.numpy_helper.to_array(stored[flag]))
