"""Graphs with dimensions of size 0 and 1, and declarations that leave sizes or ranks of inputs unknown."""

from __future__ import annotations

from random import Random

from drafts import Draft
from image_graphs import image_graph
from random_graphs import Writer, finish, start
from spelled_graphs import spelled_graph

EMPTY = 3.0  # the weight of size 0 among the sizes of inputs


def odd_size_graph(random: Random) -> Draft:
    """Return a graph whose symbols are often 0 or 1 at first."""
    way = random.randrange(3)
    if way == 0:
        draft, values = start(random, EMPTY)
        return finish(Writer(draft, values), random.randint(2, 12))
    draft = spelled_graph(random) if way == 1 else image_graph(random)
    for word in sorted(draft.sizes):
        if random.random() < 0.3:
            draft.sizes[word] = random.choice([0, 1])
    return draft


def declare_less(draft: Draft) -> None:
    """Declare some sizes of inputs as unknown, as symbols of one or several names, or no rank at all."""
    random = draft.random
    for name, (dtype, dims) in list(draft.inputs.items()):
        if random.random() < 0.2:
            draft.without_rank.add(name)
        elif random.random() < 0.5:
            new = tuple(_less(draft, dim) if random.random() < 0.5 else dim for dim in dims)
            draft.inputs[name] = (dtype, new)


def _less(draft: Draft, dim: int | str | None) -> int | str | None:
    if isinstance(dim, int):
        word = f"unk__{draft.random.randrange(4)}" if draft.random.random() < 0.3 else draft.fresh("n")
        return word if draft.sizes.setdefault(word, dim) == dim else dim
    return None if isinstance(dim, str) and draft.sizes.get(dim, 2) == 2 and draft.random.random() < 0.5 else dim
