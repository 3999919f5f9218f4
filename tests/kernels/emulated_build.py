"""Compile kernels as C++ for the CPU: each text once for a test run, and once what many texts need.

These are the headers of the standard library, which are compiled to one header, and the .cc file that a header of
tests/native may have beside it: a text that includes the header is linked to its object file.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from onnxfuse.runtime.build_native import compiler

NATIVE = Path(__file__).parents[1] / "native"
# Fortified, longjmp would refuse to go to the stack of another coroutine.
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE")
STANDARD = re.compile(r"(?m)^#include <.*$")
DRAFT = "draft-"  # before the name of a file that is being built
folder = Path(tempfile.gettempdir())  # of what is compiled; conftest.py names one that the run's processes share
_numbers = itertools.count()


def load(text: str, defines: Mapping[str, object], flags: Sequence[str], source: Path) -> ctypes.CDLL:
    """Compile the text, which is written to `source`, behind the definitions; load the library, which lies beside it.

    The definitions are not flags, because a compiled header is not used where a flag defines a word that it has.  A
    text that was compiled before is not compiled again, but copied, as each library has static variables of its own.
    """
    found = compiler()
    if found is None:
        pytest.skip("needs a C++ compiler")
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    source.write_text(f"{macros}{text}")
    command, headers = [found, *FLAGS, *flags], _headers(text)
    objects = [_object(found, path) for name in headers if (path := NATIVE / name).with_suffix(".cc").exists()]

    def build(target: Path) -> None:
        included = ["-include", _standard_library(command, list(headers.values()))]
        subprocess.run([*command, "-shared", f"-I{NATIVE}", *included, source, *objects, "-o", target], check=True)

    target = source.with_name(f"{source.stem}-{next(_numbers)}.so")
    shutil.copyfile(_made_once((command, macros, text, headers, objects), ".so", build), target)
    return ctypes.CDLL(str(target))


def _headers(text: str) -> dict[str, str]:
    """Return the headers of tests/native that a text includes, and those that they include: texts by name."""
    names = re.findall(r'(?m)^#include "(.*)"$', text)
    found = dict[str, str]()
    for name in names:
        found[name] = (NATIVE / name).read_text()
        names += [each for each in re.findall(r'(?m)^#include "(.*)"$', found[name]) if each not in names]
    return found


def _object(compiler_: str, header: Path) -> Path:
    """Return the object file of the .cc file beside a header."""
    source = header.with_suffix(".cc")
    command, text = [compiler_, *FLAGS, "-c", str(source)], source.read_text()
    return _made_once(
        (command, text, _headers(text)), ".o", lambda to: subprocess.run([*command, "-o", to], check=True)
    )


def _standard_library(command: Sequence[str], headers: Sequence[str]) -> Path:
    """Return a header, compiled by this command, that includes what these headers include in angles."""
    lines = [line for header in headers for line in STANDARD.findall(header)]

    def build(header: Path) -> None:
        header.write_text("\n".join([*lines, ""]))
        compiled = header.with_name(f"{header.name.removeprefix(DRAFT)}.gch")
        subprocess.run([*command, "-x", "c++-header", header, "-o", compiled], check=True)

    return _made_once((command, lines), ".h", build)


def _made_once(key: object, suffix: str, build: Callable[[Path], object]) -> Path:
    """Return the file of a key, which the process that wants it first builds."""
    path = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}{suffix}"
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which closing the file releases
        if not path.exists():
            draft = path.with_name(f"{DRAFT}{path.name}")
            build(draft)
            draft.replace(path)
    return path
