"""Compile kernels as C++ for the CPU: each text is compiled once, and so is the code that many texts share.

The shared code is the headers of the standard library, which are compiled to one header, and the .cc files next to
headers in `header_folders`: a text that includes such a header is linked to the object file.
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
# The fortified longjmp would refuse to jump to another coroutine's stack.  The macro is the include guard of
# the special functions of libstdc++: no kernel calls std::beta or the like, and g++ takes 35 ms for them each time.
FLAGS = ("-std=c++17", "-Og", "-w", "-fPIC", "-U_FORTIFY_SOURCE", "-D_GLIBCXX_BITS_SPECFUN_H")
STANDARD = re.compile(r"(?m)^#include <.*$")
DRAFT = "draft-"  # before the name of a file that is being built
folder: Path | None = None  # receives what is compiled, for all processes that name it; None for one of this process
_numbers = itertools.count()


def load(text: str, defines: Mapping[str, object], flags: Sequence[str], source: Path) -> ctypes.CDLL:
    """Write the definitions and then the text to `source`, compile it to a library next to it, and load the library.

    The definitions are not flags, because compilers skip a compiled header if a flag defines a word that occurs in it.
    A library of a text that was compiled before is copied, because each copy has static variables of its own.

    Raises KernelError if there is no C++ compiler, or if it refuses the text.
    """
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    source.write_text(f"{macros}{text}")
    command, headers = _command(*flags), _headers(text)
    objects = [_object(path) for name in headers if (path := _header(name)).with_suffix(".cc").exists()]

    def build(target: Path) -> None:
        included = ["-include", str(_standard_library(command, list(headers.values())))]
        _run([*command, "-shared", *_linker(), *included, str(source), *map(str, objects), "-o", str(target)])

    target = source.with_name(f"{source.stem}-{next(_numbers)}.so")
    shutil.copyfile(_built_once((command, macros, text, headers, objects), ".so", build), target)
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
    return [found, *FLAGS, *flags]


@functools.cache
def _linker() -> list[str]:
    """Return the flag for gold if it is installed: it links in 20 ms, GNU ld in 58, since it reads all of libstdc++."""
    return ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def _run(command: Sequence[str]) -> None:
    """Run the compiler, which looks for headers in `header_folders`.  Raises KernelError with its messages if it fails.

    `_built_once` compares the texts of headers in place of the folders, because another checkout has the same texts.
    """
    folders = [f"-I{each}" for each in header_folders]
    made = subprocess.run([*command, *folders], capture_output=True, text=True, check=False)
    if made.returncode:
        raise KernelError(f"the C++ compiler refuses an emulated kernel: {made.stderr.strip()}")


def _object(header: Path) -> Path:
    """Return the object file of the .cc file next to a header."""
    source = header.with_suffix(".cc")
    command, text = _command("-c"), source.read_text()
    return _built_once((command, text, _headers(text)), ".o", lambda to: _run([*command, str(source), "-o", str(to)]))


def _standard_library(command: Sequence[str], headers: Sequence[str]) -> Path:
    """Return a header, compiled by this command, that includes what these headers include in angles."""
    lines = [line for header in headers for line in STANDARD.findall(header)]

    def build(header: Path) -> None:
        header.write_text("\n".join([*lines, ""]))
        compiled = header.with_name(f"{header.name.removeprefix(DRAFT)}.gch")
        _run([*command, "-x", "c++-header", str(header), "-o", str(compiled)])

    return _built_once((command, lines), ".h", build)


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="onnxfuse-emulated-")


def _built_once(key: object, suffix: str, build: Callable[[Path], object]) -> Path:
    return made_once(folder or Path(_own_folder().name), (_compiler_version(), key), suffix, build)


@functools.cache
def _compiler_version() -> str:
    return subprocess.run([*_command()[:1], "--version"], capture_output=True, text=True, check=False).stdout


def made_once(folder: Path, key: object, suffix: str, build: Callable[[Path], object]) -> Path:
    """Return the file of a key in a folder; the first process that needs the file builds it, and others wait for it.

    A build that fails leaves no such file.
    """
    path = folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}{suffix}"
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which closing the file releases
        if not path.exists():
            draft = path.with_name(f"{DRAFT}{path.name}")
            build(draft)
            draft.replace(path)
    return path
