"""Record nodes whose kernels failed: each is logged once, and `explain_session` says what runs instead."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Final, Literal

from onnxfuse.errors import OnnxfuseError, first_line
from onnxfuse.runtime.plan import Device, FusedNode
from onnxfuse.runtime.template_key import signature

log: Final = logging.getLogger("onnxfuse")
# The replacement of a failed kernel: another kernel, or the node's body (its ONNX function) for some or for all sizes.
Instead = Literal["kernel", "body", "body always"]
TEXTS: Final[dict[Instead, str]] = {
    "kernel": "another kernel runs, or its body, in place of one that failed",
    "body": "its body runs where its kernel failed",
    "body always": "its body runs, because its kernels failed",
}
Place = tuple[str, str, int]  # the signature of a node, and the name and ordinal of its GPU


@dataclass(frozen=True)
class Failure:
    """The error of a node's kernel, and what runs instead."""

    instead: Instead
    error: str  # the first line of the error

    def __str__(self) -> str:
        return f"{TEXTS[self.instead]}: {self.error}"


_failures: Final[dict[Place, Failure]] = {}
_lock: Final = threading.Lock()


def place_of(node: FusedNode, device: Device) -> Place:
    """Return a key that is equal for nodes that the same kernels run."""
    return signature(node, (), device), device.name, device.ordinal


def note(node: FusedNode, device: Device, error: BaseException, instead: Instead) -> None:
    """Record and log a failure of a node's kernel, unless an equal or more severe one is recorded (see TEXTS)."""
    order, place = list(TEXTS), place_of(node, device)
    first = OnnxfuseError(first_line(Exception(*error.args)))  # only the first line of the compiler's messages
    failure = Failure(instead, f"{type(error).__name__}: {first}")
    with _lock:
        known = _failures.get(place)
        if known and order.index(known.instead) >= order.index(instead):
            return
        _failures[place] = failure
    log.warning("node '%s' (%s): %s", node.name, node.fusion, failure)


def failure_of(place: Place) -> Failure | None:
    """Return the recorded failure of the nodes with this key; None if nothing failed."""
    return _failures.get(place)


def why_body(node: FusedNode, device: Device) -> str | None:
    """Return the earlier error that showed that no kernel can run a node at any sizes; None if there was none."""
    failure = _failures.get(place_of(node, device)) if _failures else None
    return failure.error if failure and failure.instead == "body always" else None
