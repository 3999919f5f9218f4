"""Compile kernels as C++ for the CPU, with what they include of the standard library compiled once for a test run."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from onnxfuse.runtime.build_native import compiler

NATIVE = Path(__file__).parents[1] / "native"
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC")
STANDARD = re.compile(r"(?m)^#include <.*$")
folder = Path(tempfile.gettempdir())  # of the compiled headers; conftest.py names one that the run's processes share


def load(text: str, defines: Mapping[str, object], flags: Sequence[str], source: Path) -> ctypes.CDLL:
    """Compile the text, which is written to `source`, behind the definitions; load the library, which lies beside it.

    The definitions are not flags, because a compiled header is not used where a flag defines a word that it has.
    """
    found = compiler()
    if found is None:
        pytest.skip("needs a C++ compiler")
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    source.write_text(f"{macros}{text}")
    target = source.with_suffix(".so")
    standard = _standard_library(found, text, [*FLAGS, *flags])
    command = [found, *FLAGS, *flags, "-shared", f"-I{NATIVE}", "-include", standard, source, "-o", target]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


def _standard_library(found: str, text: str, flags: Sequence[str]) -> Path:
    """Return a header, compiled with these flags, that includes what the text's own headers include in angles."""
    names, lines = re.findall(r'(?m)^#include "(.*)"$', text), list[str]()
    for name in names:
        content = (NATIVE / name).read_text()
        names += [each for each in re.findall(r'(?m)^#include "(.*)"$', content) if each not in names]
        lines += STANDARD.findall(content)
    key = hashlib.sha256(repr((found, lines, flags)).encode()).hexdigest()
    header = folder / f"{key}.h"
    with (folder / f"{key}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # which closing the file releases
        if not header.exists():
            draft = folder / f"{key}.draft.h"
            draft.write_text("\n".join([*lines, ""]))
            subprocess.run([found, *flags, "-x", "c++-header", draft, "-o", folder / f"{key}.h.gch"], check=True)
            draft.replace(header)
    return header
