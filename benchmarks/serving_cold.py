"""The time from the start of a process to its first answer, with and without what earlier processes left on disk."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers import Sampled, relative_error, sampled
from serving_engines import Bounds, Requests, Served, agreement, digits

from onnxfuse.errors import first_line
from onnxfuse.tuning.bound_session import PROVIDERS

MAX_SIZE = 128  # of a dim of the request; smaller where its range ends before


@dataclass(frozen=True)
class Start:
    """A way to start: the engine, whose caches it finds ("" for empty ones), and whether it reads the plan file."""

    name: str
    engine: str
    caches: str = ""
    plans: bool = False


STARTS = (
    Start("onnxruntime", "onnxruntime"),
    Start("onnxfuse, empty caches", "onnxfuse"),
    Start("onnxfuse, filled caches", "onnxfuse", "filled"),
    Start("onnxfuse, plan file", "onnxfuse", plans=True),
)


class Children:
    """Starts processes that answer one request each, with their files in one folder."""

    def __init__(self, served: Served, folder: Path, bounds: Bounds) -> None:
        self._served, self._folder, self._bounds = served, folder, bounds
        self._count = 0
        self.plans = folder / "plans.zip"
        self.sizes = {name: min(high, MAX_SIZE) for name, high in served.largest().items()}
        feeds: dict[str, Any] = Requests(served.original, tuple(self.sizes)).feeds(self.sizes)
        np.savez(folder / "inputs.npz", **feeds)

    def seconds(self, start: Start, save_plans: bool = False) -> tuple[float, dict[str, Any]]:
        """Start a process; return the seconds to its answer, and its outputs.

        Raises RuntimeError with the last line of what it printed if it failed, TimeoutExpired if time ran out.
        """
        self._count += 1
        caches = self._folder / (start.caches or f"caches{self._count}")
        answer, outputs = self._folder / "answer.json", self._folder / "outputs.npz"
        task = {
            "engine": start.engine, "provider": PROVIDERS[self._served.provider], "tune": self._served.tune,
            "model": self._served.original if start.engine == "onnxruntime" else self._served.fused,
            "inputs": str(self._folder / "inputs.npz"), "outputs": str(outputs), "answer": str(answer),
            "plans": str(self.plans) if start.plans else "", "save_plans": str(self.plans) if save_plans else "",
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("cold_start.py")), json.dumps(task)]
        environment = os.environ | caches_in(caches)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode
        started = time.monotonic()  # of the whole machine: the child reads the same clock
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=self._bounds.left())
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        with np.load(outputs) as file:
            return json.loads(answer.read_text(encoding="utf-8"))["answered"] - started, dict(file)


def caches_in(folder: Path) -> dict[str, str]:
    """Return the environment that puts the caches of onnxfuse and CuPy into this folder, which is made."""
    found = {"ONNXFUSE_CACHE_DIR": folder / "onnxfuse", "CUPY_CACHE_DIR": folder / "cupy"}
    for each in found.values():
        each.mkdir(parents=True, exist_ok=True)
    return {name: str(each) for name, each in found.items()}


def cold(served: Served, runs: int, bounds: Bounds) -> dict[str, Any]:
    """Start processes in turns, `runs` in each way; a way that fails has its error as the result.

    Two processes that are not counted come first: they bring the files into the memory of the machine, fill the caches
    and write the plan file.
    """
    rows: dict[str, dict[str, Any]] = {start.name: {"start": start.name, "seconds": []} for start in STARTS}
    with tempfile.TemporaryDirectory() as folder:
        children = Children(served, Path(folder), bounds)
        reference = sampled(children.seconds(Start("", "onnxruntime"))[1])
        try:
            children.seconds(Start("", "onnxfuse", "filled"), save_plans=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rows["onnxfuse, plan file"]["error"] = f"no plan file: {first_line(error)}"
        for _ in range(runs):
            for start in STARTS:
                if "error" not in rows[start.name]:
                    _start(children, start, reference, rows[start.name])
    for row in rows.values():
        if row["seconds"]:
            row["median_s"] = digits(statistics.median(row["seconds"]))
    return {"asked": runs, "sizes": children.sizes, "rows": list(rows.values())}


def _start(children: Children, start: Start, reference: Mapping[str, Sampled], row: dict[str, Any]) -> None:
    """Start a process, and add what it took and how far its outputs are off to the row."""
    try:
        seconds, outputs = children.seconds(start)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        row["error"] = first_line(error)
        return
    row["seconds"].append(digits(seconds))
    if row.get("agrees", True):
        row |= agreement(max(relative_error(reference, outputs), row.get("relative_error", 0.0)))
