"""The configs of a kernel that shared memory has room for: all of them, or a few that are good for any size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from onnxfuse.kernels.conv.problem import Conv
from onnxfuse.kernels.menu import few_of_each
from onnxfuse.runtime.plan import Device


class HasSharedMemory(Protocol):
    """A config that knows the dynamic shared memory of its blocks."""

    def shared(self, conv: Conv) -> int:
        """Return its bytes."""


Config = TypeVar("Config", bound=HasSharedMemory)


def fitting(configs: Iterable[Config], conv: Conv, device: Device) -> list[Config]:
    """Return the configs that shared memory has room for."""
    return [config for config in configs if config.shared(conv) <= device.shared_per_block]


def few_fitting(
    problems: Sequence[Conv],
    device: Device,
    configs: Callable[[Conv], Iterable[Config]],
    cost: Callable[[Conv, Config, Device], float],
    most: int,
) -> list[Config]:
    """Return a few configs for a convolution of dynamic sizes, of which one is good for any size.

    problems  the convolution at usual sizes
    """
    return few_of_each(
        problems,
        lambda conv: fitting(configs(conv), conv, device),
        lambda conv, config: cost(conv, config, device),
        most,
    )
