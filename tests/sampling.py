"""Samples of many similar cases: a plain run takes some of them, and `pytest -m slow` takes all others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """Return the cases for `parametrize`, all but every such one marked as slow; a tuple holds several parameters."""
    return [_case(each, [pytest.mark.slow] if i % every else []) for i, each in enumerate(cases)]


def _case(values: Any, marks: list[pytest.MarkDecorator]) -> Any:
    return pytest.param(*values, marks=marks) if isinstance(values, tuple) else pytest.param(values, marks=marks)


def part_of(cases: Sequence[T], part: int, of: int) -> Sequence[T]:
    """Return every case of a part; the first case if there are fewer cases than parts."""
    return cases[part::of] or cases[:1]


def in_turn(ways: Sequence[T], turn: int, part: int, of: int) -> Sequence[T]:
    """Return a part of the ways in which the case of a turn is run: another part 0 in each of `of` turns."""
    return part_of(ways, (turn + part) % of, of)


def by_parts(of: int) -> pytest.MarkDecorator:
    """Return a decorator of tests that take `part` of their cases, from 0 to `of` - 1; only part 0 is not slow."""
    return pytest.mark.parametrize("part", sampled(range(of), of), ids=lambda part: f"part{part}")
