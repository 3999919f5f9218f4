"""The printing of all commands: sentences with a hanging indent, and numbers in columns, texts and JSON.

Names in models are untrusted.  Sentences quote them by `escape`, tables by `cell`, and the commands' console writes all
non-printing characters as escapes, whatever their origin.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from onnxfuse.errors import printable

NARROWEST: Final = 30  # the least number of columns for a sentence
MAX_DIM_CHARACTERS: Final = 40  # a longer dim in a table or a list of sizes is cut off
UNIT: Final = re.compile(r"(?<=\d) (?=[A-Za-z])")  # the space between a number and what it counts
GLUE: Final = "\ue001"  # replaces that space while a sentence is broken into lines; non-printing, as BRACKET is
BRACKET: Final = "\ue000"  # replaces "[" in escaped text; it is non-printing, so no other text contains it


def escape(text: str, keep: str = "") -> str:
    """Return rich markup that prints a text literally, with non-printing characters escaped as by `printable`.

    rich.markup.escape does not escape a "[" without a following "]", so two names together can form a tag, such as a
    link.
    """
    return printable(text, keep).replace("[", BRACKET)


def cell(text: str) -> Text:
    """Return a table's cell that shows a text literally, with non-printing characters escaped as by `printable`."""
    return Text(printable(text))


class SafeConsole(Console):
    """A console that prints no control characters except its own, and no direction marks."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of the printed text."""
        for segment in super().render(renderable, options):
            text = printable(segment.text.replace(BRACKET, "["), keep="\n")
            yield segment if segment.control else Segment(text, segment.style)


@dataclass(frozen=True)
class Line:
    """A sentence with rich markup; its further lines begin under its first word, or `indent` columns farther right."""

    text: str
    start: str = ""
    indent: int = 2

    def __str__(self) -> str:
        """Return the line as markup."""
        return (self.start + self.text).replace(BRACKET, "[")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the lines for the width of the console."""
        rest = " " * (len(self.start) or self.indent)
        text = Text.from_markup(self.text, emoji=False)
        text.plain = UNIT.sub(GLUE, text.plain.replace(BRACKET, "["))
        wrapped = text.wrap(console, max(options.max_width - len(rest), NARROWEST))
        for i, line in enumerate(wrapped):
            line.rstrip()
            line.plain = line.plain.replace(GLUE, " ")
            yield Text(rest if i else self.start) + line


def columns(title: str, *names: str) -> Table:
    """Return an empty table: a column of names under `title`, cut off if too long, and columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(title, overflow="ellipsis")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def short(text: str) -> str:
    """Return a dim's name or formula, cut off where it has more than MAX_DIM_CHARACTERS."""
    return text if len(text) <= MAX_DIM_CHARACTERS else text[: MAX_DIM_CHARACTERS - 3] + "..."


def two_lines(first: str, second: str) -> Text:
    """Return a cell of two lines, which are cut off and not wrapped where the table is too wide."""
    return Text(f"{printable(first)}\n  {printable(second)}", no_wrap=True, overflow="ellipsis")


def counted(count: int, what: str, several: str = "") -> str:
    """Return a number with its noun `what`, or with the plural `several`."""
    return f"{count} {what}" if count == 1 else f"{count:,} {several or f'{what}s'}"


def bytes_text(count: float) -> str:
    """Return a number of bytes with three digits, in decimal units."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 999.5:  # more would be written as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def finite(value: object) -> object:
    """Return a value for JSON, which has neither infinities nor NaN: None in their place."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
