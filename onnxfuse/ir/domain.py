"""The domain and version of the operators that onnxfuse writes."""

from __future__ import annotations

import onnx

from onnxfuse.errors import ModelError

DOMAIN: str = "onnxfuse"
DOMAIN_VERSION: int = 1


def check_version(model: onnx.ModelProto) -> None:
    """Raise ModelError for a model that has operators of onnxfuse in a newer version than this one.

    A model that an onnxruntime session wrote imports every domain that is registered in the process, in version 1000.
    """
    has_fused = any(each.domain == DOMAIN for each in (*model.functions, *model.graph.node))
    for opset in model.opset_import if has_fused else ():
        if opset.domain == DOMAIN and opset.version > DOMAIN_VERSION:
            raise ModelError(
                f"the model uses version {opset.version} of the operators of domain {DOMAIN}; this onnxfuse supports "
                f"version {DOMAIN_VERSION}: install a newer onnxfuse"
            )
