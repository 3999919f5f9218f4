"""Conditions of fusions on the captured dimensions, scalars, choices and operands."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from onnxfuse.dsl.spans import Span

Relation: TypeAlias = Callable[..., bool]  # tests operands, or two sizes

# The functions about values of a graph that a condition may have as parameters, by these names:
#   is_multiple(a, b)    operand a is operand b times a constant
#   share_symbols(m, n)  dimensions m and n depend on a symbol in common, so that they may be equal
#   is_ordinary(a, ...)  the product of operands holds no mask value such as -3.4e38
#   is_bounded(a)        no element of operand a is infinite or NaN, assuming that products are finite
#   is_finite(a)         operand a is a constant without NaN and infinity
#   broadcasts_to(a, b)  the shape of operand a broadcasts to the shape of b without changing it
#   is_table(a, b)       operand a, which broadcasts to operand b, has two or more axes and a different shape
#   are_slices_of_one(a, ..., of=x)  operands are slices of one tensor (x, if given), or views of such slices
#   begins_with_one(a)   operand a has two or more axes, and its first axis has size 1
#   holds_zero_or_one(a)  each element of operand a is known to be 0 or 1
#   is_triangle(a)       operand a is known to be true up to a diagonal, and false above it
#   is_of_distance(a)    each element of operand a is known to depend on the difference of its last two indices alone
#   is_made_by(a, *ops)  one of the operators computes operand a
#   has_readers(a)       more than one node reads operand a
#   is_read_once(a)      one node reads operand a, no subgraph reads it, and it is not a graph output
RELATIONS: Final = (
    "is_multiple", "share_symbols", "is_ordinary", "is_bounded", "is_finite", "broadcasts_to", "is_table",
    "are_slices_of_one", "begins_with_one", "holds_zero_or_one", "is_triangle", "is_of_distance", "is_made_by",
    "has_readers", "is_read_once",
)  # fmt: skip
SAYS_REQUIRED: Final = re.compile(r"\b(required|must|may)\b")  # a sentence with one of these reads as a requirement


@dataclass(frozen=True)
class Guard:
    """A condition on captured values; its sentence states the requirement, and may show values as {name}."""

    sentence: str
    holds: Callable[..., bool]
    span: Span

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the dimensions, scalars, choices and operands that the condition needs."""
        return tuple(name for name in inspect.signature(self.holds).parameters if name not in RELATIONS)

    @functools.cached_property
    def relations(self) -> tuple[str, ...]:
        """The names of the RELATIONS that the condition needs."""
        return tuple(name for name in inspect.signature(self.holds).parameters if name in RELATIONS)

    @functools.cached_property
    def is_known_first(self) -> bool:
        """Whether the condition names only facts that are known before anything is matched."""
        return {"rank", "opset"}.issuperset(self.names)

    @property
    def requirement(self) -> str:
        """The sentence, as one that cannot be taken for a finding."""
        return self.sentence if SAYS_REQUIRED.search(self.sentence) else f"required: {self.sentence}"

    def reason(self, known: Mapping[str, object]) -> str:
        """Return why the condition does not hold: the requirement, and the values if the sentence shows none of them.

        `known` maps the names of the condition to their values, and a name that the model lacks to None.
        """
        values = {name: f"{each:g}" if isinstance(each := known.get(name), float) else each for name in self.names}
        shown = "{" in self.sentence or "found" in self.sentence
        found = "" if shown else ", ".join(map(_value_text, values.keys(), values.values()))
        return self.requirement.format(**values) + (f"; found {found}" if found else "")

    def check(self, known: Mapping[str, object], relations: Mapping[str, Relation] = MappingProxyType({})) -> bool:
        """Return whether the condition is known to hold; see `answer`."""
        return self.answer(known, relations) is True

    def answer(
        self, known: Mapping[str, object], relations: Mapping[str, Relation] = MappingProxyType({})
    ) -> bool | str:
        """Return whether the condition holds; if this depends on an unknown fact, return the name of the fact instead.

        If `known` lacks a name, or maps it to None, the operand, scalar or size of this name is absent: the condition
        gets None in its place.  A condition on the rank holds only for known ranks.  A relation that is missing in
        `relations` holds for no values.
        """
        asked = {name: known.get(name) for name in self.names}
        unknown = next((name for name, value in asked.items() if value is None), "")
        if asked.get("rank", 0) is None:
            return "rank"
        try:
            return bool(self.holds(**asked, **{name: relations.get(name, _unrelated) for name in self.relations}))
        except TypeError:  # raised by comparisons of an unknown value, such as `None > 2`
            if not unknown:
                raise
            return unknown


def _value_text(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    return f"no {name}" if value is None or value is False else name if value is True else f"{name} {value}"


def _unrelated(*values: object, **options: object) -> bool:
    return False
