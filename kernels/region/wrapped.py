"""Wraps long lines of generated C++."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

COLUMNS: Final = 120


def wrapped(text: str) -> str:
    """Return C++ with long lines broken at spaces; a comment at the end of a long line moves to the line before it."""
    return "\n".join(each for line in text.split("\n") for each in _parts(line))


def _parts(line: str) -> Iterator[str]:
    if len(line) <= COLUMNS or line.startswith("#"):
        yield line
        return
    code, _, comment = line.partition("// ")
    indent = line[: len(line) - len(line.lstrip())]
    if comment:
        yield from _broken(comment, f"{indent}// ", f"{indent}// ")
    if code.strip():
        yield from _broken(code.strip(), indent, f"{indent}        ")


def _broken(text: str, indent: str, behind: str) -> Iterator[str]:
    """Yield the lines of a wrapped text; the first one is indented by `indent`, the others by `behind`."""
    while len(indent) + len(text) > COLUMNS and " " in text:
        end = text.rfind(" ", 0, min(COLUMNS - len(indent), len(text) - 2) + 1)  # so that no line is just a brace
        end = end if end > 0 else text.index(" ")
        yield f"{indent}{text[:end]}"
        indent, text = behind, text[end + 1 :]
    yield f"{indent}{text}"
