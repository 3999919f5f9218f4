"""Rank a kernel's configs by estimated time: all configs that fit the device or, for dynamic sizes, a few good ones."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from onnxfuse.kernels.config_subset import covering_subset_of_each
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.conv.representative_sizes import usual
from onnxfuse.runtime.plan import Device
from onnxfuse.runtime.symint import best_first, is_symbolic

Config = TypeVar("Config")
# Maps a function that returns a key of a config to the maximum number of configs with the same key.
Limits: TypeAlias = Mapping[Callable[[Config], Hashable], int]


@dataclass(frozen=True)
class Ranking(Generic[Config]):
    """The configs of a kernel, and the cost by which they are ranked.

    configs  returns the configs that fit a device, for sizes that are numbers
    cost     estimates the time of a launch; sizes may be symbolic
    most     the largest number of configs for dynamic sizes
    quick    returns fewer configs than `configs`, in less time; used for dynamic sizes if present
    """

    configs: Callable[[Conv, Device], Sequence[Config]]
    cost: Callable[[Conv, Config, Device], float]
    most: int
    quick: Callable[[Conv, Device], Sequence[Config]] | None = None

    def ranked(self, conv: Conv, device: Device) -> list[Config]:
        """Return the configs for a convolution, the expected fastest first."""
        dynamic = is_symbolic(conv.n, *conv.sizes)
        found = few_configs(self, usual(conv), device) if dynamic else self.configs(conv, device)
        return self.by_cost(found, conv, device)

    def by_cost(self, configs: Iterable[Config], conv: Conv, device: Device) -> list[Config]:
        """Return configs by their cost, the lowest first."""
        return best_first(configs, lambda config: self.cost(conv, config, device))


@functools.lru_cache(maxsize=2048)
def few_configs(ranking: Ranking[Config], problems: tuple[Conv, ...], device: Device) -> list[Config]:
    """Return a few configs such that one is fast for each of `problems`: one convolution at several usual sizes."""
    return covering_subset_of_each(
        problems,
        lambda conv: (ranking.quick or ranking.configs)(conv, device),
        lambda conv, config: ranking.cost(conv, config, device),
        ranking.most,
    )


def varied(ordered: Iterable[Config], limits: Limits[Config], most: int) -> list[Config]:
    """Return the first configs of `ordered`: at most `most`, and no more with the same key than `limits` allows."""
    chosen, counts = list[Config](), Counter[tuple[object, Hashable]]()
    for config in ordered:
        keys = [(key, key(config)) for key in limits]
        if len(chosen) < most and all(counts[key, value] < limits[key] for key, value in keys):
            chosen.append(config)
            counts.update(keys)
    return chosen
