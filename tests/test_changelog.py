"""The fragments of changelog.d are named and written so that a release can make a section of CHANGELOG.md from them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
KINDS = [kind["directory"] for kind in CONFIGURATION["type"]]
NAME = re.compile(rf"[a-z0-9][a-z0-9_-]*\.({'|'.join(KINDS)})\.md")
NO_FRAGMENTS = {"README.md", "template.md.jinja"}


def fault(name: str, text: str) -> str | None:
    """Return why a file is not a fragment, or None if it is one."""
    if not NAME.fullmatch(name):
        return f"changelog.d/{name} is not named <name>.<kind>.md, where kind is one of {', '.join(KINDS)}"
    if not re.fullmatch(r"[A-Z`@].*[.)]\n", text, re.DOTALL) or "\n\n" in text:
        return f"changelog.d/{name} is not one paragraph of whole sentences, without a bullet"
    return None


def test_every_fragment_is_named_by_its_kind_and_holds_one_paragraph() -> None:
    files = [path for path in (ROOT / "changelog.d").iterdir() if path.name not in NO_FRAGMENTS]
    faults = [fault(path.name, path.read_text(encoding="utf-8")) for path in files]
    assert [each for each in faults if each] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resize.fix.md", "A Resize is fused.\n"),
        ("Resize.fixed.md", "A Resize is fused.\n"),
        ("resize.md", "A Resize is fused.\n"),
        ("resize.fixed.md", "- A Resize is fused.\n"),
        ("resize.fixed.md", "A Resize is fused.\n\nAnother one is not.\n"),
        ("resize.fixed.md", ""),
    ],
)
def test_a_fragment_that_a_release_could_not_use_is_named(name: str, text: str) -> None:
    assert name in str(fault(name, text))


def test_a_release_makes_a_section_of_fragments(tmp_path: Path) -> None:
    pytest.importorskip("towncrier", reason="needs the packages of .[dev]")
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    folder = tmp_path / "changelog.d"
    folder.mkdir()
    shutil.copy(ROOT / "changelog.d" / "template.md.jinja", folder)
    (folder / "resize.fixed.md").write_text("A Resize is fused,\nand a Pad.\n")
    (folder / "inspect.added.md").write_text("`onnxfuse inspect` is new.\n")
    build = [sys.executable, "-m", "towncrier", "build", "--keep", "--version", "9.0.0", "--date", "2030-01-01"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    before, after = ((place / "CHANGELOG.md").read_text(encoding="utf-8") for place in (ROOT, tmp_path))
    section = (
        "\n## 9.0.0 (2030-01-01)\n\n### Added\n\n- `onnxfuse inspect` is new.\n\n"
        "### Fixed\n\n- A Resize is fused,\n  and a Pad.\n"
    )
    assert section in after and after.replace(section, "").split() == before.split()
