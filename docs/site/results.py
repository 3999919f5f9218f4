"""The results of benchmarks/results, by the names of their benchmarks."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from result_text import read_result  # noqa: E402


def dated(name: str) -> list[Path]:
    """Return the results of a name, such as "gemm-h200": gemm-h200-<date>.json, oldest first.  Raises LookupError."""
    found = sorted((ROOT / "benchmarks" / "results").glob(f"{name}-[0-9]*.json"))
    if not found:
        raise LookupError(f"benchmarks/results has no {name}-<date>.json")
    return found


@functools.cache
def read(path: Path) -> dict[str, Any]:
    """Return what a result holds."""
    return read_result(path.read_text(encoding="utf-8"))


def result(name: str) -> dict[str, Any]:
    """Return what the newest result of a name holds.  Raises LookupError."""
    return read(dated(name)[-1])


def rows(name: str, table: str = "rows", /, **equal: object) -> list[dict[str, Any]]:
    """Return the rows of a result whose fields equal the given ones.  Raises LookupError where there is none."""
    found = [row for row in result(name)[table] if all(row.get(field) == value for field, value in equal.items())]
    if not found:
        raise LookupError(f"the newest result {name} has no row with {equal}")
    return found
