"""The package is found from wherever it is imported, its version is the tag's, and a wheel holds every kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(folder: Path, *arguments: str) -> str:
    """Return what a Python process prints that is started in the folder, with the installed package alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_folder_that_holds_the_clone_does_not_hide_the_package(tmp_path: Path) -> None:
    """There, a clone named onnxfuse would be found as an empty namespace package first."""
    (tmp_path / "onnxfuse").symlink_to(ROOT)
    program = "import onnxfuse, onnxfuse.patterns.softmax, onnxfuse.kernels.norms; print(onnxfuse.__version__)"
    assert run(tmp_path, "-c", program).strip()


def test_the_command_line_runs_as_a_module(tmp_path: Path) -> None:
    assert run(tmp_path, "-m", "onnxfuse", "--version").startswith("onnxfuse, version ")


def test_a_wheel_holds_every_kernel_source() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    packed = {path for glob in globs["onnxfuse.kernels"] for path in (ROOT / "kernels").glob(glob)}
    sources = {path for path in (ROOT / "kernels").rglob("*") if path.suffix in (".cu", ".cuh")}
    assert sources
    assert sources == packed


# --- without the extras ---------------------------------------------------------------------------------------------

HIDDEN = "import sys; sys.modules.update(dict.fromkeys(['onnxruntime', 'cupy', 'cuda', 'cuda.bindings'])); "


def test_without_any_extra_all_names_but_those_of_sessions_are_there(tmp_path: Path) -> None:
    program = (
        "import onnxfuse\n"
        "lacking = []\n"
        "for name in onnxfuse.__all__:\n"
        "    try: getattr(onnxfuse, name)\n"
        "    except onnxfuse.MissingPackageError: lacking.append(name)\n"
        "print(*lacking)"
    )
    assert run(ROOT, "-c", f"{HIDDEN}\n{program}").split() == [
        "InferenceSession", "NodeDispatch", "all_sessions", "explain_session", "register",
    ]  # fmt: skip


def test_without_a_compiler_of_kernels_compile_says_what_to_install(tmp_path: Path) -> None:
    run(tmp_path, str(ROOT / "models" / "build.py"), "classifier.onnx")
    optimized = "from onnxfuse.cli import main; main(['optimize', 'classifier.onnx', 'fused.onnx', '--no-verify'])"
    program = "from onnxfuse.cli import main; main(['compile', 'fused.onnx', '--arch', 'sm_90'])"
    for each, code, words in (
        (optimized, 0, ""),
        (
            program,
            1,
            "error: compiling kernels needs cuda-bindings or CuPy; pip install cuda-bindings nvidia-cuda-nvrtc\n",
        ),
    ):
        command = [sys.executable, "-c", HIDDEN + each]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (code, words)


# --- the version ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a folder with what setup.py reads, which is not a repository of git."""
    for name in "setup.py", "pyproject.toml", "README.md", "LICENSE", "onnxfuse/__init__.py", "onnxfuse/version.py":
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def version_of(sources: Path, before: str = "") -> str:
    """Return the version that setup.py gives the package."""
    print_it = "import runpy, setuptools; setuptools.setup = lambda **arguments: print(arguments['version'])"
    return run(sources, "-c", f"{before}{print_it}; runpy.run_path('setup.py')").strip()


def test_without_git_the_version_is_that_of_the_sources(sources: Path) -> None:
    """With setuptools-scm and without it, as on a machine that installs a folder without isolation."""
    (fallback,) = re.findall(r'^    version = "(.+)"', (ROOT / "onnxfuse" / "version.py").read_text(), re.MULTILINE)
    assert version_of(sources) == fallback
    assert version_of(sources, "import sys; sys.modules['setuptools_scm'] = None; ") == fallback


def test_the_version_is_that_of_the_tag(sources: Path) -> None:
    pytest.importorskip("setuptools_scm")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    (sources / ".gitignore").write_text("onnxfuse/_version.py\n")
    for command in ["init"], ["add", "."], [*identity, "commit", "-m", "x"], ["tag", "v7.8.9"]:
        subprocess.run(["git", *command], cwd=sources, check=True, capture_output=True)
    assert version_of(sources) == "7.8.9"
    assert run(sources, "-c", "import onnxfuse; print(onnxfuse.__version__)") == "7.8.9\n"
