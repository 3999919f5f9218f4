"""Finds the subgraphs of an ONNX model that one kernel could run, and replaces them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from onnxfuse.dsl import (
    Fusion,
    attribute,
    choose,
    contrib,
    either,
    filled,
    fusion,
    given,
    narrow,
    op,
    part,
    rearrange,
    require,
    results,
    scalar,
    scaled,
    shared,
    size,
    stored,
    tensor,
    weight,
    wide,
)
from onnxfuse.errors import ModelError, OnnxfuseError, PatternError, UsageError, VerificationError
from onnxfuse.optimize import optimize
from onnxfuse.report import Report

if TYPE_CHECKING:
    from onnxfuse.provider.session import InferenceSession, explain_session, register

__version__ = "0.1.0"

__all__ = [
    "Fusion",
    "InferenceSession",
    "ModelError",
    "OnnxfuseError",
    "PatternError",
    "Report",
    "UsageError",
    "VerificationError",
    "attribute",
    "choose",
    "contrib",
    "either",
    "explain_session",
    "filled",
    "fusion",
    "given",
    "narrow",
    "op",
    "optimize",
    "part",
    "rearrange",
    "register",
    "require",
    "results",
    "scalar",
    "scaled",
    "shared",
    "size",
    "stored",
    "tensor",
    "weight",
    "wide",
]


def __getattr__(name: str) -> Any:
    """Sessions need onnxruntime, which optimizing without verification does not: loaded when asked for."""
    if name in ("InferenceSession", "explain_session", "register"):
        return getattr(import_module("onnxfuse.provider.session"), name)
    raise AttributeError(f"module 'onnxfuse' has no attribute '{name}'")
