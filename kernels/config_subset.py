"""Chooses a few of many kernel configs for a node of dynamic sizes, because each chosen config is a kernel to compile.

The template of such a node (its plans for all sizes) names these kernels, and all of them are compiled at the start.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

Config = TypeVar("Config")
Problem = TypeVar("Problem")

SLACK: Final = 0.02  # the best chosen config is allowed to cost this share more than the best of all configs
MAX_OF_PROBLEM: Final = 12  # how many of a problem's best configs become candidates for all problems


def few(
    configs: Sequence[Config], problems: Sequence[Problem], cost: Callable[[Problem, Config], float], most: int
) -> list[Config]:
    """Return at most `most` configs; for each problem, one of them should cost little more than the best of all.

    The cost is infinite if a config cannot run a problem.  Each cost is divided by the cost of the problem's best
    config.  Configs are chosen one after the other: the next one is the config that lowers the mean cost the most.
    """
    costs = np.array([[cost(problem, config) for problem in problems] for config in configs], dtype=np.float64)
    if not costs.size:
        return []
    solvable = np.isfinite(costs).any(axis=0)
    costs = costs[:, solvable] / costs[:, solvable].min(axis=0)
    costs[~np.isfinite(costs)] = 1e3
    chosen: list[int] = []
    least = np.full(costs.shape[1], 1e6)
    while len(chosen) < most and (least > 1 + SLACK).any():
        at = int(np.argmin(np.minimum(costs, least).mean(axis=1)))
        chosen.append(at)
        least = np.minimum(least, costs[at])
    return [configs[at] for at in chosen]


def covering_subset_of_each(
    problems: Sequence[Problem],
    configs: Callable[[Problem], Sequence[Config]],
    cost: Callable[[Problem, Config], float],
    most: int,
    looked_at: int = 4,
) -> list[Config]:
    """Return at most `most` configs, as `few` chooses them; `configs` returns the possible configs of a problem.

    Not all configs are compared: the candidates are the best configs of at most `looked_at` problems.
    """
    found: dict[Config, None] = {}
    for problem in problems[:: -(-len(problems) // looked_at)]:
        best = heapq.nsmallest(MAX_OF_PROBLEM, configs(problem), key=lambda config: cost(problem, config))
        found.update(dict.fromkeys(best))
    return few(list(found), problems, cost, most)
