"""The source ranges of terms in the files of patterns; messages quote them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import CodeType

DSL = "onnxfuse.dsl."  # prefix of the modules that make terms; the first caller outside of them is the pattern


@dataclass(frozen=True)
class Span:
    """A range of a pattern's source: a line counted from 1, columns counted from 0; end_column -1 is the line's end."""

    file: str
    line: int
    column: int
    end_column: int

    def __str__(self) -> str:
        return f"{Path(self.file).parent.name}/{Path(self.file).name}:{self.line}"


def here() -> Span:
    """Return the source range of the pattern's expression that is being evaluated."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(DSL) and frame.f_back is not None:
        frame = frame.f_back
    return _span(frame.f_code, frame.f_lasti)


def _span(code: CodeType, instruction: int) -> Span:
    line, end_line, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    one_line = line == end_line and column is not None and end_column is not None
    return Span(code.co_filename, line or 0, column or 0, (end_column or 0) if one_line else -1)
