"""The output of commands: the console, lines without markup, and a progress bar."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

import click

import onnxfuse.interrupts as interrupts  # `from onnxfuse import` would import the pattern language
from onnxfuse.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from onnxfuse.steps import LeftOut, Progress

SECONDS_WITHOUT_PROGRESS: Final = 2.0  # a progress bar appears after this many seconds
SECONDS_BETWEEN_LINES: Final = 10.0  # between lines of progress in a pipe or a file
SOURCE: Final = re.compile(r" *\d* *\|")  # begins a line of code that an explanation quotes
CARETS: Final = re.compile(r" *\| *\^")  # begins the line below it
DOTS: Final = "..."
UNLIMITED: Final = 100_000  # columns; output into a pipe or a file is not wrapped


@functools.cache
def console(stderr: bool = False) -> Console:
    """Return rich's console on stdout or stderr; it wraps lines only on a terminal, or if COLUMNS is set."""
    import os

    from onnxfuse.printing import SafeConsole

    shown = SafeConsole(stderr=stderr, emoji=False)
    is_wide = not shown.is_terminal and "COLUMNS" not in os.environ
    return SafeConsole(stderr=stderr, emoji=False, width=UNLIMITED) if is_wide else shown


def echo(text: str, err: bool = False) -> None:
    """Print lines without markup, on stdout or stderr; with --quiet on stderr alone."""
    if err or not is_quiet():
        click.echo(printable(text, keep="\n"), err=err)


def is_quiet() -> bool:
    """Return whether the running command has --quiet."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(QUIET))


def show_text(text: str) -> None:
    """Print lines without markup; on a terminal, a long one goes on under its first word, and quoted code is cut."""
    from onnxfuse.printing import Line, escape

    lines = text.splitlines()
    for number, line in enumerate(lines):
        words = line.lstrip()
        if SOURCE.match(line):
            marks = next((each for each in lines[number : number + 2] if CARETS.match(each)), line)
            echo(_cut(line, marks, console().width))
        else:
            console().print(Line(escape(words), line[: len(line) - len(words)]))


def _cut(line: str, marks: str, width: int) -> str:
    """Return a line of quoted code, or the line of carets below it, without what does not fit into `width` columns.

    `marks` is the line of carets.  The first caret, and as many others as fit, are kept.
    """
    margin, first, end = line.index("|") + 2, marks.find("^"), len(marks)
    from_left = 0 if end <= width - len(DOTS) else min(first - margin - len(DOTS), end - width + len(DOTS))
    kept = line[margin:]
    if from_left > 0:
        kept = (DOTS if line is not marks else " " * len(DOTS)) + kept[from_left + len(DOTS) :]
    if margin + len(kept) > width:
        kept = kept[: width - margin] if line is marks else kept[: width - margin - len(DOTS)] + DOTS
    return line[:margin] + kept


json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON, on stdout.")


def print_json(value: object) -> None:
    """Print a value of dataclasses, mappings and sequences as JSON; a number that JSON lacks becomes null."""
    from onnxfuse.printing import finite

    def plain(part: object) -> object:
        if is_dataclass(part) and not isinstance(part, type):
            return {each.name: plain(getattr(part, each.name)) for each in fields(part)}
        if isinstance(part, Mapping):
            return {str(key): plain(each) for key, each in part.items()}
        return [plain(each) for each in part] if isinstance(part, list | tuple) else finite(part)

    click.echo(json.dumps(plain(value), indent=2))


def make_safe() -> None:
    """Escape control characters in text that bypasses the console on stderr, such as warnings and tracebacks."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())
    format_warning = warnings.formatwarning
    warnings.formatwarning = lambda *parts, **more: printable(format_warning(*parts, **more), keep="\n")
    sys.excepthook = _print_traceback


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n")


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace)), keep="\n"))


