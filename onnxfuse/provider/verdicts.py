"""What was measured on this machine, on disk: a small file per verdict, shared by processes that know no locks."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import logging
import math
import os
import re
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import onnxfuse.kernels
from onnxfuse.provider.compile import cupy_module
from onnxfuse.provider.plan import Device

log: Final = logging.getLogger("onnxfuse")
FORMAT: Final = 1
Environment = Mapping[str, str | int | bool]
SOURCES: Final = {".py", ".cu", ".cuh"}  # of kernels
LIBRARIES: Final = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")
ALL_OPTIMIZATIONS: Final = "ORT_ENABLE_ALL"  # onnxruntime's default
FLAGS: Final = {"True": "1", "true": "1", "False": "0", "false": "0"}  # as onnxruntime reads them
DEFAULTS: Final = {"cudnn_conv_algo_search": "EXHAUSTIVE", "cudnn_conv_use_max_workspace": "1"}  # all others are "0"
NOT_OF_KERNELS: Final = {
    "device_id", "use_tf32", "enable_cuda_graph",  # which `environment` and the mode of a verdict say
    "user_compute_stream", "has_user_compute_stream", "use_ep_level_unified_stream", "do_copy_in_default_stream",
    "gpu_mem_limit", "arena_extend_strategy", "default_memory_arena_cfg",
    "gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache",
}  # fmt: skip
OF_SESSION: Final = ("options", "optimization", "tf32")  # of an environment, what a session decides
DRIVER: Final = Path("/proc/driver/nvidia/version")
_told: Final[set[str]] = set()


@dataclass(frozen=True)
class Verdict:
    """What ran how long in one case, such as at one combination of shapes, and what was chosen."""

    case: Any
    chosen: str
    seconds: Mapping[str, float]
    measured: str  # ISO 8601, UTC


_unwritten: Final[dict[str, dict[str, Verdict]]] = {}  # by subject and case, for as long as this process lives


def keep(environment: Environment, subject: Any, case: Any, chosen: str, seconds: Mapping[str, float]) -> bool:
    """Write a verdict over an earlier one of the same case.

    False, and a log line, where that fails: the verdict then lasts as long as this process. `subject` and `case` are
    plain data: what was measured, and at which shapes.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    verdict = Verdict(case, chosen, dict(seconds), now)
    unwritten = _unwritten.setdefault(_place(environment, subject), {})
    if written := _write(verdict, environment, subject):
        unwritten.pop(_digest(case), None)
    else:
        unwritten[_digest(case)] = verdict
    return written


def _write(verdict: Verdict, environment: Environment, subject: Any) -> bool:
    folder = _folder(environment, subject)
    if folder is None:
        return False
    record = {"format": FORMAT, "environment": environment, "subject": subject, **asdict(verdict)}
    part = folder / f"{uuid.uuid4().hex}.part"  # not a tempfile, which no other user may read
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with part.open("x", encoding="utf-8") as file:
            json.dump(record, file, indent=1, sort_keys=True, default=repr)
        part.replace(folder / f"{_digest(verdict.case)}.json")
        return True
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        what = f"verdicts cannot be written to {cache_folder()}, they end with this process: {error.strerror}"
        _tell(f"{what}; set ONNXFUSE_CACHE_DIR to another folder")
        return False


def recall(environment: Environment, subject: Any) -> list[Verdict]:
    """The verdicts of a subject, in a fixed order; files that are damaged count as absent, with a log line."""
    folder = _folder(environment, subject)
    try:
        paths = list(folder.glob("*.json")) if folder else []
    except OSError as error:
        _tell(f"verdicts cannot be read from {folder}: {error.strerror}")
        paths = []
    found = {path.stem: _read(path, environment, subject) for path in paths}
    found |= _unwritten.get(_place(environment, subject), {})
    return [verdict for _, verdict in sorted(found.items()) if verdict]


def recall_case(environment: Environment, subject: Any, case: Any) -> Verdict | None:
    """The verdict of a subject in one case."""
    if unwritten := _unwritten.get(_place(environment, subject), {}).get(_digest(case)):
        return unwritten
    folder = _folder(environment, subject)
    return _read(folder / f"{_digest(case)}.json", environment, subject) if folder else None


