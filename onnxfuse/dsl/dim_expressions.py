"""Numbers that are computed from named dimensions, for use as attributes of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol


class SizeLike(Protocol):
    """The size of a dimension, be it a number or symbolic."""

    def __floordiv__(self, other: int, /) -> SizeLike: ...

    def __mul__(self, other: int, /) -> SizeLike: ...


@dataclass(frozen=True)
class DimExpression:
    """A number such as `size("d") // 2`."""

    text: str
    evaluate: Callable[[Mapping[str, SizeLike]], SizeLike]

    @property
    def name(self) -> str | None:
        """The dimension that the expression is; None where it is computed from one."""
        return self.text if self.text.isidentifier() else None

    def is_known(self, dims: Mapping[str, SizeLike]) -> bool:
        """Return whether the dimensions that the expression is computed from have sizes."""
        try:
            self.evaluate(dims)
        except KeyError:
            return False
        return True

    def __floordiv__(self, other: int) -> DimExpression:
        return DimExpression(f"{self.text} // {other}", lambda dims: self.evaluate(dims) // other)

    def __mul__(self, other: int) -> DimExpression:
        return DimExpression(f"{self.text} * {other}", lambda dims: self.evaluate(dims) * other)


def dim_expressions(value: object) -> Iterator[DimExpression]:
    """Yield the expressions in an attribute's value."""
    if isinstance(value, DimExpression):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from dim_expressions(item)
