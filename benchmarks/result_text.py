"""Lay out a benchmark's results as JSON: every row of a table is one line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

NESTED = (Mapping, list, tuple)


def result_text(result: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry of the result, and for each row of an entry that is a table.

    Numbers have six digits, and "nan" and "inf" are strings.
    """
    entries = ",\n".join(f"{json.dumps(name)}: {_table(value)}" for name, value in result.items())
    return f"{{\n{entries}\n}}\n"


def _table(value: Any) -> str:
    """Return a line for each row of a list or an object of lists or objects; other values are one line."""
    if isinstance(value, Mapping) and any(isinstance(each, NESTED) for each in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(name)}:{_line(each)}" for name, each in value.items()) + "\n}"
    if isinstance(value, list | tuple) and any(isinstance(each, NESTED) for each in value):
        return "[\n" + ",\n".join(map(_line, value)) + "\n]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(_short(value), default=str, separators=(",", ":"))


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value
