"""The cases of the fuzzer: a random number generator decides everything, so that a seed names a case."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

import onnx
from changes import change
from drafts import SYMBOLS, Draft
from judge import Verdict, judge
from random_graphs import random_graph
from spelled_graphs import spelled_graph

BITS = 8
MOST_FLIPS = 6


@dataclass(frozen=True)
class FuzzCase:
    """A model, or the damaged bytes of one, and how it is optimized."""

    kind: str
    seed: int
    model: onnx.ModelProto | bytes
    sizes: dict[str, int]
    verify: bool = False
    fallback: Literal["onnx", "ort"] = "onnx"

    def verdict(self) -> Verdict:
        """Optimize the model and judge the result."""
        return judge(self.model, self.sizes, self.seed, verify=self.verify, fallback=self.fallback)


def case_of(seed: int) -> FuzzCase:
    """Return the case of a seed."""
    return draw_case(Random(seed), seed)


def draw_case(random: Random, seed: int) -> FuzzCase:
    """Draw a case; `seed` determines the inputs on which the models are compared."""
    kind = random.choices(["spelled", "random", "damaged"], [5, 5, 1])[0]
    if kind == "damaged":
        draft = random.choice([spelled_graph, _small_random_graph])(random)
        return FuzzCase(kind, seed, damaged(random, draft.model()), dict(SYMBOLS))
    draft = spelled_graph(random) if kind == "spelled" else random_graph(random)
    if kind == "spelled" or random.random() < 0.5:
        change(draft)
    fallback: Literal["onnx", "ort"] = "ort" if kind == "spelled" and random.random() < 0.15 else "onnx"
    return FuzzCase(kind, seed, draft.model(), draft.sizes, random.random() < 0.03, fallback)


def _small_random_graph(random: Random) -> Draft:
    return random_graph(random, 8)


def damaged(random: Random, model: onnx.ModelProto) -> bytes:
    """Return the serialized model with some bits flipped, cut off, or with a piece left out or doubled."""
    data = bytearray(model.SerializeToString())
    way = random.randrange(4)
    if way == 0:
        del data[random.randrange(len(data)) :]
    elif way == 1:
        start = random.randrange(len(data))
        piece = data[start : start + random.randint(1, 40)]
        data[start : start + len(piece)] = random.choice([b"", piece + piece])
    else:
        for _ in range(random.randint(1, MOST_FLIPS)):
            data[random.randrange(len(data))] ^= 1 << random.randrange(BITS)
    return bytes(data)
