"""Make Markdown of docstrings.

The docstrings of onnxfuse name a parameter at the beginning of a line, and describe it behind two spaces or more:

    model     a path, or a serialized model
    only      names of the fusions to apply;
              all if empty
"""

from __future__ import annotations

import re
from typing import Final

ITEM: Final = re.compile(r"(?P<name>[a-z_]\w*) +(?P<text>\S.*)")


def with_lists(text: str) -> str:
    """Return a docstring with each aligned list of parameters as a Markdown list."""
    lines = text.split("\n")
    done: list[str] = []
    column = 0  # at which the descriptions of the list at hand begin; 0 outside a list
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        match = ITEM.fullmatch(line)
        if match and (match.start("text") == column or _begins_list(match, following)):
            done += ["", f"- `{match['name']}`: {match['text']}"]
            column = match.start("text")
        elif column and line.startswith(" " * column):
            done.append(f"    {line.strip()}")
        else:
            done += ["", line] if column and line else [line]
            column = 0
    return "\n".join(done)


def _begins_list(item: re.Match[str], following: str) -> bool:
    """Return whether two spaces stand behind the name, or the next line goes on where the description begins."""
    column = item.start("text")
    return column >= item.end("name") + 2 or len(following) - len(following.lstrip()) == column
