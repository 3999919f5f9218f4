"""Select the configs of a kernel that fit into shared memory: all, or for dynamic sizes a few good ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from onnxfuse.kernels.config_subset import covering_subset_of_each
from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.runtime.plan import Device


class HasSharedMemory(Protocol):
    """A config whose `shared` returns the dynamic shared memory of its blocks."""

    def shared(self, conv: Conv) -> int:
        """Return the bytes of dynamic shared memory that a block takes."""


Config = TypeVar("Config", bound=HasSharedMemory)


def fitting(configs: Iterable[Config], conv: Conv, device: Device) -> list[Config]:
    """Return the configs whose blocks fit into shared memory."""
    return [config for config in configs if config.shared(conv) <= device.shared_per_block]


def few_fitting(
    problems: Sequence[Conv],
    device: Device,
    configs: Callable[[Conv], Iterable[Config]],
    cost: Callable[[Conv, Config, Device], float],
    most: int,
) -> list[Config]:
    """Return at most `most` configs for a convolution of dynamic sizes; at least one of them is fast at any size.

    problems  the convolution at usual sizes
    """
    return covering_subset_of_each(
        problems,
        lambda conv: fitting(configs(conv), conv, device),
        lambda conv, config: cost(conv, config, device),
        most,
    )
