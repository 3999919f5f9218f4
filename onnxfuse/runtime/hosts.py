"""Find the host of a fusion: the Python module that says whether kernels can run a node, and makes its plans."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from onnxfuse.runtime.kernel_folders import Family, kernel_folders
from onnxfuse.runtime.plan import Device, FusedNode, Plan, TensorSpec


class Host(Protocol):
    """The functions that the `host.py` of each family (a folder with the kernels of related fusions) defines."""

    def supports(self, node: FusedNode, dtypes: Sequence[str], device: Device, /) -> str | None:
        """Return why no kernel can run this node on this device; None if one can.  `dtypes` are its inputs' dtypes."""

    def candidates(self, node: FusedNode, inputs: Sequence[TensorSpec], device: Device, /) -> list[Plan]:
        """Return the plans for these inputs, the one that is expected to be fastest first.

        Raises ValueError if the shapes do not fit together, or no kernel can run them.
        """


def numbers_of(node: FusedNode) -> tuple[int, ...]:
    """Return the indices of the inputs that are numbers: each is one int32 in host memory, on which plans depend.

    The dict `NUMBERS` of a family names these inputs for each fusion.  The TensorSpec of a number has the shape
    (number,), so that a plan can depend on the number as on a dynamic dim.
    """
    family = _family(node.fusion)
    names = family.numbers.get(node.fusion, ()) if family else ()
    return tuple(i for i, operand in enumerate(node.operands) if operand in names)


def lengths_of(node: FusedNode, outputs: Sequence[TensorSpec]) -> Mapping[str, int]:
    """Return the names of the operands that hold sequence lengths, each with its largest value.

    The function `lengths` of the fusion's host (the module that makes plans) returns them; most hosts have none.
    """
    function = getattr(find_host(node.fusion), "lengths", None)
    return cast(Mapping[str, int], function(node, outputs)) if function else {}


def find_host(fusion: str) -> Host | None:
    """Return the host of a fusion (the module that makes its plans); None if the fusion has no kernels.

    Raises KernelError, which names the folder or package of the host, if the host does not load.
    """
    family = _family(fusion)
    return _host(family) if family else None


def _family(fusion: str) -> Family | None:
    families = (family for each in kernel_folders() for family in each.families)
    return next((family for family in families if fusion in family.fusions), None)


@functools.cache
def _host(family: Family) -> Host:
    name = f"{family.module}.host"
    try:
        host = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        what = f"has a host {name} that does not load: {type(error).__name__}: {error}"
        raise family.origin.error(what, "repair it") from error
    for function in "supports", "candidates":
        if not callable(getattr(host, function, None)):
            raise family.origin.error(f"has a host {name} without the function {function}", "add it")
    if hasattr(host, "NUMBERS"):
        raise family.origin.error(f"has a host {name} with NUMBERS", "move them to the family's __init__.py")
    return cast(Host, host)
