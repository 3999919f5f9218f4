"""Draw the pattern of a fusion as a Mermaid flowchart, from its terms.

Of several spellings of a value the first is drawn, or the second where the first is one operator that says it all.  Of
several variants the first is drawn.  Parameters are round; those that a model may lack have a dashed line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from onnxfuse.dsl.declaration import Fusion
from onnxfuse.dsl.terms import (
    Absent,
    Alternatives,
    Apply,
    Capture,
    Constant,
    Either,
    Product,
    Rearrange,
    Sum,
    Term,
    Wrapper,
)
from onnxfuse.dsl.words import Causal, Full, Output, Scaled

MIN_NODES_SPELLED_OUT: Final = 3  # of a spelling that is drawn in place of one operator: x / y and x**2 stay these
MAX_NODES_IN_A_ROW: Final = 16  # larger drawings go from top to bottom
SYMBOLS: Final[Mapping[type[Term], str]] = {Sum: "Add", Product: "Mul"}
Link = tuple[str, bool]  # the name of a node, and whether the value may be absent


def draw(fusion: Fusion) -> str:
    """Return the text of a flowchart from the parameters of a fusion to its outputs."""
    drawing = _Drawing()
    for index, output in enumerate(fusion.outputs):
        name = f"out{index}"
        drawing.lines.append(f'{name}(["{"output" if len(fusion.outputs) == 1 else f"output {index + 1}"}"])')
        drawing.links += [f"{source} --> {name}" for source, _ in drawing.sources(output)]
    direction = "LR" if len(drawing.lines) <= MAX_NODES_IN_A_ROW else "TD"
    return "\n".join([f"flowchart {direction}", *(f"  {line}" for line in [*drawing.lines, *drawing.links])])


class _Drawing:
    """The nodes and links of a flowchart.  A term that is used twice is drawn once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.links: list[str] = []
        self._names: dict[int, str] = {}
        self._chosen: dict[str, str] = {}  # the variant that is drawn, by the name of the choice

    def sources(self, term: Term) -> Iterator[Link]:
        """Yield the node that computes a term, which is drawn when it is first met; none for numbers."""
        term = self._drawn(term)
        if isinstance(term, Constant | Absent):
            return
        if id(term) not in self._names:
            self._names[id(term)] = name = f"n{len(self._names)}"
            self._draw(term, name)
        yield self._names[id(term)], isinstance(term, Capture) and term.optional

    def _draw(self, term: Term, name: str) -> None:
        if isinstance(term, Capture):
            self.lines.append(f'{name}(["{term.name}"])')
            return
        parts = () if isinstance(term, Causal) else term.parts
        links = [link for part in parts for link in self.sources(part)]
        self.lines.append(f'{name}["{self._label(term)}"]')
        self.links += [f"{source} {'-.->' if optional else '-->'} {name}" for source, optional in links]

    def _drawn(self, term: Term) -> Term:
        """Return the spelling and the variant that are drawn of a term, without remarks around it."""
        while True:
            if isinstance(term, Causal):
                return term
            if isinstance(term, Wrapper | Output):
                term = term.inner
            elif isinstance(term, Either):
                term = _spelling(term.options)
            elif isinstance(term, Rearrange) and _changes_nothing(term.pattern):
                term = term.inner
            elif isinstance(term, Alternatives) and term.name is not None:
                term = term.labelled(self._chosen.setdefault(term.name, term.labels[0]))
            else:
                return term

    def _label(self, term: Term) -> str:
        numbers = [part for part in map(self._drawn, term.parts) if isinstance(part, Constant)]
        if isinstance(term, Product) and len(term.parts) == 2 and any(number.divisor for number in numbers):
            return f"Div {_short(numbers[0].divisor)}"
        return _escaped(" ".join([*self._words(term), *(_short(number.value) for number in numbers)]))

    def _words(self, term: Term) -> Iterator[str]:
        match term:
            case Apply():
                yield term.op.replace("::", ".")
                yield from _attributes(term.attributes)
            case Rearrange():
                yield term.pattern.replace("->", "→")
            case Scaled():
                yield "Mul"
            case Causal():
                yield "causal mask"
            case Full():
                yield f"{_short(term.value)} in all of ({term.dims})"
            case _:
                yield SYMBOLS[type(term)]


def _spelling(options: tuple[Term, ...]) -> Term:
    """Return the first spelling, or, where that is one operator, the first one in which several stand for it."""
    several = (option for option in options if option.count_nodes({}, set()) >= MIN_NODES_SPELLED_OUT)
    return next(several, options[0]) if _is_one_operator(options[0]) else options[0]


def _is_one_operator(term: Term) -> bool:
    return isinstance(term.unwrapped, Apply) and all(part.unwrapped.is_leaf for part in term.unwrapped.parts)


def _changes_nothing(pattern: str) -> bool:
    before, _, after = (side.strip() for side in pattern.partition("->"))
    return before == after


def _attributes(attributes: Mapping[str, object]) -> Iterator[str]:
    """Yield the attributes that are plain numbers."""
    for name, value in attributes.items():
        if isinstance(value, int | float) or (isinstance(value, list) and all(isinstance(one, int) for one in value)):
            yield f"{name}={value}"


def _short(value: float | None) -> str:
    return f"{value:.5g}"


def _escaped(text: str) -> str:
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
