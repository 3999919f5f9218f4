"""Answer one request in a fresh process, and write down when the answer was there: the child of serving_cold.py.

It imports what a server of one engine imports, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    task: dict[str, Any] = json.loads(sys.argv[1])
    with np.load(task["inputs"]) as file:
        feeds = dict(file)
    session = opened(task)
    outputs = session.run(None, feeds)
    answered = time.monotonic()
    names = [each.name for each in session.get_outputs()]
    np.savez(task["outputs"], **dict(zip(names, outputs, strict=True)))
    Path(task["answer"]).write_text(json.dumps({"answered": answered}), encoding="utf-8")
    if task["save_plans"]:
        from onnxfuse.runtime.saved_plans import save_plans

        save_plans(task["save_plans"], task["provider"])
    os._exit(0)  # the next start must not wait for this one's compiler


def opened(task: dict[str, Any]) -> Any:
    """Return the session of an engine as a server opens it."""
    import onnxruntime

    if task["provider"] == "CUDAExecutionProvider":
        with contextlib.redirect_stdout(None):  # it prints the libraries that it does not find
            onnxruntime.preload_dlls()
    if task["engine"] == "onnxruntime":
        return onnxruntime.InferenceSession(task["model"], providers=[task["provider"]])
    import onnxfuse

    plans = task["plans"] or None
    return onnxfuse.InferenceSession(task["model"], providers=[task["provider"]], tune=task["tune"], plans=plans)


if __name__ == "__main__":
    main()
