"""Where onnxfuse keeps files between processes: machine code and measurements."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

log: Final = logging.getLogger("onnxfuse")
_warned: Final[set[str]] = set()


def cache_folder() -> Path | None:
    """Return $ONNXFUSE_CACHE_DIR, or the folder onnxfuse in $XDG_CACHE_HOME or in ~/.cache; None without a home."""
    if chosen := os.environ.get("ONNXFUSE_CACHE_DIR"):
        return Path(chosen)
    standard = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if standard.is_absolute():  # the XDG specification says to ignore relative paths
        return standard / "onnxfuse"
    try:
        return Path.home() / ".cache" / "onnxfuse"
    except RuntimeError as error:
        warn_once(f"nothing is kept for later processes: {error}; set ONNXFUSE_CACHE_DIR to a folder")
        return None


def warn_once(message: str) -> None:
    """Log a warning unless it was logged before: a model has hundreds of nodes."""
    if message not in _warned:
        _warned.add(message)
        log.warning(message)
