"""The pages work as they stand: every file, command and program of theirs, in order, or there is a reason why not."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnxruntime as ort
import pytest
from documents import CUDA, ROOT, blocks, commands, run_page, why_not_run

from onnxfuse.cli import main
from onnxfuse.dsl.catalogue import with_folders
from onnxfuse.runtime import cupy_backend

DOCS = ROOT / "docs"
README, SERVING = ROOT / "README.md", DOCS / "serving.md"
PAGES = [DOCS / "quick_start.md", DOCS / "why_not.md", *sorted((DOCS / "tutorials").glob("*.md"))]
# test_packages.py runs the first two, and test_ultralytics.py the last
BY_OTHERS = [DOCS / "packages.md", ROOT / "examples" / "package" / "README.md", DOCS / "ultralytics.md"]
REASONS_ALONE = [path for path in (*ROOT.glob("*.md"), *DOCS.glob("**/*.md")) if path not in (*PAGES, *BY_OTHERS)]
SLOW = {"transformer": ["onnxfuse compile"], "language_model": ["onnxfuse optimize llama"]}  # a minute of compiling
HAS_GPU = CUDA in ort.get_available_providers() and not cupy_backend.unavailable()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_works_as_it_stands(page: Path) -> None:
    """Sessions are on the CPU.  Left out is what takes long and is run of other models, by the test of the README."""
    slow = ("onnxfuse bench", *SLOW.get(page.stem, ()))
    ran = run_page(page, runs=lambda command: not command.startswith(slow))
    assert any(command.startswith("onnxfuse ") for command in ran)


def test_the_readme_and_then_the_page_of_servers_work_as_they_stand() -> None:
    ran = [command.split() for command in run_page(README)]
    assert {words[1] for words in ran if words[0] == "onnxfuse"} == {*main.commands} - {"tune"}
    shutil.rmtree("model_repository")  # both pages write it
    assert len(run_page(SERVING)) == 3


@pytest.mark.parametrize("page", REASONS_ALONE, ids=lambda page: page.stem)
def test_a_command_of_any_other_page_is_run_elsewhere(page: Path) -> None:
    """Nothing is run here: each command has a reason, or is one of the two pages above."""
    if page not in (README, SERVING):
        shown = [each for block in blocks(page) if block.language == "bash" for each in commands(block.text)]
        assert [each for each in shown if not why_not_run(each, gpu=False)] == []


def test_the_fusion_of_the_contributing_page_is_one() -> None:
    run_page(ROOT / "CONTRIBUTING.md")
    assert "l2_norm" in {fusion.name for fusion in with_folders([Path("patterns")])}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_whole_page_works_as_it_stands(page: Path) -> None:
    run_page(page)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs onnxruntime-gpu, CuPy and a GPU")
@pytest.mark.parametrize("page", [*PAGES, README], ids=lambda page: page.stem)
def test_a_page_works_on_a_gpu(page: Path) -> None:
    """Sessions are on the GPU, and what needs one is run as well."""
    run_page(page, gpu=True)