def cache_folder() -> Path | None:
    """Where verdicts are: $ONNXFUSE_CACHE_DIR, or onnxfuse in $XDG_CACHE_HOME or ~/.cache; None without a home."""
    if chosen := os.environ.get("ONNXFUSE_CACHE_DIR"):
        return Path(chosen)
    standard = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if standard.is_absolute():  # the specification has relative ones ignored
        return standard / "onnxfuse"
    try:
        return Path.home() / ".cache" / "onnxfuse"
    except RuntimeError as error:
        _tell(f"verdicts are not kept: {error}; set ONNXFUSE_CACHE_DIR to a folder")
        return None


def _folder(environment: Environment, subject: Any) -> Path | None:
    cache = cache_folder()
    return cache / "verdicts" / _place(environment, subject) if cache else None


def _place(environment: Environment, subject: Any) -> str:
    return f"{_digest(environment)}/{_digest(subject)}"


def _read(path: Path, environment: Environment, subject: Any) -> Verdict | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
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
        return Verdict(record["case"], str(record["chosen"]), seconds, record["measured"])
    except (FileNotFoundError, NotADirectoryError):  # another process may tidy up
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _tell(f"verdict {path} is ignored: {type(error).__name__}: {error}; it may be deleted")
        return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _tell(message: str) -> None:
    """Once: a model has hundreds of nodes."""
    if message not in _told:
        _told.add(message)
        log.warning(message)


# --- what times depend on besides node and shapes --------------------------------------------------------------------


def of_other_options(here: Environment, subject: Any) -> dict[str, Any] | None:
    """The settings of a session under which there are verdicts of a subject, where there are none under these."""
    cache = cache_folder()
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        for path in sorted(cache.glob(f"verdicts/*/{_digest(subject)}/*.json")) if cache else ():
            there = json.loads(path.read_text(encoding="utf-8"))["environment"]
            if {**there, **(settings := {name: here[name] for name in OF_SESSION})} == dict(here):
                return {name: there[name] for name in OF_SESSION if there[name] != settings[name]}
    return None


def environment(provider: str, device: Device) -> Environment:
    """GPU, driver, libraries, the kernels' sources and the session's settings; other values, other verdicts."""
    return {
        "provider": provider,
        "gpu": device.name,
        "arch": device.arch,
        "multiprocessors": device.multiprocessors,
        "tf32": device.tf32,
        "driver": driver_version(),
        "cuda": cuda_version(),
        "libraries": library_versions(),
        "onnxfuse": onnxfuse.__version__,
        "onnxruntime": import_module("onnxruntime").__version__,
        "kernels": _sources(tuple(onnxfuse.kernels.__path__)),
    }


def session_environment(
    provider: str, device: Device, options: Mapping[str, Any], optimization: str = ALL_OPTIMIZATIONS
) -> Environment:
    """`environment`, and what decides which kernels onnxruntime has for bodies: options of the provider, optimization.

    Options that name memory, streams or the device, and those that are at their default, do not.
    """
    texts = {name: FLAGS.get(str(value), str(value)) for name, value in options.items() if name not in NOT_OF_KERNELS}
    changed = {name: text for name, text in texts.items() if text != DEFAULTS.get(name, "0")}
    of_session = {"options": json.dumps(changed, sort_keys=True), "optimization": optimization}
    return {**environment(provider, device), **of_session}


@functools.cache
def driver_version() -> str:
    """Of the NVIDIA driver; empty where there is none."""
    with suppress(OSError):
        if found := re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text(encoding="utf-8", errors="replace")):
            return found[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


@functools.cache
def cuda_version() -> str:
    """Of the CUDA runtime and compiler that kernels are made with; empty where there is none."""
    try:
        cuda = cupy_module().cuda
        return f"{cuda.runtime.runtimeGetVersion()} nvrtc {'.'.join(map(str, cuda.nvrtc.getVersion()))}"
    except Exception:  # CuPy's own errors have no common class
        return ""


@functools.cache
def library_versions() -> str:
    """Of cuBLAS and cuDNN, which bodies and plans call, where they are Python packages; empty where they are not."""
    found = []
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


@functools.cache
def _sources(folders: tuple[str, ...]) -> str:
    """A digest of the kernels and their hosts: a verdict about others means nothing."""
    files = sorted(path for folder in folders for path in Path(folder).glob("*.*") if path.suffix in SOURCES)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:16]
