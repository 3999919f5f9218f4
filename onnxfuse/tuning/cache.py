"""Store measurements on disk: each in a small file of its own, so that processes share them without locks."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from onnxfuse.ir.plain_files import read_plain
from onnxfuse.runtime.cache_folder import cache_folder, is_trusted, make_folder, warn_once
from onnxfuse.runtime.environment import Environment

FORMAT: Final = 1  # the version of the files' format
MAX_BYTES: Final = 2**24  # maximum size of a file; most have about 2 kB
SESSION_SETTINGS: Final = ("options", "optimization", "tf32")  # keys of an environment that describe the session
Data = Mapping[str, object]  # data that JSON can hold


@dataclass(frozen=True)
class Measurement:
    """The times of the variants (ways to run) of a node or model in one case (shapes and mode), and the chosen one."""

    case: Data
    chosen: str
    seconds: Mapping[str, float]
    measured: str  # the time of the measurement, as ISO 8601 in UTC


# Measurements that could not be written to disk.  The keys are `_subfolder` and the digest of the case.
_unwritten: Final[dict[str, dict[str, Measurement]]] = {}


def store(environment: Environment, subject: Data, case: Data, chosen: str, seconds: Mapping[str, float]) -> bool:
    """Write a measurement to disk; it replaces an earlier one of the same case.

    environment  the conditions that the times depend on besides subject and case
    subject      the measured node or model
    case         the shapes, and the mode
    seconds      the seconds of each variant; `chosen` is one of the variants

    If the file cannot be written, warns and returns False; the measurement is then kept in memory.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    measurement = Measurement(case, chosen, dict(seconds), now)
    unwritten = _unwritten.setdefault(_subfolder(environment, subject), {})
    if written := _write(measurement, environment, subject):
        unwritten.pop(_digest(case), None)
    else:
        unwritten[_digest(case)] = measurement
    return written


def _write(measurement: Measurement, environment: Environment, subject: Data) -> bool:
    folder = _folder(environment, subject)
    if folder is None:
        return False
    record = {"format": FORMAT, "environment": environment, "subject": subject, **asdict(measurement)}
    part = folder / f"{uuid.uuid4().hex}.part"  # not from tempfile, because other users cannot read its files
    try:
        make_folder(folder)
        with part.open("x", encoding="utf-8") as file:
            json.dump(record, file, indent=1, sort_keys=True, default=repr)
        part.replace(folder / f"{_digest(measurement.case)}.json")
        return True
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        what = f"measurements cannot be written to {cache_folder()}, they end with this process: {error.strerror}"
        warn_once(f"{what}; set ONNXFUSE_CACHE_DIR to another folder")
        return False


def lookup(environment: Environment, subject: Data) -> list[Measurement]:
    """Return the measurements of a subject in a fixed order; damaged files are ignored with a warning."""
    folder = _folder(environment, subject)
    try:
        paths = list(folder.glob("*.json")) if folder else []
    except OSError as error:
        warn_once(f"measurements cannot be read from {folder}: {error.strerror}")
        paths = []
    found = {path.stem: _read(path, environment, subject) for path in paths}
    found |= _unwritten.get(_subfolder(environment, subject), {})
    return [measurement for _, measurement in sorted(found.items()) if measurement]


def is_empty() -> bool:
    """Return whether there are no measurements at all, so that callers need not compute the arguments of `lookup`."""
    folder = _measurements()
    try:
        return not any(_unwritten.values()) and not (folder and any(folder.iterdir()))
    except OSError:  # the folder does not exist, or cannot be read
        return True


def lookup_case(environment: Environment, subject: Data, case: Data) -> Measurement | None:
    """Return the measurement of a subject in one case; None if there is none."""
    if unwritten := _unwritten.get(_subfolder(environment, subject), {}).get(_digest(case)):
        return unwritten
    folder = _folder(environment, subject)
    return _read(folder / f"{_digest(case)}.json", environment, subject) if folder else None


def _folder(environment: Environment, subject: Data) -> Path | None:
    folder = _measurements()
    return folder / _subfolder(environment, subject) if folder else None


def _measurements() -> Path | None:
    """Return the folder of all measurements; None, after a warning, if other users can write to it."""
    folder = cache_folder()
    return folder / "measurements" if folder and is_trusted(folder / "measurements") else None


def _subfolder(environment: Environment, subject: Data) -> str:
    return f"{_digest(environment)}/{_digest(subject)}"


def _read(path: Path, environment: Environment, subject: Data) -> Measurement | None:
    try:
        record = json.loads(read_plain(path, MAX_BYTES))
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']}, required {FORMAT}")
        if _digest([record["environment"], record["subject"]]) != _digest([environment, subject]):
            raise ValueError("it is about something else")
        if _digest(record["case"]) != path.stem:
            raise ValueError("it is about another case than its name says")
        seconds = {str(name): float(value) for name, value in record["seconds"].items()}
        if not all(math.isfinite(value) and value > 0 for value in seconds.values()):
            raise ValueError(f"its times are {seconds}")
        datetime.datetime.fromisoformat(record["measured"])
        return Measurement(record["case"], str(record["chosen"]), seconds, record["measured"])
    except (FileNotFoundError, NotADirectoryError):  # another process may have removed the file
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        warn_once(f"measurement {path} is ignored: {type(error).__name__}: {error}; it may be deleted")
        return None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def other_session_settings(here: Environment, subject: Data) -> Data | None:
    """Return session settings, other than those in `here`, with which the subject was measured; None if none.

    Only measurements whose environment equals `here` apart from these settings count.
    """
    folder = _measurements()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        for path in sorted(folder.glob(f"*/{_digest(subject)}/*.json")) if folder else ():
            there = json.loads(read_plain(path, MAX_BYTES))["environment"]
            if {**there, **(settings := {name: here[name] for name in SESSION_SETTINGS})} == dict(here):
                return {name: there[name] for name in SESSION_SETTINGS if there[name] != settings[name]}
    return None
