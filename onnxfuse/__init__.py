"""Finds the subgraphs of an ONNX model that one kernel could run, and replaces them."""

from onnxfuse.dsl import (
    Fusion,
    attribute,
    choose,
    contrib,
    either,
    fusion,
    given,
    narrow,
    op,
    rearrange,
    require,
    scalar,
    scaled,
    shared,
    size,
    sizes,
    stored,
    tensor,
    weight,
    wide,
)
from onnxfuse.errors import ModelError, OnnxfuseError, PatternError, UsageError, VerificationError
from onnxfuse.optimize import optimize
from onnxfuse.report import Report

__version__ = "0.1.0"

__all__ = [
    "Fusion",
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
    "fusion",
    "given",
    "narrow",
    "op",
    "optimize",
    "rearrange",
    "require",
    "scalar",
    "scaled",
    "shared",
    "size",
    "sizes",
    "stored",
    "tensor",
    "weight",
    "wide",
]
