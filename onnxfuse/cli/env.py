"""The command `onnxfuse env`."""

from __future__ import annotations

from typing import Final

import click

from onnxfuse.cli.options import examples
from onnxfuse.cli.terminal import echo
from onnxfuse.version import __version__

PACKAGES: Final = (
    "onnx", "onnx-graphsurgeon", "onnxruntime", "onnxruntime-gpu", "numpy", "cupy-cuda13x", "click", "rich",
)  # fmt: skip


@click.command("env", epilog=examples("onnxfuse env"))
def env_command() -> None:
    """Show the versions that a bug report should name."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from onnxfuse.packages import extending_packages
    from onnxfuse.runtime.native_library import library_path

    rows = {"onnxfuse": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            rows[package] = "not installed"
    rows |= {name: f"{found} (adds fusions or kernels)" for name, found in extending_packages().items()}
    rows["native library"] = str(library_path() or "not built")
    for name, value in rows.items():
        echo(f"{name:20} {value}")
    try:
        import onnxruntime
    except ImportError:
        return
    echo(f"{'providers':20} {', '.join(onnxruntime.get_available_providers())}")
