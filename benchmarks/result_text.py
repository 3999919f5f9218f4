"""Lay out a benchmark's results as JSON, in which every row of a table is one line without the names of its columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TABLE = {"columns", "rows"}  # the keys of a table


def result_text(result: Mapping[str, Any]) -> str:
    """Return JSON with a line for each entry of the result, and for each of its rows where it is a list of objects.

    Such a list is written as {"columns": names, "rows": lists of values}; null is a value that a row does not have.
    Numbers have six digits, and "nan" and "inf" are strings.
    """
    entries = ",\n".join(f"{json.dumps(name)}: {''.join(_entry(value))}" for name, value in result.items())
    return f"{{\n{entries}\n}}\n"


def read_result(text: str) -> dict[str, Any]:
    """Return the result that `result_text` wrote."""
    return {name: _rows(value) for name, value in json.loads(text).items()}


def _entry(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
        columns = list(dict.fromkeys(name for row in value for name in row))
        yield f'{{"columns": {_line(columns)}, "rows": [\n'
        yield ",\n".join(_line([row.get(name) for name in columns]) for row in value)
        yield "\n]}"
    elif isinstance(value, Mapping) and any(isinstance(each, Mapping | list | tuple) for each in value.values()):
        yield "{\n" + ",\n".join(f"{json.dumps(name)}:{_line(each)}" for name, each in value.items()) + "\n}"
    else:
        yield _line(value)


def _rows(value: Any) -> Any:
    if not (isinstance(value, Mapping) and value.keys() == TABLE):
        return value
    named: list[Sequence[tuple[str, Any]]] = [list(zip(value["columns"], row, strict=True)) for row in value["rows"]]
    return [{name: each for name, each in row if each is not None} for row in named]


def _line(value: Any) -> str:
    return json.dumps(_short(value), default=str, separators=(",", ":"))


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list | tuple) else value
