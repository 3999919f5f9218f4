"""The pages agree with the code: the catalogue with the declarations, the commands they show with the command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from aligned_lists import with_lists
from catalogue import catalogue_page
from click.testing import CliRunner
from drawing import draw
from exported_models import read as read_exported
from tables import MARK, TABLES, filled, pages

import onnxfuse
from onnxfuse.cli import main
from onnxfuse.dsl.catalogue import builtin, from_folder
from onnxfuse.fuse_model import STAGES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "fusions.md")


def test_the_catalogue_is_up_to_date() -> None:
    page = ROOT / "docs" / "fusions.md"
    advice = "docs/fusions.md is out of date; run `python docs/site/catalogue.py > docs/fusions.md`"
    assert page.exists(), advice
    assert page.read_text(encoding="utf-8") == catalogue_page(builtin()), advice


def test_source_lines_that_pages_show_are_in_the_files() -> None:
    source = re.compile(r"--> (\S+):(\d+)\n +\|\n +\2 \| (.*)\n")
    shown = [each for page in PAGES for each in source.findall(page.read_text(encoding="utf-8"))]
    assert shown
    for path, number, line in shown:
        assert (ROOT / path).read_text("utf-8").splitlines()[int(number) - 1] == line, f"{path}:{number}"


def test_the_tables_of_the_pages_are_what_was_measured() -> None:
    stale = [page.name for page in pages() if filled(text := page.read_text(encoding="utf-8")) != text]
    assert stale == [], "run `python docs/site/tables.py`"


def test_every_table_stands_on_one_page() -> None:
    assert sorted(name for page in pages() for name in MARK.findall(page.read_text(encoding="utf-8"))) == sorted(TABLES)


DECISIONS = [path for path in sorted((ROOT / "docs" / "decisions").glob("*.md")) if path.name != "index.md"]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_is_a_short_page(path: Path) -> None:
    """Title, date, and then paragraphs of these names, in this order; the index has them all."""
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) <= 250
    names = re.findall(r"^\*\*(\w+)\.\*\* ", text, re.MULTILINE)
    assert names == [name for name in ("What", "Why", "Measured", "Alternatives") if name in names]


def test_the_page_of_the_design_is_read_in_ten_minutes() -> None:
    assert len((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()) <= 2500


def test_the_page_of_the_design_names_the_stages_of_fusing() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    way = page.partition("## The way of a model")[2].partition("\n## ")[0]
    named = re.findall(r"^\d+\. \*\*(.+?)\.\*\*", way, re.MULTILINE)
    assert named == ["Load", "Inline", *(stage.name for stage in STAGES), "Verify"]
    assert len(STAGES) <= 10


def test_a_drawing_shows_what_a_pattern_computes() -> None:
    (fusion,) = from_folder(ROOT / "examples" / "fusions")
    assert draw(fusion).splitlines() == [
        "flowchart LR",
        '  out0(["output"])',
        '  n2(["x"])',
        '  n1["GlobalAveragePool"]',
        '  n0["Flatten axis=1"]',
        "  n2 --> n1",
        "  n1 --> n0",
        "  n0 --> out0",
    ]


def test_every_drawing_leads_from_operands_to_outputs() -> None:
    """Each node but the outputs is read by another one, and what is read is drawn."""
    for fusion in builtin():
        text = draw(fusion)
        drawn = set(re.findall(r"^  (\w+)[(\[]", text, re.MULTILINE))
        links = re.findall(r"^  (\w+) -(?:\.-|-)> (\w+)$", text, re.MULTILINE)
        outputs = {f"out{index}" for index in range(len(fusion.outputs))}
        assert {source for source, _ in links} == drawn - outputs, fusion.name
        assert {target for _, target in links} <= drawn, fusion.name


def test_the_page_of_the_api_has_every_public_name() -> None:
    """`op` and `contrib` are not functions: the page says in words what they are."""
    shown = re.findall(r"^::: onnxfuse\.(\w+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*shown, "contrib", "op"]) == sorted(onnxfuse.__all__)


def test_aligned_parameters_of_a_docstring_become_a_list() -> None:
    text = "Fuse it.\n\nmodel     a path\nonly      names;\n          all if empty\n\nReturns the model."
    assert re.split(r"\n\n+", with_lists(text)) == [
        "Fuse it.", "- `model`: a path", "- `only`: names;\n    all if empty", "Returns the model.",
    ]  # fmt: skip


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


def test_the_readme_shows_what_explain_prints(tmp_path: Path, columns: Callable[[int], None]) -> None:
    columns(150)
    (tmp_path / "mobilenet.onnx").write_bytes(read_exported("mobilenetv3_ts13_bn_fp32.onnx"))
    (shown,) = re.findall(r"^```\n(conv_bias_activation: not at .*?)^```", README, re.DOTALL | re.MULTILINE)
    printed = CliRunner().invoke(main, ["explain", str(tmp_path / "mobilenet.onnx")]).output
    words = shown.split()  # the page has the lines of a pipe
    assert printed.split()[: len(words)] == words


CLAIMS = (  # words of claims that were wrong, and the claim that was run
    (r"any (?:ONNX )?runtime|wherever the original ran", "in every onnxruntime, or with --emit standard"),
    (
        r"verifies every run|every run of `optimize`",
        "verifies the written file on the CPU",
    ),
    (r"model\.half\(\)", "--dtype float16"),
    (r"pip install '?onnxfuse", "pip install -e '.[extra]', until there is a release"),
    (r"before it is quantized", "nothing: quantize_dynamic finds no MatMul in a fused model"),
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_claims_what_was_not_run(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    wrong = [
        f"'{found[0]}': say {right}" for words, right in CLAIMS if (found := re.search(words, text, re.IGNORECASE))
    ]
    assert not wrong or page.name == "CHANGELOG.md", wrong


def test_every_line_of_the_readme_s_use_writes_a_file_of_its_own() -> None:
    written = [words[2] for words in commands(USE) if words[0] in ("optimize", "unfuse") and ".onnx" in words[2]]
    assert len(written) == len(set(written)) > 10


def test_the_links_of_the_pages_lead_somewhere() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))]
    lost = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert lost == []
