"""Whatever goes wrong in a command ends in one line and exit code 1; --debug shows the traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import onnx
import pytest
from click.testing import CliRunner
from spelled_models import parsed

from onnxfuse import fuse_model, optimize
from onnxfuse.cli import main
from onnxfuse.match.matcher import Matcher
from onnxfuse.report.report import Report

BLOCK = parsed(
    "(float[n,4,8] x) => (float[n,4,8] y) <float[8] g, float[8] b, float[8,8] w> "
    "{ h = LayerNormalization(x, g, b) p = MatMul(h, w) q = Relu(p) y = Add(q, x) }"
)
COMMANDS = [  # each with what it needs to print something
    "bench fused.onnx --provider cpu --runs 2 --no-ops",
    "compile fused.onnx --arch sm_90",
    "env",
    "explain block.onnx layer_norm",
    "export-triton fused.onnx repository",
    "inspect block.onnx",
    "list",
    "optimize block.onnx again.onnx",
    "plan block.onnx -o plan.json",
    "show layer_norm",
    "tune fused.onnx",
    "unfuse fused.onnx apart.onnx",
    "verify block.onnx fused.onnx",
]
FAIL_BEFORE_THEY_PRINT = ("export-triton", "tune")  # without a plan file, and without a GPU
FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, and the model as it is optimized."""
    made = tmp_path_factory.mktemp("models")
    onnx.save(BLOCK, made / "block.onnx")
    onnx.save(optimize(BLOCK, verify=False)[0], made / "fused.onnx")
    return made


@pytest.fixture
def in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        yield folder


def raises(*_: object, **__: object) -> NoReturn:
    raise KeyError("on\npurpose")


def test_the_table_has_every_command() -> None:
    assert {line.split()[0] for line in COMMANDS} == main.commands.keys()


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.split()[0])
def test_an_error_that_nobody_expected_is_one_line(line: str, in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.commands[line.split()[0]], "callback", raises)
    told = "error: KeyError: 'on\\npurpose'; --debug shows where; please report this\n"
    done = CliRunner().invoke(main, line.split())
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", told)
    for arguments in ([*line.split(), "--debug"], ["--debug", *line.split()]):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 1
        assert done.stderr.startswith("Traceback (most recent call last)") and "in raises" in done.stderr
        assert done.stderr.endswith(told)


PROGRESS = re.compile(r"\d+ s: ")  # a line that commands print every ten seconds, as on a busy machine
FULL_DEVICE = """
import os, sys
from onnxfuse.cli import main
kept = []
for line in sys.argv[1:]:
    kept.append(sys.stdout)  # whose end would write
    sys.stdout = open(1, "w", closefd=False)
    try:
        main(line.split())
    except SystemExit as end:
        sys.stderr.write(f"exit code {end.code}\\n")
sys.stderr.flush()
os._exit(0)
"""


@pytest.mark.skipif(not FULL.exists(), reason=f"needs {FULL}")
def test_a_full_device_is_told_of_in_one_line(in_folder: Path) -> None:
    lines = [line for line in COMMANDS if not line.startswith(FAIL_BEFORE_THEY_PRINT)]
    lines += ["--help", "--version", "list --help"]
    with FULL.open("wb", buffering=0) as full:
        command = [sys.executable, "-c", FULL_DEVICE, *lines]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    told = "error: the standard output cannot be written: No space left on device; what is printed is lost"
    lines_told = [line for line in done.stderr.splitlines() if line and not PROGRESS.match(line)]
    assert lines_told == [told, "exit code 1"] * len(lines)
    assert (in_folder / "again.onnx").exists(), "the model is written before the report is printed"


def test_the_command_line_names_what_was_left_out(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Matcher, "_at", raises)
    raised = "fusion layer_norm raised KeyError: 'on\\npurpose'"
    for line in ("optimize block.onnx again.onnx", "plan block.onnx -o plan.json"):
        done = CliRunner().invoke(main, line.split(), env={"COLUMNS": "500"})
        assert done.exit_code == 0, done.output
        assert f"Left out: {raised}" in done.stdout and "test_last_resort.py:" in done.stdout
        assert done.stderr == ""
        assert "in raises" in CliRunner().invoke(main, [*line.split(), "--debug"]).stderr
    assert f"Left out: {raised}" in CliRunner().invoke(main, ["explain", "block.onnx", "--limit", "100"]).stdout


def test_the_page_and_the_json_name_what_was_left_out(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_model, "estimate_traffic", raises)
    _, report = optimize(BLOCK, verify=False)
    assert report.to_json()["left_out"][0]["step"] == "estimating traffic"
    report.write(in_folder / "report.html")
    assert "<li>estimating traffic raised KeyError" in (in_folder / "report.html").read_text(encoding="utf-8")


def test_a_report_that_raises_leaves_the_model_and_the_lines(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "write", raises)
    (in_folder / "again.onnx").unlink(missing_ok=True)
    line = "optimize block.onnx again.onnx --report report.json"
    done = CliRunner().invoke(main, line.split(), env={"COLUMNS": "500"})
    assert done.exit_code == 1
    assert (in_folder / "again.onnx").exists()
    assert "Left out: writing 'report.json' raised KeyError" in done.stdout and "Verified" in done.stdout
