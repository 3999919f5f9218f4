"""The pass for Olive: its page, in a folder of its own, and an option that is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from documents import ROOT, blocks

from onnxfuse.ir.domain import is_fused

pytest.importorskip("olive", reason="needs olive-ai and requests")


@pytest.fixture(autouse=True)
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files of the page into a folder, in which the test runs; Olive reports to nobody."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OLIVE_DISABLE_TELEMETRY", "1")
    for block in blocks(ROOT / "docs" / "olive.md"):
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "models" / "build.py", "classifier.onnx"], check=True)
    subprocess.run([sys.executable, "-m", "onnxfuse.olive", "package.json"], check=True)


def run(workflow: object) -> subprocess.CompletedProcess[str]:
    Path("workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
    command = "from olive.cli.launcher import main; main()"
    arguments = ["run", "--config", "workflow.json", "--package-config", "package.json"]
    return subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=False)


def test_the_page_works_as_it_stands() -> None:
    done = run(json.loads(Path("workflow.json").read_text()))
    fused = onnx.load("fused/model.onnx")
    assert sum(map(is_fused, fused.graph.node)) == 8, done.stderr
    assert all(each.data_type != onnx.TensorProto.FLOAT for each in fused.graph.initializer)


def test_a_refused_option_ends_the_workflow_with_its_sentence() -> None:
    workflow = json.loads(Path("workflow.json").read_text())
    workflow["passes"]["fuse"]["options"] = {"dtype": "float12"}
    done = run(workflow)
    assert "float12" in done.stdout + done.stderr and not Path("fused/model.onnx").exists()
