"""Compile the kernels that the first runs of a session rarely need, in background threads."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Sequence
from typing import Final

from onnxfuse.runtime.loaded_templates import PreparedTemplate, load_all
from onnxfuse.runtime.planner import planner

log: Final = logging.getLogger("onnxfuse")
_working: Final[set[threading.Thread]] = set()
_exits: Final = threading.Event()


def compile_in_background(templates: Sequence[PreparedTemplate]) -> None:
    """Start a thread that loads the missing kernels of plan templates, and then gives the templates to their nodes.

    A template has the plans of a fused node for all sizes of its dynamic dims.
    """
    if any(template.missing() for template in templates):
        thread = threading.Thread(target=_load, args=(templates,), name="onnxfuse later kernels", daemon=True)
        _working.add(thread)
        thread.start()


def _load(templates: Sequence[PreparedTemplate]) -> None:
    try:
        load_all(templates, threads=max(1, (os.cpu_count() or 1) // 2), goes_on=lambda: not _exits.is_set())
        for template in templates:
            if not _exits.is_set():
                planner.mend(template)
                planner.complete(template)
    except Exception as error:  # CuPy and the driver have no common error class
        # A run that needs a missing kernel compiles it itself, and reports the error if that fails.
        log.info("kernels are compiled when a run needs them: %s: %s", type(error).__name__, error)
    finally:
        _working.discard(threading.current_thread())


def wait() -> None:
    """Wait until all threads that `compile_in_background` started have ended."""
    for thread in list(_working):
        thread.join()


@atexit.register
def _stop() -> None:
    """Wait for running compilations, because the compiler's library must not be unloaded while they use it."""
    _exits.set()
    wait()
