"""Which nodes have kernels that failed: each is warned of once, and `explain_session` says what runs instead."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Final, Literal

from onnxfuse.errors import OnnxfuseError, first_line
from onnxfuse.runtime.plan import Device, FusedNode
from onnxfuse.runtime.template_key import signature

log: Final = logging.getLogger("onnxfuse")
# What runs where a kernel failed: another one, the body for some sizes, or the body for all sizes.
Instead = Literal["kernel", "body", "body always"]
TEXTS: Final[dict[Instead, str]] = {
    "kernel": "another kernel runs, or its body, in place of one that failed",
    "body": "its body runs where its kernel failed",
    "body always": "its body runs, because its kernels failed",
}
Place = tuple[str, str, int]  # of a node: its signature, and its GPU


@dataclass(frozen=True)
class Failure:
    """What failed of a node, and what runs instead."""

    instead: Instead
    error: str  # its first line

    def __str__(self) -> str:
        return f"{TEXTS[self.instead]}: {self.error}"


_failures: Final[dict[Place, Failure]] = {}
_lock: Final = threading.Lock()


def place_of(node: FusedNode, device: Device) -> Place:
    """Return what nodes have in common that run by the same kernels."""
    return signature(node, (), device), device.name, device.ordinal


def note(node: FusedNode, device: Device, error: BaseException, instead: Instead) -> None:
    """Note that a kernel of a node failed, and warn, unless a failure is known that left the node as few kernels."""
    order, place = list(TEXTS), place_of(node, device)
    first = OnnxfuseError(first_line(Exception(*error.args)))  # of the compiler's lines
    failure = Failure(instead, f"{type(error).__name__}: {first}")
    with _lock:
        known = _failures.get(place)
        if known and order.index(known.instead) >= order.index(instead):
            return
        _failures[place] = failure
    log.warning("node '%s' (%s): %s", node.name, node.fusion, failure)


def failure_of(place: Place) -> Failure | None:
    """Return what failed of the nodes of a place; None if nothing did."""
    return _failures.get(place)


def why_body(node: FusedNode, device: Device) -> str | None:
    """Return why no kernel can run a node for any sizes, as a session has found before; None if one may."""
    failure = _failures.get(place_of(node, device)) if _failures else None
    return failure.error if failure and failure.instead == "body always" else None
