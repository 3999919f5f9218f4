"""Install packages of strangers for a test: modules and metadata in a folder on sys.path, as pip leaves them there."""

from __future__ import annotations

import runpy
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
import pytest

from onnxfuse.dsl import catalogue
from onnxfuse.runtime import hosts, kernel_folders

EXAMPLE = Path(__file__).parents[1] / "examples" / "package"
PATTERNS, KERNELS = EXAMPLE / "onnxfuse_snake" / "patterns", EXAMPLE / "onnxfuse_snake" / "kernels"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on sys.path; what is installed there, and the folders of kernels that are added, end with it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    before = set(sys.modules)
    monkeypatch.setattr(kernel_folders, "_added", [])
    forget()
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    for name in set(sys.modules) - before:
        found = getattr(sys.modules[name], "__file__", None) or ""
        if name.startswith("onnxfuse_kernels_") or found.startswith(str(tmp_path)):
            del sys.modules[name]
    forget()


def forget() -> None:
    """Let onnxfuse look for fusions and kernels again."""
    for cached in catalogue.installed, kernel_folders._kernel_folders, hosts._host:
        cached.cache_clear()


def install(
    site: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], files: Mapping[str, str], version: str = "1.2"
) -> None:
    """Write the files of a package, by their paths, and its metadata with entry points by group and name."""
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text, encoding="utf-8")
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    groups = (
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in named.items()), ""])
        for group, named in entry_points.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    forget()


def example_model() -> onnx.ModelProto:
    """Return the model that the script in examples/package writes."""
    model: onnx.ModelProto = runpy.run_path(str(EXAMPLE / "vocoder.py"))["vocoder"]()
    return model


def install_example(site: Path) -> None:
    """Install the package of examples/package, without pip and a build system, which a GPU machine may lack."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.copytree(EXAMPLE / "onnxfuse_snake", site / "onnxfuse_snake", ignore=shutil.ignore_patterns("__pycache__"))
    install(site, project["name"], project["entry-points"], {}, project["version"])
