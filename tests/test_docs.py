"""The pages agree with the code: the catalogue with the declarations, the commands they show with the command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from onnxfuse.cli import main
from onnxfuse.dsl.catalogue import builtin
from onnxfuse.dsl.documentation import catalogue_page

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != "fusions.md")


def test_the_catalogue_is_up_to_date() -> None:
    page = ROOT / "docs" / "fusions.md"
    advice = "docs/fusions.md is out of date; run `python -m onnxfuse.dsl.documentation > docs/fusions.md`"
    assert page.exists(), advice
    assert page.read_text(encoding="utf-8") == catalogue_page(builtin()), advice


def section(text: str, title: str) -> str:
    """Return the text between the heading `## title` and the next heading of its level."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return str(found)


def commands(text: str) -> list[list[str]]:
    """Return the calls of onnxfuse in the text's bash blocks, as words without the name of the program."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [part.strip() for block in blocks for line in block.splitlines() for part in re.split(r"&&|;|\|", line)]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("onnxfuse ")]


SHOWN = [(page, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "words"), SHOWN, ids=[f"{page.name}: {' '.join(words)}" for page, words in SHOWN])
def test_a_command_that_is_shown_exists(page: Path, words: list[str]) -> None:
    """The command takes these options and as many arguments."""
    assert isinstance(main, click.Group)
    assert words[0] in main.commands, f"{page.name} shows `onnxfuse {words[0]}`; there are {', '.join(main.commands)}"
    command = main.commands[words[0]]
    try:
        command.make_context(words[0], words[1:])
    except click.UsageError as error:
        pytest.fail(f"{page.name} shows `onnxfuse {' '.join(words)}`: {error.format_message()}")


def test_the_readme_shows_every_command() -> None:
    assert {words[0] for page, words in SHOWN if page.name == "README.md"} == set(main.commands)


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the README's first command leaves behind: both models, beside the clone's examples."""
    folder = tmp_path_factory.mktemp("quick_start")
    subprocess.run([sys.executable, ROOT / "models" / "build.py", "classifier.onnx"], cwd=folder, check=True)
    (folder / "examples").symlink_to(ROOT / "examples")
    done = CliRunner().invoke(main, ["optimize", str(folder / "classifier.onnx"), str(folder / "fused.onnx")])
    assert done.exit_code == 0, done.output
    return folder


USE = section(README, "Use")


LINES = [
    line for block in re.findall(r"^```bash\n(.*?)^```", USE, re.DOTALL | re.MULTILINE) for line in block.splitlines()
]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("onnxfuse ")])
def test_a_line_of_the_readme_works_as_written(line: str, quick_start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(quick_start)
    for words in commands(f"```bash\n{line}\n```"):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, done.output


def test_a_shell_completes_commands() -> None:
    """The README's line for bash prints a script, which asks the program itself what may follow."""
    program = [sys.executable, "-m", "onnxfuse"]
    variable = "_ONNXFUSE_COMPLETE"
    assert f'eval "$({variable}=bash_source onnxfuse)"' in README
    script = subprocess.run(program, env={**os.environ, variable: "bash_source"}, capture_output=True, check=True)
    assert b"complete -o nosort -F _onnxfuse_completion onnxfuse" in script.stdout
    asked = {variable: "bash_complete", "COMP_WORDS": "onnxfuse ins", "COMP_CWORD": "1"}
    found = subprocess.run(program, env={**os.environ, **asked}, capture_output=True, check=True, text=True)
    assert found.stdout == "plain,inspect\n"


def test_the_python_example_of_the_readme_prints_what_it_says(
    quick_start: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", USE, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(quick_start)
    exec(example, {})
    (promised,) = re.findall(r"print\(.*\)  # (.*)", example)
    assert capsys.readouterr().out.strip() == promised


def test_the_readme_shows_what_the_first_command_prints(quick_start: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes, launches and traffic; the size of the file depends on versions, the error on the processor."""
    monkeypatch.chdir(quick_start)
    printed = CliRunner().invoke(main, ["optimize", "classifier.onnx", "again.onnx"]).output
    (shown,) = re.findall(r"^```\n( +before +after\n.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line.rstrip() for line in printed.splitlines() if not line.startswith(("file", "Verified"))]
    assert lines == [line for line in shown.splitlines() if not line.startswith(("file", "Verified"))]


def test_the_links_of_the_pages_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))]
    lost = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert lost == []
