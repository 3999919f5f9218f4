"""The machine of a benchmark: its device and the versions of the packages that affect times."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from onnxfuse.errors import first_line
from onnxfuse.tuning.bound_session import Provider

PACKAGES: Final = ("onnxfuse", "onnx", "onnxruntime", "onnxruntime-gpu", "cupy-cuda13x", "numpy")


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of Python, of the packages that affect times, and of `more` packages."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, *more):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def device(provider: Provider) -> dict[str, str]:
    """Return the name of the processor or of GPU 0, and its driver."""
    if provider == "cpu":
        return {"name": _processor(), "driver": ""}
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
        name, _, driver = answer.strip().partition(", ")
    except (OSError, subprocess.SubprocessError) as error:
        name, driver = f"unknown ({first_line(error)})", ""
    return {"name": name, "driver": driver}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
