"""Defaults of options, from the table `[tool.onnxfuse]` of the nearest pyproject.toml."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from onnxfuse.errors import UsageError

FILE: Final = "pyproject.toml"
TABLE: Final = "tool.onnxfuse"
OVERWRITE: Final = "overwrite"


def read_defaults(commands: Mapping[str, click.Command]) -> dict[str, dict[str, Any]]:
    """Return the defaults of each command by the names of click's parameters; {} without a table.

    The table has a table for each command, whose keys are the long options without their dashes: `dtype = "float16"`,
    `regions = false`.  Raises UsageError for a file that is not TOML, for unknown commands and options, and for options
    that choose files to read, to write or to run: a file of a stranger's folder must not choose them.
    """
    here = Path.cwd()
    path = next((found for each in (here, *here.parents) if (found := each / FILE).is_file()), None)
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path else ""
        table = tomllib.loads(text)["tool"]["onnxfuse"] if TABLE in text else {}
    except (KeyError, TypeError):  # the words are in a comment or a text
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise UsageError(f"'{path}': {TABLE} is not a table of commands")
    return {name: _of_command(f"'{path}': [{TABLE}.{name}]", name, given, commands) for name, given in table.items()}


def _of_command(where: str, name: str, given: object, commands: Mapping[str, click.Command]) -> dict[str, Any]:
    if name not in commands or not isinstance(given, Mapping):
        raise UsageError(f"{where} is not a table of options of a command{_similar(name, commands)}")
    options = {
        text.removeprefix("--"): each
        for each in commands[name].params
        for text in each.opts
        if isinstance(each, click.Option) and text.startswith("--") and each.expose_value
    }
    for key in given:
        if key not in options:
            raise UsageError(f"{where} has no option '{key}'{_similar(key, options)}")
        if isinstance(options[key].type, click.Path) or key == OVERWRITE:
            raise UsageError(f"{where}: {key} chooses files, which no file may do; give --{key} on the command line")
    return {str(options[key].name): value for key, value in given.items()}


def _similar(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f". Did you mean '{close[0]}'?" if close else f"; known: {', '.join(sorted(known))}"
