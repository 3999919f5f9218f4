"""Write a benchmark's results as rows, which later runs add to or replace."""

from __future__ import annotations

import datetime
import functools
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cupy
import torch
from result_text import read_result, result_text


@functools.cache
def versions() -> dict[str, str]:
    """Return the device, the date, and the versions of everything that affects a time."""
    return {
        "device": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "torch": torch.__version__,
        "cupy": cupy.__version__, "cuda": str(torch.version.cuda),
        "driver": str(cupy.cuda.runtime.driverGetVersion()), "onnxruntime": onnxruntime_version(),
    }  # fmt: skip


def onnxruntime_version() -> str:
    try:
        return str(importlib.import_module("onnxruntime").__version__)
    except ImportError:
        return "none"


class Rows:
    """Results that are written to `path` after each row; a row replaces the one with equal `fields`."""

    def __init__(self, path: Path, fields: Sequence[str], earlier: Path | None = None, **more: Any) -> None:
        """Begin with the rows of `earlier`, which must come from this device and these versions; `more` is written too.

        Raises SystemExit where it is not.
        """
        self._path, self._fields, self._more = path, fields, more
        self._rows: dict[str, Mapping[str, Any]] = {}
        if earlier is not None:
            found = read_result(earlier.read_text(encoding="utf-8"))
            if found["versions"] != versions():
                raise SystemExit(f"{earlier} was measured with {found['versions']}; here are {versions()}")
            self._rows = {self._key(row): row for row in found["rows"]}
        path.parent.mkdir(parents=True, exist_ok=True)

    def _key(self, row: Mapping[str, Any]) -> str:
        return json.dumps([row[name] for name in self._fields], default=str)

    def put(self, row: Mapping[str, Any]) -> None:
        self._rows[self._key(row)] = row
        result = {"versions": versions(), **self._more, "rows": list(self._rows.values())}
        self._path.write_text(result_text(result), encoding="utf-8")
