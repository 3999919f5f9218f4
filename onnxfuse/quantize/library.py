"""Import onnxruntime's quantizers."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onnxfuse.errors import NO_ONNXRUNTIME, MissingPackageError, first_line

if TYPE_CHECKING:
    from types import ModuleType


def quantizer(module: str) -> ModuleType:
    """Import a module of onnxruntime's quantizers.  Raises MissingPackageError if it, or onnx_ir, is not installed."""
    try:
        with logging_unchanged():
            library = importlib.import_module(f"onnxruntime.quantization.{module}")
    except ImportError as error:
        if (error.name or "").startswith("onnx_ir"):
            raise MissingPackageError(
                "onnxruntime's quantizer needs the package onnx_ir; pip install onnx-ir"
            ) from error
        raise MissingPackageError(f"{NO_ONNXRUNTIME} ({first_line(error)})") from error
    logging.getLogger(library.__name__).setLevel(logging.WARNING)
    return library


@contextmanager
def logging_unchanged() -> Iterator[None]:
    """Suppress warnings in the `with` block, because quantizers print them; restore the root logger afterwards."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
