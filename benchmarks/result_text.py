"""Lay out a benchmark's results as JSON, in which every row of a table is one line without the names of its columns."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

TABLE = {"columns", "rows"}  # the keys of a table


def result_text(result: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry of the result, and for each of its rows where it is a table.

    A list of objects is a table, at any depth: it is written as {"columns": names, "rows": lists of values}; null is a
    value that a row does not have. Several named objects of equal keys are one too, whose rows keep their names.
    Numbers have five digits, and "nan" and "inf" are strings.
    """
    entries = ",\n".join(f"{json.dumps(name)}: {_entry(_plain(value))}" for name, value in result.items())
    return f"{{\n{entries}\n}}\n"


def read_result(text: str) -> dict[str, Any]:
    """Return the result that `result_text` wrote."""
    return {name: _read(value) for name, value in json.loads(text).items()}


def _plain(value: Any) -> Any:
    """Return a value with tables in place of objects, and with short numbers."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        objects = list(value.values())
        if len(objects) > 1 and _are_objects(objects) and all(each.keys() == objects[0].keys() for each in objects):
            columns = list(objects[0])
            return {"columns": columns, "rows": {name: _values(each, columns) for name, each in value.items()}}
        return {name: _plain(each) for name, each in value.items()}
    if not isinstance(value, list | tuple):
        return value
    if value and _are_objects(value):
        columns = list(dict.fromkeys(name for row in value for name in row))
        return {"columns": columns, "rows": [_values(row, columns) for row in value]}
    return [_plain(each) for each in value]


def _are_objects(values: Sequence[Any]) -> bool:
    return all(isinstance(each, Mapping) for each in values)


def _values(row: Mapping[str, Any], columns: Sequence[str]) -> list[Any]:
    return [_plain(row.get(name)) for name in columns]


def _entry(value: Any) -> str:
    """Return the JSON of an entry of the result."""
    if _is_table(value):
        return f'{{"columns": {_line(value["columns"])}, "rows": {_lines(value["rows"])}}}'
    if isinstance(value, Mapping) and any(isinstance(each, Mapping | list) for each in value.values()):
        return _lines(value)
    return _line(value)


def _lines(value: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return JSON with a line for each value of an object or a list."""
    if isinstance(value, Mapping):
        return "{\n" + ",\n".join(f"{json.dumps(name)}:{_line(each)}" for name, each in value.items()) + "\n}"
    return "[\n" + ",\n".join(map(_line, value)) + "\n]"


def _line(value: Any) -> str:
    return json.dumps(value, default=str, separators=(",", ":"))


def _read(value: Any) -> Any:
    """Return a value with objects in place of tables."""
    if isinstance(value, list):
        return [_read(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if not _is_table(value):
        return {name: _read(each) for name, each in value.items()}
    columns, rows = value["columns"], value["rows"]
    if isinstance(rows, Mapping):
        return {name: _object(columns, row) for name, row in rows.items()}
    return [{name: each for name, each in _object(columns, row).items() if each is not None} for row in rows]


def _object(columns: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(columns, map(_read, row), strict=True))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == TABLE
