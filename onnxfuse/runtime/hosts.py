"""Find the host of a fusion: the Python module that says whether kernels can run a node, and plans how.

The kernels of related fusions are a family: a folder of `onnxfuse.kernels` whose `__init__.py` names its fusions in
`FUSIONS`, and whose `host.py` is their `Host`. Adding a folder adds a family; nothing else has to know of it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Sequence
from typing import Protocol, cast

import onnxfuse.kernels
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec


class Host(Protocol):
    """What `host.py` of a family defines."""

    def supports(self, node: FusedNode, dtypes: Sequence[str], device: Device, /) -> str | None:
        """Return why no kernel can run this node on this device; None if one can.  `dtypes` are those of its inputs."""

    def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device, /) -> list[Plan]:
        """Return the plans for these inputs, the one that is expected to be fastest first.

        Raises ValueError if the shapes do not fit together, or no kernel can run them.
        """


def find_host(fusion: str) -> Host | None:
    """Return the host of a fusion; None if the fusion has no kernels."""
    return _find_host(fusion, tuple(onnxfuse.kernels.__path__))


@functools.cache  # listing the folders takes 1 ms, and every plan asks for its host
def _find_host(fusion: str, folders: tuple[str, ...]) -> Host | None:
    """Return the host of a fusion among the families in these folders."""
    for module in pkgutil.iter_modules(folders):
        if module.ispkg:
            name = f"{onnxfuse.kernels.__name__}.{module.name}"
            family = importlib.import_module(name)
            if fusion in family.FUSIONS:
                return cast(Host, importlib.import_module(f"{name}.host"))
    return None
