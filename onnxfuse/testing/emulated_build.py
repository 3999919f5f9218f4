"""Compile kernels as C++ for the CPU: each text is compiled once, and so is the code that many texts share.

That is the headers of the standard library, which are compiled to one header, and the .cc file next to a header of
`header_folders`: a text that includes the header is linked to its object file.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import itertools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from onnxfuse.errors import KernelError
from onnxfuse.runtime.build_native import compiler

header_folders = [Path(__file__).parent / "native"]  # in the order in which headers are looked up
# Fortified, longjmp would refuse to go to the stack of another coroutine.
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-U_FORTIFY_SOURCE")
STANDARD = re.compile(r"(?m)^#include <.*$")
DRAFT = "draft-"  # before the name of a file that is being built
folder: Path | None = None  # receives what is compiled, for all processes that name it; None for one of this process
_numbers = itertools.count()


def load(text: str, defines: Mapping[str, object], flags: Sequence[str], source: Path) -> ctypes.CDLL:
    """Compile the text, which is written to `source`, behind the definitions; load the library, which lies beside it.

    The definitions are not flags, because a compiled header is not used where a flag defines a word that it has.  A
    text that was compiled before is not compiled again, but copied, as each library has static variables of its own.

    Raises KernelError if there is no C++ compiler, or if it refuses the text.
    """
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    source.write_text(f"{macros}{text}")
    command, headers = _command(*flags), _headers(text)
    objects = [_object(path) for name in headers if (path := _header(name)).with_suffix(".cc").exists()]

    def build(target: Path) -> None:
        included = ["-include", str(_standard_library(command, list(headers.values())))]
        _run([*command, "-shared", *included, str(source), *map(str, objects), "-o", str(target)])

    target = source.with_name(f"{source.stem}-{next(_numbers)}.so")
    shutil.copyfile(_made_once((command, macros, text, headers, objects), ".so", build), target)
    return ctypes.CDLL(str(target))


def _headers(text: str) -> dict[str, str]:
    """Return the headers that a text includes, and those that they include: texts by name."""
    names = re.findall(r'(?m)^#include "(.*)"$', text)
    found = dict[str, str]()
    for name in names:
        found[name] = _header(name).read_text()
        names += [each for each in re.findall(r'(?m)^#include "(.*)"$', found[name]) if each not in names]
    return found


def _header(name: str) -> Path:
    return next(path for each in header_folders if (path := each / name).exists())


def _command(*flags: str) -> list[str]:
    """Return the compiler and its flags.  Raises KernelError if there is no C++ compiler."""
    found = compiler()
    if found is None:
        raise KernelError("kernels are emulated by a C++ compiler, and none was found; install g++ or clang++")
    return [found, *FLAGS, *(f"-I{each}" for each in header_folders), *flags]


def _run(command: Sequence[str]) -> None:
    """Run the compiler.  Raises KernelError, with its messages, if it fails."""
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise KernelError(f"the C++ compiler refuses an emulated kernel: {made.stderr.strip()}")


def _object(header: Path) -> Path:
    """Return the object file of the .cc file next to a header."""
    source = header.with_suffix(".cc")
    command, text = _command("-c", str(source)), source.read_text()
    return _made_once((command, text, _headers(text)), ".o", lambda to: _run([*command, "-o", str(to)]))


def _standard_library(command: Sequence[str], headers: Sequence[str]) -> Path:
    """Return a header, compiled by this command, that includes what these headers include in angles."""
    lines = [line for header in headers for line in STANDARD.findall(header)]

    def build(header: Path) -> None:
        header.write_text("\n".join([*lines, ""]))
        compiled = header.with_name(f"{header.name.removeprefix(DRAFT)}.gch")
        _run([*command, "-x", "c++-header", str(header), "-o", str(compiled)])

    return _made_once((command, lines), ".h", build)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="onnxfuse-emulated-")


def _made_once(key: object, suffix: str, build: Callable[[Path], object]) -> Path:
    """Return the file of a key, which the process that wants it first builds."""
    path = (folder or Path(_own_folder().name)) / f"{hashlib.sha256(repr(key).encode()).hexdigest()}{suffix}"
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which closing the file releases
        if not path.exists():
            draft = path.with_name(f"{DRAFT}{path.name}")
            build(draft)
            draft.replace(path)
    return path
