"""The domain of onnxfuse's operators, its version, and the domain of onnxruntime's operators."""

from __future__ import annotations

from typing import Final

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.ir.protos import nodes

DOMAIN: str = "onnxfuse"
DOMAIN_VERSION: int = 1
UNVERSIONED: Final = 1000  # the version that onnxruntime writes for every domain that is registered in its process
ORT_DOMAIN: Final = "com.microsoft"  # the domain of onnxruntime's own operators
PROLOGUE: Final = "prologue"  # attribute of a fused node: the name of the norm that was fused into it
OF_NORM: Final = "norm_"  # prefix of the operand names of a norm that was fused into a node, except x
TEXTS: Final = frozenset({"fusion", "operands"})  # string attributes of every fused node


def is_fused(node: onnx.NodeProto) -> bool:
    """Return whether onnxfuse wrote a node; users' own functions can have onnxfuse's domain, too."""
    if node.domain != DOMAIN:
        return False
    return {each.name for each in node.attribute if each.type == onnx.AttributeProto.STRING} >= TEXTS


def is_whole(node: onnx.NodeProto, body: onnx.FunctionProto | None) -> bool:
    """Return whether a fused node is complete: it has its body, its operands, and all attributes that it lists."""
    if body is None or not is_fused(node):
        return False
    texts = {each.name: each.s.decode(errors="replace") for each in node.attribute}
    operands, named = texts["operands"].split(), texts.get("attributes", "").split()
    fits = len(operands) == len(node.input) == len(body.input) and len(node.output) <= len(body.output)
    return bool(operands) and fits and texts.keys() >= set(named)


def check_version(model: onnx.ModelProto) -> None:
    """Raise ModelError if a model's fused nodes have a newer version than DOMAIN_VERSION.

    A model without fused nodes is allowed to import any version, and any model is allowed to import UNVERSIONED.
    """
    has_fused = any(map(is_fused, nodes(model.graph, *model.functions)))
    for opset in model.opset_import if has_fused else ():
        if opset.domain == DOMAIN and opset.version > DOMAIN_VERSION and opset.version != UNVERSIONED:
            raise ModelError(
                f"the model uses version {opset.version} of the operators of domain {DOMAIN}; this onnxfuse supports "
                f"version {DOMAIN_VERSION}: install a newer onnxfuse"
            )
