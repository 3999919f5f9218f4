"""Make the templates of a session's nodes, and compile their kernels, while onnxruntime makes the session."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from onnxfuse.errors import OnnxfuseError
from onnxfuse.runtime import planner
from onnxfuse.runtime.fused_calls import Call, Shape
from onnxfuse.runtime.plan import TensorSpec
from onnxfuse.runtime.planner import Dims
from onnxfuse.runtime.prepared import PreparedTemplate, load_all
from onnxfuse.runtime.situation import Situation
from onnxfuse.runtime.target import NoTarget, PlanChoice, Target

log: Final = logging.getLogger("onnxfuse")


@contextmanager
def preparation(calls: Sequence[Call], target: Target | NoTarget, choice: PlanChoice) -> Iterator[None]:
    """Prepare the nodes that run as kernels in a thread beside the body of the `with`, whose end waits for it.

    A node that cannot be prepared, because its shapes are unknown or no kernel compiles, is left to its first run,
    whose error says more.
    """
    if isinstance(target, NoTarget) or not calls:
        yield
        return
    thread = threading.Thread(target=_prepare, args=(calls, target, choice), name="onnxfuse preparation")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _prepare(calls: Sequence[Call], target: Target, choice: PlanChoice) -> None:
    try:
        load_all(_templates(calls, target, choice))
    except Exception as error:  # of CuPy or the driver, which have no common class
        log.info("kernels are compiled when their nodes first run: %s: %s", type(error).__name__, error)


def _templates(calls: Sequence[Call], target: Target, choice: PlanChoice) -> list[PreparedTemplate]:
    """Return the different templates of some nodes."""
    found: dict[int, PreparedTemplate] = {}
    for call in calls:
        dims = dims_of(call.shapes)
        if dims is None or None in call.dtypes:
            continue
        situation = Situation(call.node, target.device, target.provider, choice != "first")
        planner.expect(call.node, dims, target.device)
        rows = zip(dims, call.dtypes, call.constants, strict=True)
        inputs = [TensorSpec(shape, str(dtype), constant=constant) for shape, dtype, constant in rows]
        if planner.in_files(situation, inputs):
            continue
        try:
            prepared = planner.prepare(situation, inputs)
        except (OnnxfuseError, ValueError) as error:
            log.info("node '%s' is planned when it first runs: %s", call.node.name, error)
            continue
        found[id(prepared)] = prepared
    return list(found.values())


def dims_of(shapes: Sequence[Shape | None]) -> Dims | None:
    """Return shapes with -1 - k in place of the name of a dynamic dim, numbered in the order in which they come first.

    None is returned if a rank is unknown.
    """
    numbers: dict[str, int] = {}
    result = []
    for shape in shapes:
        if shape is None:
            return None
        result.append(
            tuple(dim if isinstance(dim, int) else -1 - numbers.setdefault(dim, len(numbers)) for dim in shape)
        )
    return tuple(result)
