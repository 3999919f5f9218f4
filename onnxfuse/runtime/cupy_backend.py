"""Load CuPy, which times kernels and the ONNX functions of fused nodes; sessions do not need CuPy."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from onnxfuse.runtime.cache_folder import PRIVATE, why_untrusted

log: Final = logging.getLogger("onnxfuse")
T = TypeVar("T")


def cupy_module() -> Any:
    """Import and return CuPy, after making its cache folder, without which the import would fail.

    If the folder cannot be made, or if other users can write to it, CuPy caches compiled code only in memory.  Raises
    ImportError if CuPy is not installed.
    """
    try:
        folder = Path(os.environ.get("CUPY_CACHE_DIR", "~/.cupy/kernel_cache")).expanduser()
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if folder != Path(os.sep) and (why := why_untrusted(folder)):
            raise OSError(f"'{folder}' holds machine code, and {why}; empty it and run `chmod go-w` on it")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        log.warning("kernels are not cached on disk from now on: %s", error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        os.environ["CUPY_CACHE_DIR"] = os.sep  # this folder exists, and nothing is written into it
    return importlib.import_module("cupy")


def unavailable() -> str | None:
    """Return why CuPy cannot time kernels here; None if it can."""
    try:
        count = cupy_module().cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy cannot be imported ({error}); pip install cupy-cuda13x"
    except Exception as error:  # CuPy's errors have no common class
        return f"CuPy finds no usable CUDA: {error}"
    return None if count else "CuPy finds no GPU"


def retry_without_disk_cache(call: Callable[[], T]) -> T:
    """Return the result of `call`, which compiles through CuPy; if the disk fails, call it again with CuPy's cache off.

    The cache stays off until the process ends.
    """
    try:
        return call()
    except OSError as error:
        log.warning("kernels are not cached on disk from now on: %s", error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        return call()
