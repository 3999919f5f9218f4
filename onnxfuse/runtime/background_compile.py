"""Compile in background threads what a session does not wait for."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Final

from onnxfuse.runtime import late_work
from onnxfuse.runtime.likely_sizes import likely_sizes
from onnxfuse.runtime.loaded_templates import PreparedTemplate, load_all
from onnxfuse.runtime.planner import planner
from onnxfuse.runtime.priority_pool import processors
from onnxfuse.runtime.template import size_count

log: Final = logging.getLogger("onnxfuse")


def compile_in_background(
    templates: Sequence[PreparedTemplate], session: object | None = None, finish: Callable[[], None] | None = None
) -> None:
    """Start a thread that loads the missing kernels of plan templates, and sends the templates to their nodes.

    A template has the plans of a node for all sizes.  If a session is given, the thread stops with it.

    finish  is called by the thread afterwards, also if no kernel is missing
    """
    is_missing = any(template.missing() for template in templates)
    if not (is_missing or finish):
        return
    owner = weakref.ref(session) if session is not None else None

    def goes_on() -> bool:
        return not late_work.exits() and (owner is None or owner() is not None)

    def work() -> None:
        if is_missing:
            load_and_send(templates, goes_on)
        if finish:
            finish()

    late_work.start(work, "onnxfuse later kernels")


def load_and_send(
    templates: Sequence[PreparedTemplate], goes_on: Callable[[], bool] = lambda: not late_work.exits()
) -> None:
    """Load the missing kernels of templates, first those of likely sizes, and send the templates to their nodes.

    A template is sent when its kernels of likely sizes are loaded, and again when all kernels of all templates are.
    """
    likely: dict[int, set[str]] = {}

    def send(template: PreparedTemplate) -> None:
        try:
            if goes_on() and not likely[id(template)] & template.missing().keys():
                planner.mend(template)
                planner.send(template)
        except Exception as error:  # such as a plan that cannot be written; the nodes of other templates need theirs
            name = template.situation.node.name
            log.warning("node '%s' goes on as its body: %s: %s", name, type(error).__name__, error)

    threads = processors()
    try:
        likely.update((id(template), likely_keys(template)) for template in templates)
        load_all(templates, lambda each: likely[id(each)], max(1, threads - 1), goes_on, send)
        load_all(templates, threads=max(1, threads // 2), goes_on=goes_on)
        for template in templates:
            send(template)
    except Exception as error:  # CuPy and the driver have no common error class
        log.warning("nodes without compiled kernels go on as their bodies: %s: %s", type(error).__name__, error)


def likely_keys(of: PreparedTemplate) -> set[str]:
    """Return the keys (`Kernel.key`) of the kernels that a template launches at likely sizes."""
    return of.keys_at(likely_sizes(size_count(of.template.inputs)))
