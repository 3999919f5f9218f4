"""Run the command line as `onnxfuse` or `python -m onnxfuse`."""

from __future__ import annotations

import sys

import onnxfuse.interrupts as interrupts  # `from onnxfuse import` would import the pattern language


def run() -> None:
    """Run the command of the program's arguments, and exit."""
    try:
        try:
            interrupts.install()
            from onnxfuse.cli import main

            main(prog_name="onnxfuse")
        finally:
            interrupts.ignore()
    except SystemExit:
        raise
    except BaseException:
        if not interrupts.seen():
            raise
        sys.stderr.write("Aborted!\n")
        sys.exit(1)


if __name__ == "__main__":
    run()
