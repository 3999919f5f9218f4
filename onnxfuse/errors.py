"""The exceptions that users see, and functions that shorten and escape the texts of exceptions."""

from __future__ import annotations

import re
from typing import Final

NO_ONNXRUNTIME: Final = (
    "onnxruntime is not installed, so no model can run; pip install 'onnxruntime-gpu[cuda,cudnn]' for NVIDIA GPUs, "
    "or pip install onnxruntime"
)
NO_ONNXRUNTIME_TO_COMPARE: Final = "onnxruntime is not installed, so nothing was compared; pip install onnxruntime"


# The characters that Unicode calls default ignorable, and the blank pattern of Braille: `str.isprintable` calls these
# printable, but nothing is drawn for them.
INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def printable(text: str, keep: str = "") -> str:
    r"""Return a text with all non-printing and invisible characters, except those in `keep`, written as escapes.

    Names in models are untrusted: control characters (`\x1b`) can control the terminal, direction marks (`\u202e`)
    reorder the text on the screen, and invisible characters (`\u3164`) make different names look equal.
    """
    if not text.isprintable():
        text = "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)
    return text if text.isascii() else INVISIBLE.sub(lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def shortened(text: str, most: int = 60) -> str:
    """Return a text; if it has more than `most` characters, dots replace its middle."""
    return text if len(text) <= most else f"{text[: most - 20]}...{text[-10:]}"


class OnnxfuseError(Exception):
    """An error that the user can act on.  Its text is one line: the finding, the requirement, and the remedy."""

    def __str__(self) -> str:
        """Return the text; line breaks and control characters in the names that it quotes are written as escapes."""
        return printable(super().__str__())


class ModelError(OnnxfuseError):
    """A model file that cannot be read, is not valid ONNX, or cannot be written."""


class UsageError(OnnxfuseError):
    """A name or an option that does not exist, or does not fit the model; the command line exits with 2."""


class MissingPackageError(UsageError, ImportError):
    """An optional package that is not installed; its text says what to install."""


class PatternError(OnnxfuseError):
    """Fusions that do not load, or whose declaration is wrong; its text names the file and line, or the package."""


class KernelError(OnnxfuseError):
    """Kernels that are missing, do not load or do not compile; its text names the source file, or the package.

    If a kernel does not compile, the text has the lines of the compiler's log.
    """

    def __str__(self) -> str:
        """Return the text; control characters other than line breaks are written as escapes."""
        return printable(Exception.__str__(self), keep="\n")


class VerificationError(OnnxfuseError):
    """Two models that could not be compared, or that differ."""


class NothingRunsError(VerificationError):
    """No model can run here: onnxruntime is missing, or its process does not start."""


def described(error: BaseException) -> str:
    """Return the class of an exception and the first line of its text."""
    return f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text, without onnxruntime's error class and C++ source position."""
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    line = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", line)
    return re.sub(r"/\S+\.(h|cc):\d+ .*?\) (?=\w)", "", line)[:300]
