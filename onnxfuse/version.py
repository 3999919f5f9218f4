"""The version of onnxfuse, which files and reports name."""

from typing import Final

__version__: Final = "0.1.0"
