"""Run a page as its reader would: files are written, commands and Python run in order, and what is printed is compared.

A page's blocks are read by their language.  `bash` holds commands, and `python` or `cpp` with a title a file of that
name; `python` without a title is a program, whose names the later ones see.  `text` behind a program is what it prints.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from onnxfuse.cli import main

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
NOT_RUN = {  # beginnings of commands, and why no test runs them
    "python3 -m venv": "CI does, in .ci/run",
    ". .venv/bin/activate": "CI does, in .ci/run",
    "pip install": "CI does, in .ci/run, and .ci/wheels the built package",
    "pytest": "this is one of its tests",
    "ruff": "CI does, in .ci/run",
    "mypy": "CI does, in .ci/run",
    ".ci/format_kernels": "CI does, in .ci/run",
    "python benchmarks/host_seconds.py": "it measures seconds",
    "python docs/site/catalogue.py": "test_docs.py compares what it prints",
    "python docs/site/tables.py": "test_docs.py compares what it writes",
    "python examples/cpp/build_example.py": "test_cpp_example.py builds and runs the program",
    "./run_model": "test_cpp_example.py builds and runs the program",
    "TRITON_INTERPRET=1 python check.py": "tests/kernels/test_triton_kernels.py does, where Triton is",
    "onnxfuse compile pairs_fused.onnx": "tests/kernels/test_triton_kernels.py does, where Triton is",
    "python export_bert.py": "tests/test_optimum.py does, where Optimum is",
    "python export_yolo.py": "tests/test_ultralytics.py does, where Ultralytics is",
    "python export_whisper.py": "tests/test_whisper.py does, where Optimum and onnx-asr are",
    "python -m onnxfuse.olive": "tests/test_olive.py does, where Olive is",
    "olive run": "tests/test_olive.py does, where Olive is",
    "python vocoder.py": "test_packages.py does, before the other commands of that page",
    "onnxfuse optimize model.onnx half.onnx": "tests/half does, with models of its own",
    "python benchmarks/ort_kernels.py": "it reads the registry of onnxruntime-gpu",
    'eval "$(_ONNXFUSE_COMPLETE': "test_docs.py asks the program what it completes",
    "_ONNXFUSE_COMPLETE": "test_docs.py asks the program what it completes",
    "python tests/sanitize.py": "it takes the GPU tests through compute-sanitizer",
    "python tests/fuzz/": "tests/fuzz/test_fuzz.py runs less of it",
    "python models/genai.py": "it needs PyTorch and onnxruntime-genai",
    "python -m onnxruntime_genai.models.builder": "it downloads a model",
    "python examples/genai_tokens.py": "tests/genai/test_generation.py does",
    "onnxfuse optimize model.onnx quantized.onnx": "tests/quantize does, with models of its own",
    "python models/survey.py": "it needs PyTorch and hours",
    "python models/survey_frameworks.py": "it needs exports of Keras, JAX or Paddle",
    "cd ": "the tests start in the folder",
    ".ci/wheels": "it takes minutes; the workflow of wheels runs it",
    "towncrier build": "tests/test_changelog.py does, in a folder of its own",
    "git commit": "it would commit to this repository",
    "git tag": "it would tag this repository",
    "mkdocs serve": "it does not end; CI builds the site, in .ci/run",
    "docker": "no container engine is at hand",
    "pre-commit": "its hooks are what CI runs",
}
NEEDS_GPU = ("onnxfuse tune ",)


@dataclass(frozen=True)
class Block:
    """A block of a page, the name of the file that it is, if any, and the line at which it begins."""

    language: str
    title: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that name a language, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2] or "", match[3], text.count("\n", 0, match.start()) + 1)
        for match in BLOCK.finditer(text)
    ]


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a block of bash, each without its comment; a line that ends in a backslash goes on."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;|\|", line.partition(" #")[0]):
            if part.strip() and not line.lstrip().startswith("#"):
                yield part.strip()


def why_not_run(command: str, gpu: bool) -> str | None:
    """Return why a command of a page is not run here; None if it is."""
    if not gpu and command.startswith(NEEDS_GPU):
        return "it needs a GPU"
    return next((reason for begin, reason in NOT_RUN.items() if command.startswith(begin)), None)


def run_page(page: Path, gpu: bool = False, runs: Callable[[str], bool] = lambda command: True) -> list[str]:
    """Run a page in the current folder, which gets links to the clone's folders; return the commands that ran.

    Without a GPU, sessions are made on the CPU.  Programs that import a package which is not installed do not run, and
    neither do commands for which `runs` is false.
    """
    for name in "models", "examples", "benchmarks":
        if not Path(name).exists():
            Path(name).symlink_to(ROOT / name)
    names: dict[str, Any] = {"__name__": "__main__"}
    ran: list[str] = []
    printed: str | None = None
    for block in blocks(page):
        text = block.text if gpu else block.text.replace(CUDA, CPU)
        where = f"{page.name}:{block.line}"
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(text, encoding="utf-8")
        elif block.language == "python":
            printed = run_program(text, names, where) if installed(text) else None
        elif block.language == "bash":
            chosen = [each for each in commands(text) if not why_not_run(each, gpu) and runs(each)]
            for each in chosen:
                run_command(each, where)
            ran += chosen
        elif block.language == "text" and printed is not None:
            assert printed == block.text, f"{where} shows what the program does not print: {printed}"
    return ran


def installed(program: str) -> bool:
    """Return whether all packages that a program imports are installed."""
    found = re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    needed = [*found, "onnxscript"] if "torch.onnx" in program else found
    return all(importlib.util.find_spec(name) is not None for name in needed)


def run_program(text: str, names: dict[str, Any], where: str) -> str:
    """Run a program, which sees the names of those before it; return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        if "import torch" in text:
            warnings.simplefilter("ignore")  # its exporter has many, about itself
        exec(compile(text, where, "exec"), names)
    return printed.getvalue()


def run_command(command: str, where: str) -> None:
    """Run a command of onnxfuse in this process, and one of Python in another."""
    program, *words = shlex.split(command)
    if program == "onnxfuse":
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"{where}: {command}: {done.output}"
    elif program == "python":
        ran = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{where}: {command}: {ran.stderr}"
    else:
        raise AssertionError(f"{where}: no test runs `{command}`; say why in NOT_RUN of tests/documents.py")
