"""The cases of the fuzzer: a random number generator decides everything, so that a seed names a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import onnx
from changes import change
from control_flow_graphs import control_flow_graph
from damage import damaged
from drafts import Dim, Draft
from hostile import hostile_verdict, make_hostile
from image_graphs import image_graph
from judge import Options, Verdict, judge
from odd_sizes import declare_less, odd_size_graph
from quantized_graphs import quantized_graph
from random_graphs import random_graph
from special_constants import put_special_values
from spelled_graphs import spelled_graph

OPTIONS = {
    Options(): 8, Options(verify=True): 2, Options(dtype="float16"): 2, Options(dtype="bfloat16"): 2,
    Options(emit="standard"): 3, Options(layout="nhwc"): 2, Options(regions=False): 1, Options(fallback="ort"): 1,
    Options(then="unfuse"): 2, Options(then="optimize"): 2, Options(dtype="float16", verify=True): 1,
    Options(emit="standard", verify=True): 1, Options(layout="nhwc", then="unfuse"): 1,
}  # fmt: skip


@dataclass(frozen=True)
class FuzzCase:
    """A model, or the damaged bytes of one, and how it is optimized and judged."""

    kind: str
    seed: int
    model: onnx.ModelProto | bytes
    sizes: dict[str, int]
    options: Options = Options()  # noqa: RUF009
    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict)  # of inputs whose shapes are not declared
    special: bool = False  # whether inputs hold special values

    def verdict(self) -> Verdict:
        """Optimize the model and judge the result."""
        return self.judge(self.model, self.sizes, self.seed)

    def judge(self, model: onnx.ModelProto | bytes, sizes: dict[str, int], seed: int) -> Verdict:
        """Judge another model as this one, such as a part of it."""
        if self.kind == "hostile":
            return hostile_verdict(model, sizes, seed, self.options)
        return judge(model, sizes, seed, self.options, dims=self.dims, special=self.special)


def case_of(seed: int) -> FuzzCase:
    """Return the case of a seed."""
    return draw_case(Random(seed), seed)


def draw_case(random: Random, seed: int) -> FuzzCase:
    """Draw a case; `seed` determines the inputs on which the models are compared."""
    kind = random.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
    options = random.choices(list(OPTIONS), list(OPTIONS.values()))[0]
    draft = KINDS[kind][1](random)
    if kind in ("spelled", "sizes") or random.random() < 0.5:
        change(draft)
    if kind == "sizes":
        declare_less(draft)
    if kind == "special values":
        put_special_values(draft)
    model: onnx.ModelProto | bytes = draft.model()
    if kind == "bytes":
        model = damaged(random, draft.model())
    elif kind == "hostile":
        model = make_hostile(random, draft.model())
    return FuzzCase(kind, seed, model, draft.sizes, options, draft.declared(), kind == "special values")


def _small_graph(random: Random) -> Draft:
    return random.choice([spelled_graph, image_graph, quantized_graph, _few_nodes])(random)


def _few_nodes(random: Random) -> Draft:
    return random_graph(random, 8)


def _any_graph(random: Random) -> Draft:
    made = random.choice([spelled_graph, spelled_graph, random_graph, image_graph, quantized_graph])
    return made(random)


KINDS: dict[str, tuple[int, Callable[[Random], Draft]]] = {  # the share of each, and what draws its graphs
    "spelled": (22, spelled_graph),
    "random": (18, random_graph),
    "images": (12, image_graph),
    "control flow": (12, control_flow_graph),
    "sizes": (10, odd_size_graph),
    "quantized": (10, quantized_graph),
    "special values": (8, _any_graph),
    "hostile": (4, _small_graph),
    "bytes": (4, _small_graph),
}
