"""The version of onnxfuse in files and reports: the git tag from which it was installed."""

from typing import Final

try:
    from onnxfuse._version import version  # written by setup.py
except ImportError:  # sources without git, or without setuptools-scm
    version = "0.1.0"

__version__: Final[str] = version
