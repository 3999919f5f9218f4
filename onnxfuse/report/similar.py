"""Group sentences that differ only in names and numbers, so that a report shows similar reasons once."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
# The pieces of a sentence: quoted names, numbers, and the text between.  Similar sentences differ in names and numbers.
PIECE: Final = re.compile(r"'[^']*'|(?<![\w.])-?\d[\w.+-]*|[^'\d]+|.")
REQUIRED: Final = "; required"


@dataclass(frozen=True)
class Similar(Generic[Item]):
    """Items whose sentences differ only in names and numbers; `sentence` has an ellipsis where they differ."""

    sentence: str
    items: tuple[Item, ...]


def group(
    items: Iterable[Item], sentence: Callable[[Item], str], key: Callable[[Item], Hashable] = lambda item: None
) -> list[Similar[Item]]:
    """Group items with similar sentences and equal keys; the largest group comes first."""
    groups: dict[Hashable, list[tuple[tuple[str, ...], Item]]] = {}
    for item in items:
        text = sentence(item)
        found, semicolon, required = text.partition(REQUIRED)
        pieces = tuple(PIECE.findall(found))
        shape = tuple("" if _may_differ(piece) else piece for piece in pieces)
        groups.setdefault((key(item), shape, required), []).append(((*pieces, semicolon + required), item))
    merged = [
        Similar(_merge([pieces for pieces, _ in each]), tuple(item for _, item in each)) for each in groups.values()
    ]
    return sorted(merged, key=lambda one: -len(one.items))


def _may_differ(piece: str) -> bool:
    return piece[0] == "'" or piece.lstrip("-")[:1].isdigit()


def _merge(sentences: list[tuple[str, ...]]) -> str:
    """Merge sentences, given as equally many pieces, into one; pieces that differ become an ellipsis."""
    first = sentences[0]
    same = [all(each[i] == piece for each in sentences) for i, piece in enumerate(first)]
    return "".join(
        piece if equal else "'…'" if piece[0] == "'" else "…" for piece, equal in zip(first, same, strict=True)
    )
