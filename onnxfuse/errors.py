"""The one exception that users meet, and its kinds."""

from __future__ import annotations


class OnnxfuseError(Exception):
    """Something the user can act on.  `str(error)` is one line: what was wrong, what was expected, what to do."""


class ModelError(OnnxfuseError):
    """The model file cannot be read, is not valid ONNX, or cannot be written."""


class UsageError(OnnxfuseError):
    """A name or an option that does not exist; the command line exits with 2."""


class PatternError(OnnxfuseError):
    """A fusion is declared in a way that cannot work; carries the fusion's file and line in its text."""


class VerificationError(OnnxfuseError):
    """The models could not be compared, or they differ."""
