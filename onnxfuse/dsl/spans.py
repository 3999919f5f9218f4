"""The source ranges of terms in the files of patterns; messages quote them."""

from __future__ import annotations

import sys
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import CodeType

DSL = "onnxfuse.dsl."  # prefix of the modules that make terms; the first caller outside of them is the pattern


class Span:
    """A range of a pattern's source, in one line.

    It is found when it is first asked for, because finding all ranges takes longer than declaring all patterns.
    """

    def __init__(self, code: CodeType, instruction: int | None = None) -> None:
        """Store the code of a function, and the offset of one of its instructions; None for the `def` line."""
        self.file = code.co_filename
        self._code, self._instruction = code, instruction

    @cached_property
    def _range(self) -> tuple[int, int, int]:
        if self._instruction is None:
            return self._code.co_firstlineno, 0, 0
        line, end_line, column, end_column = next(islice(self._code.co_positions(), self._instruction // 2, None))
        one_line = line == end_line and column is not None and end_column is not None
        return line or 0, column or 0, (end_column or 0) if one_line else -1

    @property
    def line(self) -> int:
        """The line, counted from 1."""
        return self._range[0]

    @property
    def column(self) -> int:
        """The first column, counted from 0."""
        return self._range[1]

    @property
    def end_column(self) -> int:
        """The column after the last one; -1 for the end of the line."""
        return self._range[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and (self.file, self._range) == (other.file, other._range)

    def __hash__(self) -> int:
        return hash((self.file, self._range))

    def __str__(self) -> str:
        return f"{Path(self.file).parent.name}/{Path(self.file).name}:{self.line}"


def here() -> Span:
    """Return the source range of the pattern's expression that is being evaluated."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(DSL) and frame.f_back is not None:
        frame = frame.f_back
    return Span(frame.f_code, frame.f_lasti)
