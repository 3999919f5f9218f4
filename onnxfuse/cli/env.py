"""The command `onnxfuse env`."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import click

from onnxfuse.cli.options import examples
from onnxfuse.cli.terminal import echo, json_option, print_json, show_text
from onnxfuse.version import __version__

PACKAGES: Final = (
    "onnx", "onnx-graphsurgeon", "onnxruntime", "onnxruntime-gpu", "numpy", "cupy-cuda13x", "click", "rich",
)  # fmt: skip


@click.command("env", epilog=examples("onnxfuse env"))
@json_option
def env_command(as_json: bool) -> None:
    """Show versions, and which do not fit together."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from onnxfuse.packages import extending_packages
    from onnxfuse.runtime import installed
    from onnxfuse.runtime.native_library import library_path

    rows = {"onnxfuse": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:
            rows[package] = "not installed"
    rows |= {name: f"{found} (adds fusions or kernels)" for name, found in extending_packages().items()}
    rows["native library"] = str(library_path() or "not built")
    rows |= {name: value or "not found" for name, value in installed.cuda_versions().items()}
    wrong = installed.misfits()
    with suppress(ImportError):
        import onnxruntime

        rows["providers"] = ", ".join(onnxruntime.get_available_providers())
        if why := installed.falls_back():
            wrong.append(f"sessions run on the CPU, although there is a GPU: {why}")
    if as_json:
        print_json({**rows, "misfits": wrong})
        return
    for name, value in rows.items():
        echo(f"{name:20} {value}")
    for sentence in wrong:
        show_text(f"does not fit: {sentence}")
