"""Nodes that draw random numbers: outputs of models that have some cannot be compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
from onnx.external_data_helper import uses_external_data

from onnxfuse.model.protos import nodes, tensors

DRAWS = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}


def drawing(model: onnx.ModelProto, given: Mapping[str, Any], *, seeded: bool = False) -> str | None:
    """A sentence about a node, at any depth or in a function, that draws other numbers each time; None without one.

    `given` are inputs by name: Dropout draws only where its training_mode, which may be one of them, is true.  One
    with a seed draws the same in every session, but, which `seeded` asks for, not in every run of a session.
    """
    for node in nodes(model.graph, *model.functions):
        draws = node.op_type in DRAWS or (node.op_type == "Dropout" and _is_training(model, node, given))
        if draws and node.domain in ("", "ai.onnx") and (seeded or all(a.name != "seed" for a in node.attribute)):
            name = node.name or node.output[0]
            return f"{node.op_type} node '{name}' draws random numbers: no two runs are the same"
    return None


def _is_training(model: onnx.ModelProto, dropout: onnx.NodeProto, given: Mapping[str, Any]) -> bool:
    """Whether training_mode, an input since opset 12, is not known to be false."""
    flag = dropout.input[2] if len(dropout.input) > 2 else ""
    if not flag or flag in given:
        return bool(flag) and bool(given[flag])
    stored = {t.name: t for t in tensors(model.graph, *model.functions) if t.name}
    for node in nodes(model.graph, *model.functions):
        if node.op_type == "Constant" and flag in node.output and node.attribute[0].name == "value":
            stored[flag] = node.attribute[0].t
    known = flag in stored and not uses_external_data(stored[flag])
    return not known or bool(onnx.numpy_helper.to_array(stored[flag]))