def was_printing(error: OSError) -> bool:
    """Return whether an error was raised while printing, for example because the output pipe was closed."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return Path(raised_in).parent.name in ("rich", "click")


DEBUG: Final = "onnxfuse.debug"  # the key of --debug in click's `meta`, which a command and its group share


def _remember(context: click.Context, option: click.Parameter, value: bool) -> None:
    context.meta[DEBUG] = value or is_debugging(context)


debug_option = click.Option(
    ["--debug"], is_flag=True, expose_value=False, callback=_remember, help="Print the tracebacks of errors."
)


QUIET: Final = "onnxfuse.quiet"


def _remember_quiet(context: click.Context, option: click.Parameter, value: bool) -> None:
    context.meta[QUIET] = value or bool(context.meta.get(QUIET))
    if context.meta[QUIET] or console.cache_info().currsize:  # making a console takes long, which --help does not need
        console().quiet = context.meta[QUIET]


def _show_log(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Print what the library logs on stderr until the command ends."""
    log = logging.getLogger("onnxfuse")
    if value and not any(isinstance(each.formatter, _PrintableFormatter) for each in log.handlers):
        handler, level = logging.StreamHandler(), log.level
        handler.setFormatter(_PrintableFormatter())
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        context.call_on_close(partial(log.removeHandler, handler))
        context.call_on_close(partial(log.setLevel, level))


shared_options: Final = (
    click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_remember_quiet,
        help="Print errors, JSON and nothing else.",
    ),
    click.Option(
        ["-v", "--verbose"], is_flag=True, expose_value=False, callback=_show_log,
        help="Print what the logger `onnxfuse` says, on stderr: how nodes run, and why.",
    ),
    debug_option,
)  # fmt: skip


def is_debugging(context: click.Context) -> bool:
    """Return whether --debug was given."""
    return bool(context.meta.get(DEBUG))


def show_tracebacks(left_out: Iterable[LeftOut]) -> None:
    """If --debug was given, print the tracebacks of optimization steps that failed and were left out."""
    for one in left_out if is_debugging(click.get_current_context()) else ():
        echo(one.traceback, err=True)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Show progress on stderr: a bar on a terminal; in a pipe or file, a line every SECONDS_BETWEEN_LINES seconds."""
    shows = nullcontext(_nothing) if is_quiet() else _bar() if console(stderr=True).is_terminal else _lines()
    with shows as show:

        def shown(stage: str, done: int, of: int) -> None:
            if interrupts.seen():  # Ctrl-C was pressed, but some code swallowed the KeyboardInterrupt
                raise KeyboardInterrupt
            show(stage, done, of)

        yield shown


def _nothing(stage: str, done: int, of: int) -> None:
    """Show no progress."""


@contextmanager
def _bar() -> Iterator[Progress]:
    """Show a bar after SECONDS_WITHOUT_PROGRESS seconds of work; it pulses while the amount of work is unknown."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Bar(*columns, console=console(stderr=True), transient=True)
    shown, task = "load", bar.add_task("load", total=None)

    def show(stage: str, done: int, of: int) -> None:
        """Show progress of a stage; each stage has its own bar."""
        nonlocal shown, task
        if stage != shown or not of:
            bar.remove_task(task)
            shown, task = stage, bar.add_task(stage, total=None)
        bar.update(task, completed=done, total=of or None)

    timer = threading.Timer(SECONDS_WITHOUT_PROGRESS, bar.start)
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:  # stopping prints a newline
            bar.stop()


@contextmanager
def _lines() -> Iterator[Progress]:
    """Print a line with the present stage, and how much of it is done, every SECONDS_BETWEEN_LINES seconds."""
    started, ended, latest = time.monotonic(), threading.Event(), ("load", 0, 0)

    def show(stage: str, done: int, of: int) -> None:
        nonlocal latest
        latest = stage, done, of

    def print_lines() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            stage, done, of = latest
            amount = f", {done} of {of}" if of else ""
            echo(f"{time.monotonic() - started:.0f} s: {stage}{amount}", err=True)

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()
