"""Test who imports whom: no circles, the layers of pyproject.toml, and the picture at the top of docs/design.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

grimp = pytest.importorskip("grimp", reason="needs the packages of .[dev]")

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "design.md"
# Rooms that everybody may use, which is why the picture leaves them out.
LEAVES = {
    "_version", "activations", "algebra", "errors", "packages", "printing", "region_operators", "steps", "version",
}  # fmt: skip


@pytest.fixture(scope="module")
def imports() -> Any:
    """Return who imports whom, also inside functions and for type checkers only."""
    return grimp.build_graph("onnxfuse", cache_dir=None)


def test_files_do_not_import_each_other_in_a_circle(imports: Any) -> None:
    circles = []
    for module in sorted(imports.modules):
        for imported in sorted(imports.find_modules_directly_imported_by(module)):
            back = imports.find_shortest_chain(importer=imported, imported=module)
            if back:
                circles.append(" -> ".join((module, *back)))
    shortest = sorted(circles, key=lambda circle: circle.count("->"))[:10]
    assert not circles, "files import each other in a circle, for example:\n" + "\n".join(shortest)


def test_imports_follow_the_layers() -> None:
    """pyproject.toml states the contracts; `lint-imports` checks them."""
    pytest.importorskip("importlinter")
    # In a process of its own: the linter's configuration of logging would switch off the loggers of all later tests.
    program = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_picture_has_every_room_in_one_box(imports: grimp.ImportGraph) -> None:
    boxed = [each for rooms in boxes().values() for each in rooms]
    rooms = {room(module) for module in imports.modules} - LEAVES - {"onnxfuse"}
    assert sorted(boxed) == sorted(rooms), f"the boxes of {PICTURE.name} hold other folders and files than onnxfuse/"


def test_the_picture_shows_the_imports(imports: grimp.ImportGraph) -> None:
    """The first mermaid flowchart draws an arrow for each import between boxes, but those that a longer way shows."""
    box = {each: name for name, rooms in boxes().items() for each in rooms}
    real = {(box[a], box[b]): example(imports, a, b) for a, b in arrows(imports) if box[a] != box[b]}
    circles = [f"{a} --> {b}: {real[a, b]}" for a, b in real if a in reached(set(real), b)]
    assert not circles, "boxes import each other in a circle:\n" + "\n".join(circles)
    needed = {(a, b) for a, b in real if b not in reached(set(real) - {(a, b)}, a)}
    drawn = set(re.findall(r"^\s*(\w+) *--> *(\w+)\s*$", picture(), re.MULTILINE))
    message = [f"{PICTURE.name} draws `{a} --> {b}`, which no import needs" for a, b in sorted(drawn - needed)]
    message += [f"{PICTURE.name} lacks `{a} --> {b}`: {real[a, b]}" for a, b in sorted(needed - drawn)]
    assert not message, "\n".join(message)


def picture() -> str:
    """Return the text of the picture."""
    found = re.search(r"^```mermaid\n(.*?)^```", PICTURE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert found, f"{PICTURE.name} has no ```mermaid block"
    return found[1]


def boxes() -> dict[str, list[str]]:
    """Return the rooms that each box of the picture holds."""
    found = re.findall(r'^\s*(\w+)\["[^"]*<br>([\w, ]+)"\]$', picture(), re.MULTILINE)
    return {name: rooms.split(", ") for name, rooms in found}


def reached(drawn: set[tuple[str, str]], start: str) -> set[str]:
    """Return the places to which arrows lead from a place."""
    found: set[str] = set()
    work = [start]
    while work:
        room_ = work.pop()
        new = {b for a, b in drawn if a == room_} - found
        found |= new
        work += new
    return found


def arrows(imports: Any) -> set[tuple[str, str]]:
    """Return the pairs of rooms of which the first imports the second."""
    found = {
        (room(module), room(imported))
        for module in imports.modules
        for imported in imports.find_modules_directly_imported_by(module)
        if not is_folder(imported)
    }
    return {(a, b) for a, b in found if a != b and b not in LEAVES and "onnxfuse" not in (a, b)}


def room(module: str) -> str:
    """Return the first folder or file below onnxfuse/; "onnxfuse" for onnxfuse/__init__.py."""
    return module.split(".")[1] if "." in module else module


def is_folder(module: str) -> bool:
    """Whether a module is imported only to find the files beside it: these two packages hold no code of their own."""
    return module in ("onnxfuse.patterns", "onnxfuse.kernels")


def example(imports: Any, importer: str, imported: str) -> str:
    """Return one import between two rooms."""
    return next(
        f"{module} imports {each}"
        for module in sorted(imports.modules)
        if room(module) == importer
        for each in sorted(imports.find_modules_directly_imported_by(module))
        if room(each) == imported and not is_folder(each)
    )
