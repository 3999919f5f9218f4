"""Run the command line as `onnxfuse` or `python -m onnxfuse`."""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from typing import Final, NoReturn

import onnxfuse.interrupts as interrupts  # `from onnxfuse import` would import the pattern language

# Python's default, 700, takes 8 % of the time of importing the optimizer and patterns, which leaves 147,000 objects.
OBJECTS_BETWEEN_COLLECTIONS: Final = 200_000


def run() -> None:
    """Run the command line with the arguments of this process, and exit."""
    try:
        try:
            interrupts.install()
            gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
            from onnxfuse.cli import main
            from onnxfuse.cli.terminal import make_safe

            make_safe()
            main(prog_name="onnxfuse")
        finally:
            interrupts.ignore()
            gc.freeze()  # else Python's shutdown searches all objects for garbage: 0.1 s, and more for a large model
    except SystemExit as error:
        if interrupts.seen():
            _end(error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException:
        if not interrupts.seen():
            raise
        sys.stderr.write("Aborted!\n")
        _end(1)


def _end(code: int) -> NoReturn:
    """End the process without Python's shutdown, during which onnxruntime's threads may still run interrupted work."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader has closed the stream
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
