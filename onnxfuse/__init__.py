"""Find the subgraphs of an ONNX model that one kernel could run, and replace them by fused nodes."""

from importlib import import_module
from typing import TYPE_CHECKING

from onnxfuse.version import __version__ as __version__

if TYPE_CHECKING:
    from onnxfuse import dsl
    from onnxfuse.dsl.declaration import *  # noqa: F403
    from onnxfuse.dsl.words import *  # noqa: F403
    from onnxfuse.errors import (
        KernelError,
        MissingPackageError,
        ModelError,
        OnnxfuseError,
        PatternError,
        UsageError,
        VerificationError,
    )
    from onnxfuse.genai.optimize_folder import OptimizedModel, optimize_folder
    from onnxfuse.inference_session import InferenceSession
    from onnxfuse.optimizer import optimize
    from onnxfuse.report.report import Report
    from onnxfuse.runtime.kernel_folders import add_kernels
    from onnxfuse.session import NodeDispatch, explain_session, register
    from onnxfuse.sessions_of_packages import all_sessions
    from onnxfuse.unfuse_model import unfuse

    __all__ = [
        *dsl.__all__,
        "InferenceSession",
        "KernelError",
        "MissingPackageError",
        "ModelError",
        "NodeDispatch",
        "OnnxfuseError",
        "OptimizedModel",
        "PatternError",
        "Report",
        "UsageError",
        "VerificationError",
        "add_kernels",
        "all_sessions",
        "explain_session",
        "optimize",
        "optimize_folder",
        "register",
        "unfuse",
    ]

# The public names by module, except those of the pattern language, which are in onnxfuse.dsl.
_MODULES = {
    "InferenceSession": "onnxfuse.inference_session",
    "KernelError": "onnxfuse.errors",
    "MissingPackageError": "onnxfuse.errors",
    "ModelError": "onnxfuse.errors",
    "NodeDispatch": "onnxfuse.session",
    "OnnxfuseError": "onnxfuse.errors",
    "OptimizedModel": "onnxfuse.genai.optimize_folder",
    "PatternError": "onnxfuse.errors",
    "Report": "onnxfuse.report.report",
    "UsageError": "onnxfuse.errors",
    "VerificationError": "onnxfuse.errors",
    "add_kernels": "onnxfuse.runtime.kernel_folders",
    "all_sessions": "onnxfuse.sessions_of_packages",
    "explain_session": "onnxfuse.session",
    "optimize": "onnxfuse.optimizer",
    "optimize_folder": "onnxfuse.genai.optimize_folder",
    "register": "onnxfuse.session",
    "unfuse": "onnxfuse.unfuse_model",
}


def __getattr__(name: str) -> object:
    """Import the module of a name when the name is first used.

    So `onnxfuse --version` imports neither onnx nor NumPy, and optimizing without verification needs no onnxruntime.
    """
    if name in _MODULES:
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value
    if name == "__all__" or not name.startswith("_"):
        words = import_module("onnxfuse.dsl")
        if name == "__all__":
            return sorted({*_MODULES, *words.__all__})
        if name in words.__all__:
            value = globals()[name] = getattr(words, name)
            return value
    raise AttributeError(f"module 'onnxfuse' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})  # type: ignore[misc]
