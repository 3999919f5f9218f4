"""The pages agree with the code: the catalogue with the declarations, the commands they show with the command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from onnxfuse.cli import main
from onnxfuse.language.catalog import builtin
from onnxfuse.language.document import catalogue

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != "fusions.md")


def test_the_catalogue_is_up_to_date() -> None:
    page = ROOT / "docs" / "fusions.md"
    advice = "docs/fusions.md is out of date; run `python -m onnxfuse.language.document > docs/fusions.md`"
    assert page.exists(), advice
    assert page.read_text(encoding="utf-8") == catalogue(builtin()), advice


def commands(page: Path) -> list[list[str]]:
    """The calls of onnxfuse in a page's bash blocks, as words."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [part.strip() for block in blocks for line in block.splitlines() for part in re.split(r"&&|;|\|", line)]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("onnxfuse ")]


SHOWN = [(page, words) for page in PAGES for words in commands(page)]


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


def test_the_links_of_the_pages_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))]
    lost = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert lost == []
