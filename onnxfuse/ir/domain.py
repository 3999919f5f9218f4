"""The domain and version of the operators that onnxfuse writes."""

from __future__ import annotations

from typing import Final

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.ir.protos import nodes

DOMAIN: str = "onnxfuse"
DOMAIN_VERSION: int = 1
TEXTS: Final = frozenset({"fusion", "operands"})  # attributes that every fused node has


def is_fused(node: onnx.NodeProto) -> bool:
    """Return whether onnxfuse wrote a node; others may have functions of their own in its domain."""
    if node.domain != DOMAIN:
        return False
    return {each.name for each in node.attribute if each.type == onnx.AttributeProto.STRING} >= TEXTS


def is_whole(node: onnx.NodeProto, body: onnx.FunctionProto | None) -> bool:
    """Return whether a node is a fused one that has its body, its operands and the attributes that it names."""
    if body is None or not is_fused(node):
        return False
    texts = {each.name: each.s.decode(errors="replace") for each in node.attribute}
    operands, named = texts["operands"].split(), texts.get("attributes", "").split()
    fits = len(operands) == len(node.input) == len(body.input) and len(node.output) <= len(body.output)
    return bool(operands) and fits and texts.keys() >= set(named)


def check_version(model: onnx.ModelProto) -> None:
    """Raise ModelError for a model that has operators of onnxfuse in a newer version than this one.

    A model that an onnxruntime session wrote imports every domain that is registered in the process, in version 1000.
    """
    has_fused = any(map(is_fused, nodes(model.graph, *model.functions)))
    for opset in model.opset_import if has_fused else ():
        if opset.domain == DOMAIN and opset.version > DOMAIN_VERSION:
            raise ModelError(
                f"the model uses version {opset.version} of the operators of domain {DOMAIN}; this onnxfuse supports "
                f"version {DOMAIN_VERSION}: install a newer onnxfuse"
            )
